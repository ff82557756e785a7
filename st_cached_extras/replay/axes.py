"""How one entry of a feature dict is cut by rows.

A feature dict mixes tensors over rows, tokens, images, videos, visual patches and settings of the whole batch. Each
entry gets one of the axes below, which takes any list of rows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class LayoutError(ValueError):
    """An entry of a feature dict whose rows cannot be told for sure; the message names it, and the way out."""


class Axis(Protocol):
    """One way of being cut by rows."""

    def take(self, value: Any, rows: Tensor) -> Any | None:
        """What belongs to ``rows`` (int64 [n] on the CPU) of ``value``; None if nothing does."""


@dataclass
class Layout:
    """One column of inputs, seen as rows.

    Attributes:
        count: number of rows B.
        axes: how each entry is cut.
        lengths: tokens computed for every row, int64 [B] on the CPU; None if rows have no tokens.
        is_padded: whether a mini-batch is as wide as its longest row; otherwise it is as long as the sum of them.
        patches: visual patches of every row, int64 [B]; None if there are none or their number is not known.
    """

    count: int
    axes: dict[str, Axis] = field(default_factory=dict)
    lengths: Tensor | None = None
    is_padded: bool = True
    patches: Tensor | None = None


class Setting:
    """Of the whole batch: the same for any rows."""

    def take(self, value: Any, rows: Tensor) -> Any:
        return value


class Unseen:
    """For the layout alone, not for the model."""

    def take(self, value: Any, rows: Tensor) -> None:
        return None


class Rows:
    """One entry per row on the first axis."""

    def take(self, value: Tensor, rows: Tensor) -> Tensor:
        return value.index_select(0, to_device(rows, value.device))


@dataclass(frozen=True)
class RowsWithItems(Rows):
    """One entry per row on the first axis, empty in rows without items.

    Attributes:
        items: int64 [B], how many each row has.
    """

    items: Tensor

    def take(self, value: Tensor, rows: Tensor) -> Tensor | None:
        return super().take(value, rows) if bool(self.items[rows].any()) else None


@dataclass(frozen=True)
class Tokens:
    """Rows on the first axis, tokens on the second, of which the padding common to all taken rows is cut off.

    Attributes:
        first: int64 [B], each row's first position to keep; 0 to keep leading padding.
        end: int64 [B], each row's last active position + 1; 0 in a row without any active token.
        width: tokens of the whole batch.
        multiple: padding is left so that the tokens are a multiple of this, as far as there is any.
    """

    first: Tensor
    end: Tensor
    width: int
    multiple: int = 1

    def take(self, value: Tensor, rows: Tensor) -> Tensor:
        # Rows without a single active token say nothing, and alone keep the whole width, as in ST.
        end = int(self.end[rows].max())
        begin, end = (int(self.first[rows].min()), end) if end else (0, self.width)
        tokens = self.rounded(end - begin)
        end = min(begin + tokens, self.width)
        begin = end - tokens
        return value[:, begin:end].index_select(0, to_device(rows, value.device))

    def rounded(self, lengths: Any) -> Any:
        """Lengths, or one, as they are computed: up to the next multiple, or the whole width."""
        up = (lengths + self.multiple - 1) // self.multiple * self.multiple
        return up.clamp(max=self.width) if isinstance(up, Tensor) else min(up, self.width)


@dataclass(frozen=True)
class Segments:
    """A run of entries per row, on the first or the last axis: its images, videos, visual patches or tokens.

    Attributes:
        starts: int64 [B], where each row's run begins.
        counts: int64 [B], its length; 0 where the row has none.
        dim: the axis, 0 or -1.
    """

    starts: Tensor
    counts: Tensor
    dim: int = 0

    @classmethod
    def of(cls, counts: Tensor, dim: int = 0) -> Segments:
        """Runs of the given lengths that follow one another in row order."""
        return cls(counts.cumsum(0) - counts, counts, dim)

    def indices(self, rows: Tensor) -> Tensor:
        """int64 [entries]: where the entries of ``rows`` stand, row after row."""
        counts = self.counts[rows]
        ends = counts.cumsum(0)
        total = int(ends[-1])
        # Entry e of the result, in the run of row r, stands at starts[r] + (e - the entries before that run).
        shifts = self.starts[rows] - (ends - counts)
        return shifts.repeat_interleave(counts, output_size=total) + torch.arange(total)

    def take(self, value: Tensor | list | tuple, rows: Tensor) -> Tensor | list | None:
        indices = self.indices(rows)
        if not len(indices):
            return None  # as in ST, the key vanishes from rows that have none
        if isinstance(value, Tensor):
            return value.index_select(self.dim, to_device(indices, value.device))
        return [value[index] for index in indices.tolist()]


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Small integer tensors as int64 on the CPU, in one transfer."""
    if not tensors:
        return {}
    flat = torch.cat([tensor.detach().long().flatten() for tensor in tensors.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def to_device(indices: Tensor, device: torch.device) -> Tensor:
    """Row indices on another device, without waiting for it: what is not pinned, the host may wait for."""
    if device.type == "cuda" and indices.device.type == "cpu" and not indices.is_pinned():
        indices = indices.pin_memory()
    return indices.to(device, non_blocking=True)


def described(value: Any) -> str:
    """What an entry is, for messages: a tensor's shape, or a type."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
