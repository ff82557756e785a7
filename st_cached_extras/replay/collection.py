"""One batch of features while it is collected: validated mini-batch by mini-batch, held once.

Every mini-batch is checked before anything of it is stored, so that one that does not fit leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from st_cached_extras.objectives.base import Objective


class Collection:
    """Features of up to ``target`` rows by branch, and what is known of them.

    Args:
        objective: says which branches, of which shapes, and whether there is a reference.
        target: rows of a whole batch.
        differentiated: rows of it that may be selected.
        align_ids: with a reference, sample ids must be given on both sides and in step.

    Attributes:
        count: rows so far.
        reference_count: reference rows so far.
        bounds: (first row, last row + 1) of every mini-batch.
        sample_ids: ids of every mini-batch's rows.
    """

    def __init__(self, objective: Objective, target: int, differentiated: int, align_ids: bool) -> None:
        self._objective, self._target, self._differentiated, self._align_ids = (
            objective,
            target,
            differentiated,
            align_ids,
        )
        self._buffers: dict[str, Tensor] = {}
        self._reference: list[dict[str, Tensor]] = []
        self._masks: list[Tensor] = []
        self.bounds: list[tuple[int, int]] = []
        self.sample_ids: list[tuple[str, ...]] = []

    # ---------------------------------------------------------------------------------------------- contents

    @property
    def count(self) -> int:
        return self.bounds[-1][1] if self.bounds else 0

    @property
    def reference_count(self) -> int:
        return sum(len(next(iter(features.values()))) for features in self._reference)

    @property
    def has_masks(self) -> bool:
        return bool(self._masks)

    @property
    def has_ids(self) -> bool:
        return any(self.sample_ids)

    @property
    def device(self) -> torch.device:
        return next(iter(self._buffers.values())).device

    @property
    def features(self) -> dict[str, Tensor]:
        """By branch, [count, ...]."""
        return {name: buffer[: self.count] for name, buffer in self._buffers.items()}

    @property
    def reference(self) -> dict[str, Tensor] | None:
        """By branch, [reference_count, ...]; None without a reference."""
        if not self._reference:
            return None
        return {name: torch.cat([batch[name] for batch in self._reference]) for name in self._reference[0]}

    def masked_rows(self) -> Tensor:
        """int64, the rows that the masks select."""
        return torch.cat(self._masks).nonzero().flatten()

    def mini_batches_of(self, rows: Tensor) -> tuple[int, ...]:
        """The mini-batches that hold any of the given rows."""
        ends = torch.tensor([end for _, end in self.bounds])
        return tuple(torch.searchsorted(ends, rows, right=True).unique().tolist())

    def per_mini_batch(
        self, cotangents: Mapping[str, Tensor], rows: Tensor, batches: Sequence[int]
    ) -> tuple[dict[str, Tensor], ...]:
        """Cotangents [b, ...] of the selected rows as one mapping per mini-batch, in its shape, zeros elsewhere."""
        of_batches: list[dict[str, Tensor]] = []
        for batch in batches:
            begin, end = self.bounds[batch]
            here = ((rows >= begin) & (rows < end)).nonzero().flatten()
            inside = rows[here] - begin
            of_batch = {}
            for name, cotangent in cotangents.items():
                of_batch[name] = cotangent.new_zeros((end - begin, *cotangent.shape[1:]))
                of_batch[name][inside.to(cotangent.device)] = cotangent[here.to(cotangent.device)]
            of_batches.append(of_batch)
        return tuple(of_batches)

    def on_cpu(self) -> Collection:
        """The same contents with every tensor on the CPU, pinned where there is an accelerator."""
        moved = copy.copy(self)
        moved._buffers = {name: to_cpu(buffer) for name, buffer in self._buffers.items()}
        moved._reference = [{name: to_cpu(x) for name, x in features.items()} for features in self._reference]
        return moved

    # --------------------------------------------------------------------------------------------- additions

    def add(
        self,
        features: Mapping[str, Tensor],
        reference: Mapping[str, Tensor] | None,
        selected: Tensor | None,
        sample_ids: Sequence[str] | None,
        reference_sample_ids: Sequence[str] | None,
    ) -> int:
        """Check one mini-batch, then store it; returns its index."""
        rows = self._check_features("features", features, self._names(features))
        if self.count + rows > self._target:
            raise ValueError(
                f"The batch holds {self.count} of {self._target} rows, and this mini-batch has {rows}: too many. "
                "finalize() the batch first, or make its last mini-batch smaller."
            )
        self._check_reference(features, reference)
        mask = self._checked_mask(selected, rows)
        ids = _checked_ids("sample_ids", sample_ids, rows)
        if reference is not None:
            reference_rows = len(next(iter(reference.values())))
            reference_ids = _checked_ids("reference_sample_ids", reference_sample_ids, reference_rows)
            if self._align_ids:
                _check_aligned(ids, reference_ids)

        if not self._buffers:
            self._buffers = {
                name: torch.empty((self._target, *x.shape[1:]), dtype=x.dtype, device=x.device)
                for name, x in features.items()
            }
        begin = self.count
        for name, x in features.items():
            self._buffers[name][begin : begin + rows] = x.detach()
        if reference is not None:
            self._reference.append({name: x.detach().clone() for name, x in reference.items()})
        if mask is not None:
            self._masks.append(mask)
        self.sample_ids.append(ids or ())
        self.bounds.append((begin, begin + rows))  # last: only now the mini-batch is there
        return len(self.bounds) - 1

    def check_complete(self) -> None:
        """Raise unless all rows are there and as many are selected as were announced."""
        if self.count != self._target:
            raise ValueError(f"The batch is incomplete: it holds {self.count} of {self._target} rows. add() the rest.")
        if self.has_masks and len(self.masked_rows()) != self._differentiated:
            raise ValueError(
                f"The masks select {len(self.masked_rows())} rows, and differentiated_local_samples is "
                f"{self._differentiated}. Select exactly as many."
            )

    def check_replayed(self, features: Mapping[str, Tensor], batch: int) -> None:
        """Raise unless features of a mini-batch that was run again have the branches and shapes of the first pass."""
        begin, end = self.bounds[batch]
        _check_branches("features of the replay", features, tuple(self._buffers))
        for name, x in features.items():
            expected = [end - begin, *self._buffers[name].shape[1:]]
            if list(x.shape) != expected:
                raise ValueError(f"branch {name!r} came back as {list(x.shape)}, and was added as {expected}")

    def _names(self, features: Mapping[str, Tensor]) -> tuple[str, ...]:
        return tuple(self._buffers) or self._objective.names or tuple(features)

    def _check_features(self, argument: str, features: Mapping[str, Tensor], names: tuple[str, ...]) -> int:
        """Branches, types, shapes, device and finiteness; returns the number of rows."""
        _check_branches(argument, features, names)
        first = next(iter(features))
        for name, x in features.items():
            if not isinstance(x, Tensor) or not x.is_floating_point():
                found = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{argument}: branch {name!r} must be a floating-point tensor, got {found}.")
            if x.ndim == 0 or x.numel() == 0:
                raise ValueError(
                    f"{argument}: branch {name!r} is empty, of shape {list(x.shape)}: expected [rows, ...]."
                )
            if len(x) != len(features[first]):
                raise ValueError(
                    f"{argument}: branch {name!r} has {len(x)} rows, and {first!r} has {len(features[first])}. Every "
                    "branch must hold the same rows."
                )
            buffer = self._buffers.get(name)
            device = features[first].device if buffer is None else buffer.device
            if x.device != device:
                raise ValueError(f"{argument}: branch {name!r} is on {x.device}, and the batch on {device}.")
            if buffer is not None and argument == "features" and x.dtype != buffer.dtype:
                raise TypeError(f"{argument}: branch {name!r} is {x.dtype}, and was {buffer.dtype} before.")
            self._check_shape(argument, name, x)
        # All branches together: every look at a device waits for it.
        if not torch.stack([x.detach().isfinite().all() for x in features.values()]).all():
            for name, x in features.items():
                bad = (~x.detach().isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()
                if bad:
                    rows = ", ".join(map(str, bad))
                    raise ValueError(f"{argument}: branch {name!r} is not finite in row(s) {rows}.")
        return len(features[first])

    def _check_shape(self, argument: str, name: str, x: Tensor) -> None:
        expected = (self._objective.sample_shapes or {}).get(name)
        if expected is None and name in self._buffers:
            expected = tuple(self._buffers[name].shape[1:])
        if expected is not None and tuple(x.shape[1:]) != tuple(expected):
            raise ValueError(
                f"{argument}: a row of branch {name!r} must have the shape {list(expected)}, got {list(x.shape[1:])}."
            )

    def _check_reference(self, features: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None) -> None:
        if not self._objective.uses_reference:
            if reference is not None:
                raise ValueError(
                    f"{type(self._objective).__name__} uses no current reference: leave reference_features out."
                )
            return
        if reference is None:
            raise ValueError(
                f"{type(self._objective).__name__} needs reference_features with every mini-batch, of the branches "
                f"{', '.join(features)}."
            )
        self._check_features("reference_features", reference, tuple(features))
        for name, x in reference.items():
            if x.shape[1:] != features[name].shape[1:]:
                raise ValueError(
                    f"reference_features: a row of branch {name!r} has the shape {list(x.shape[1:])}, and one of the "
                    f"features {list(features[name].shape[1:])}."
                )

    def _checked_mask(self, selected: Tensor | None, rows: int) -> Tensor | None:
        if (selected is not None) != self.has_masks and self.bounds:
            raise ValueError("selected must be given for all mini-batches of a batch, or for none.")
        if selected is None:
            return None
        if not isinstance(selected, Tensor) or selected.dtype != torch.bool or list(selected.shape) != [rows]:
            found = f"{selected.dtype} {list(selected.shape)}" if isinstance(selected, Tensor) else repr(selected)
            raise TypeError(f"selected must be a bool tensor [{rows}], got {found}.")
        total = sum(int(mask.sum()) for mask in self._masks) + int(selected.sum())
        if total > self._differentiated:
            raise ValueError(
                f"selected: {total} rows are selected so far, and differentiated_local_samples is "
                f"{self._differentiated}: too many."
            )
        return selected.detach().cpu().clone()


def _check_branches(argument: str, features: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in features]
    extra = [name for name in features if name not in names]
    if missing or extra or not features:
        raise ValueError(
            f"{argument} must have the branches {', '.join(names) or 'of the objective'}: missing are "
            f"{', '.join(missing) or 'none'}, and not expected are {', '.join(extra) or 'none'}."
        )


def _checked_ids(argument: str, ids: Sequence[str] | None, rows: int) -> tuple[str, ...] | None:
    if ids is None:
        return None
    if isinstance(ids, str) or not all(isinstance(one, str) for one in ids):
        raise TypeError(f"{argument} must be a sequence of strings, one per row, got {ids!r}.")
    if len(ids) != rows:
        raise ValueError(f"{argument} must hold one id per row: got {len(ids)} for {rows} rows.")
    if empty := [index for index, one in enumerate(ids) if not one]:
        raise ValueError(f"{argument} is empty in row(s) {', '.join(map(str, empty))}.")
    return tuple(ids)


def _check_aligned(ids: tuple[str, ...] | None, reference_ids: tuple[str, ...] | None) -> None:
    way = "Give both, or construct with require_sample_id_alignment=False."
    for argument, given in (("sample_ids", ids), ("reference_sample_ids", reference_ids)):
        if given is None:
            raise ValueError(
                f"{argument} is missing: features and reference must be shown to be of the same samples. {way}"
            )
    if ids != reference_ids:
        pairs = enumerate(zip_longest(ids, reference_ids))
        row, (one, other) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"sample_ids and reference_sample_ids are out of step from row {row} on: {one!r} and {other!r}. {way}"
        )


def to_cpu(x: Tensor) -> Tensor:
    """A copy in pinned memory, filled asynchronously, of a tensor that is elsewhere; a tensor on the CPU as it is."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
