"""The ranks that share one batch, as the objectives see them.

Objectives ask only for rows: how many each rank has, all of them together, and the sum over ranks of what every rank
computed for its own. :class:`World` is the trivial answer of one process: gathering is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class World:
    """One process: every gather is the identity and every reduction returns its input.

    Attributes:
        size: number of ranks.
        rank: this rank's index.
    """

    size: int = 1
    rank: int = 0

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
