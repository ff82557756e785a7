"""Ranks as threads of one process: collectives without a process group, exact, in rank order, and counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from st_cached_extras.distributed.world import RankError, World

T = TypeVar("T")
PATIENCE_SECONDS = 60.0


class Meeting:
    """Where the ranks of one :class:`ThreadWorld` meet and lay down one value each."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()  # nobody lays down the next value before all have read this one
        return values


class ThreadWorld(World):
    """A world of ``size`` threads. Ranks that call different collectives raise instead of mixing their values.

    Attributes:
        collectives: how often this rank called each collective, by name.
    """

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting
        self.collectives: Counter[str] = Counter()

    def _exchange(self, name: str, value: Any) -> list[Any]:
        self.collectives[name] += 1
        entries = self.meeting.exchange(self.rank, (name, value))
        if len({entry[0] for entry in entries}) > 1:
            raise RuntimeError(f"The ranks called different collectives: {[entry[0] for entry in entries]}.")
        return [entry[1] for entry in entries]

    def row_counts(self, count: int) -> list[int]:
        return self._exchange("row_counts", count)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        _check_length(x, counts[self.rank], "gather_rows")
        return torch.cat(self._exchange("gather_rows", x.detach().clone()))

    def reduce_scatter_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        _check_length(x, sum(counts), "reduce_scatter_rows")
        total = torch.stack(self._exchange("reduce_scatter_rows", x.detach().clone())).sum(dim=0)
        return total.split(list(counts))[self.rank].clone()

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_reduce", x.detach().clone())).sum(dim=0)

    def raise_together(self, error: Exception | None) -> None:
        errors = self._exchange("raise_together", error)
        failed = [f"rank {rank}: {found}" for rank, found in enumerate(errors) if found is not None]
        if failed:
            raise RankError("; ".join(failed)) from error


def _check_length(x: Tensor, expected: int, collective: str) -> None:
    if len(x) != expected:
        raise RuntimeError(f"{collective} was given {len(x)} rows, but its counts say {expected}.")


def run_ranks(size: int, function: Callable[[ThreadWorld], T]) -> tuple[list[T], list[ThreadWorld]]:
    """Run ``function(world)`` once per rank, all at once.

    Args:
        size: number of ranks.
        function: what one rank does.

    Returns:
        The ranks' results and their worlds, in rank order.

    Raises:
        Exception: what a rank raised first; the other ranks are released.
    """
    meeting = Meeting(size)
    worlds = [ThreadWorld(rank, size, meeting) for rank in range(size)]
    errors: list[BaseException] = []

    def work(world: ThreadWorld) -> T | None:
        try:
            return function(world)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()
            return None

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, worlds))
    if errors:
        # The ranks that waited for the failed one only report a broken barrier.
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results, worlds
