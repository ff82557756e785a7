"""The rows of all ranks in the order in which pairs are computed: own differentiated, own others, those of others."""

from __future__ import annotations

import torch
from torch import Tensor

from st_cached_extras.distributed.world import World


class RowOrder:
    """Where the rows of a batch come to stand, and how their gradients find back. The same for every feature of it.

    Args:
        count: this rank's rows.
        rows: int64 [b], the rows whose gradient is wanted, in any order, repeated or not; None for all.
        world: the ranks that share the batch.
        device: where features are.

    Attributes:
        total: rows of all ranks.
        own: rows of this rank.
        differentiated: different rows that are wanted.
        wanted: rows that are wanted.
    """

    def __init__(self, count: int, rows: Tensor | None, world: World, device: torch.device) -> None:
        self._world = world
        self._counts = list(world.row_counts(count))
        self.total, self.own = sum(self._counts), count
        self.differentiated = self.wanted = count
        self._places: Tensor | None = None
        first = torch.arange(count, device=device)
        if rows is not None:
            different, self._places = rows.to(device).unique(return_inverse=True)
            self.differentiated, self.wanted = len(different), len(rows)
            others = torch.ones(count, dtype=torch.bool, device=device).index_fill_(0, different, False)
            first = torch.cat([different, first[others]])
        self._order: Tensor | None = None  # None: as they come
        if rows is not None or len(self._counts) > 1:
            begin = sum(self._counts[: world.rank])
            before = torch.arange(begin, device=device)
            after = torch.arange(begin + count, self.total, device=device)
            self._order = torch.cat([first + begin, before, after])

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' rows of a feature, [own, ...] → [total, ...]."""
        x = self._world.gather_rows(x, self._counts)
        return x if self._order is None else x.index_select(0, self._order)

    def as_wanted(self, gradient: Tensor) -> Tensor:
        """Gradients [differentiated, ...] as they were asked for, [wanted, ...]."""
        return gradient if self._places is None else gradient.index_select(0, self._places)
