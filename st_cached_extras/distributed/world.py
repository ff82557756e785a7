"""The ranks that share one batch, as the objectives and the losses see them.

Objectives ask only for rows: how many each rank has, all of them together, and the sum over ranks of what every rank
computed for its own. Losses ask for agreement: the same number of mini-batches, and one error on all ranks instead of
an error on one and a wait without end on the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from st_cached_extras._compat import rendezvous_store

# One tensor in, one out: torch renamed these collectives.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankError(RuntimeError):
    """Something failed or differed on some rank. Raised on all, with the same message, naming ranks and cause."""


class World:
    """One process: every gather is the identity and every reduction returns its input.

    Attributes:
        size: number of ranks.
        rank: this rank's index.
    """

    size: int = 1
    rank: int = 0

    @staticmethod
    def current(process_group: dist.ProcessGroup | None = None) -> World:
        """The ranks of ``process_group`` (None: all of them), or one process where nothing is distributed."""
        if not (dist.is_available() and dist.is_initialized()):
            return World()
        group = ProcessGroupWorld(process_group)
        return group if group.size > 1 else World()

    def row_counts(self, count: int) -> list[int]:
        """How many rows every rank has, in rank order, given how many this one has."""
        return [count]

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' rows in rank order: [counts[rank], ...] → [sum(counts), ...]. Carries no gradient."""
        return x

    def reduce_scatter_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum over ranks, then this rank's rows: [sum(counts), ...] → [counts[rank], ...]."""
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return x

    def max_count(self, count: int) -> int:
        """The largest count of any rank."""
        return max(self.row_counts(count))

    def max_counts(self, counts: Sequence[int]) -> list[int]:
        """The largest of any rank, of each of several counts; ranks that have fewer counts have 0 of the others."""
        most = self.max_count(len(counts))
        return [self.max_count(counts[index] if index < len(counts) else 0) for index in range(most)]

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.max_count(int(flag)) > 0

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error.

        On one process the error itself is raised. On several, the rank that failed raises a :class:`RankError` from
        its own error, and the others raise one with the same message.
        """
        if error is not None:
            raise error

    def abort(self, error: Exception) -> NoReturn:
        """Raise where the other ranks cannot be met, because they are waiting inside some collective.

        That collective fails on them, at once if this process ends and otherwise when it times out, and they come
        here too. The rank that came first names its error for all. No collective works afterwards.

        Raises:
            RankError: with the first rank's error, from this one.
        """
        raise error

    def check_equal(self, what: str, value: str) -> None:
        """Raise a :class:`RankError` on every rank, naming what each has, unless all ranks have the same text."""


class ProcessGroupWorld(World):
    """The ranks of a ``torch.distributed`` process group.

    Args:
        process_group: the group; None for all ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)

    def row_counts(self, count: int) -> list[int]:
        counts = torch.empty(self.size, dtype=torch.int64, device=self._device)
        _all_gather(counts, torch.tensor([count], device=self._device), group=self._group)
        return counts.tolist()

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        longest = max(counts)
        gathered = x.new_empty((self.size * longest, *x.shape[1:]))
        _all_gather(gathered, _padded(x.contiguous(), longest), group=self._group)
        if min(counts) == longest:
            return gathered
        return torch.cat([rows[:count] for rows, count in zip(gathered.split(longest), counts, strict=True)])

    def reduce_scatter_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        longest = max(counts)
        if min(counts) < longest:
            x = torch.cat([_padded(rows, longest) for rows in x.split(list(counts))])
        reduced = x.new_empty((longest, *x.shape[1:]))
        _reduce_scatter(reduced, x.contiguous(), group=self._group)
        return reduced[: counts[self.rank]]

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self._group)
        return x

    def raise_together(self, error: Exception | None) -> None:
        if not self.agree(error is not None):
            return
        causes: list[str | None] = [None] * self.size
        cause = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(causes, cause, group=self._group)
        message = "; ".join(f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause is not None)
        raise RankError(f"Training stopped on all ranks, because of {message}") from error

    def max_counts(self, counts: Sequence[int]) -> list[int]:
        padded = list(counts) + [0] * (self.max_count(len(counts)) - len(counts))
        most = torch.tensor(padded, dtype=torch.int64, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return most.tolist()

    def abort(self, error: Exception) -> NoReturn:
        cause = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        try:
            cause = rendezvous_store().compare_set("st_cached_extras/abort", "", cause).decode()
        except Exception:
            cause += " (what happened on other ranks could not be read)"
        raise RankError(f"Training stopped, because of {cause}") from error

    def check_equal(self, what: str, value: str) -> None:
        if len(set(self.row_counts(zlib.crc32(value.encode())))) == 1:
            return
        values: list[str] = [""] * self.size
        dist.all_gather_object(values, value, group=self._group)
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise RankError(f"{what} must be the same on every rank, and differ: {listed}")

    @property
    def _device(self) -> torch.device:
        """Where collectives of this group take their tensors from."""
        of_cpu = dist.get_backend(self._group) in (dist.Backend.GLOO, dist.Backend.MPI)
        if of_cpu or not torch.accelerator.is_available():  # a group of no backend by name has one for each device
            return torch.device("cpu")
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def _padded(rows: Tensor, count: int) -> Tensor:
    """Rows [n, ...] with zeros up to [count, ...]: collectives want the same shape on every rank."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))])
