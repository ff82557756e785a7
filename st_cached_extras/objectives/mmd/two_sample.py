"""The squared MMD between two columns of one batch: each the other's reference, both differentiated.

For two sides that should fill the same region of a space and do not, such as the modality gap of image and text
embeddings (Liang et al., arXiv 2203.02053).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult, compute_dtype
from st_cached_extras.objectives.checks import check_rows
from st_cached_extras.objectives.mmd.checks import check_features, check_statistic
from st_cached_extras.objectives.mmd.kernels import make_kernel
from st_cached_extras.objectives.mmd.nystrom import DEFAULT_SCALES
from st_cached_extras.objectives.mmd.objective import Statistic
from st_cached_extras.objectives.mmd.pairs import PairSums
from st_cached_extras.objectives.mmd.row_order import RowOrder


class TwoSampleMMD(Objective):
    """Squared MMD between two named features x and y, each [B, D]::

        loss = mean k(x_i, x_j) + mean k(y_i, y_j) − 2 mean k(x_i, y_j)

    It asks nothing of pairs: row i of x need not resemble row i of y. With the U-statistic the first two means leave
    i = j out. Over ranks all rows are gathered, and each rank computes its own against them.

    Args:
        sigma: the bandwidth; see :func:`~st_cached_extras.objectives.mmd.median_bandwidth`.
        names: of the two features.
        kernel: "gaussian", "laplace", "rational_quadratic" or "energy".
        scales: bandwidths in units of sigma; the kernel is their mean.
        statistic: "v" or "u".
        chunk_size: rows of pairs alive at a time; None for what fits 8 MiB, between 32 and 512.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        sigma: float,
        names: tuple[str, str] = ("anchor", "positive"),
        kernel: str = "gaussian",
        scales: Sequence[float] = DEFAULT_SCALES,
        statistic: Statistic = "v",
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        check_statistic(statistic, chunk_size)
        if not 0 < sigma < math.inf:
            raise ValueError(
                f"sigma: found {sigma!r}, expected a positive finite number. Give median_bandwidth(features)."
            )
        if len(names) != 2 or names[0] == names[1]:
            raise ValueError(f"names: found {names!r}, expected those of two different features.")
        self.sigma = float(sigma)
        self.names = tuple(names)
        self.kernel = make_kernel(kernel, scales)
        self.statistic = statistic
        self.chunk_size = chunk_size

    def extra_repr(self) -> str:
        return (
            f"sigma={self.sigma}, names={self.names}, kernel={self.kernel!r}, statistic={self.statistic!r}, "
            f"chunk_size={self.chunk_size}"
        )

    def value_and_cotangents(
        self,
        features: Mapping[str, Tensor],
        *,
        labels: Tensor | None = None,
        reference: Mapping[str, Tensor] | None = None,
        rows: Tensor | None = None,
        world: World | None = None,
    ) -> ObjectiveResult:
        """See :class:`Objective`; features are the two of ``names``, [B, ...] of one shape. Labels and reference are
        ignored."""
        shape = tuple(next(iter(features.values())).shape[1:]) if features else ()
        check_features("features", features, self.names, dict.fromkeys(self.names, shape))
        first = next(iter(features.values()))
        check_rows(rows, len(first))
        world = World() if world is None else world
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            return self._evaluate(features, rows, world, compute_dtype(features))

    def _evaluate(
        self, features: Mapping[str, Tensor], rows: Tensor | None, world: World, dtype: torch.dtype
    ) -> ObjectiveResult:
        order = RowOrder(len(next(iter(features.values()))), rows, world, next(iter(features.values())).device)
        x, y = (order.gather(features[name].detach()).to(dtype).flatten(1) for name in self.names)
        shift = (x.mean(dim=0) + y.mean(dim=0)) / 2
        x, y = ((side - shift).div_(self.sigma) for side in (x, y))
        B, scales = order.total, len(self.kernel.scales)
        diagonal, pairs = (0.0, B * B) if self.statistic == "v" else (self.kernel.at_zero, max(1, B * (B - 1)))
        uniform = x.new_full((scales, B), 1 / (scales * B))
        loss: Tensor = x.new_zeros(())
        cotangents = {}
        for name, own, other in ((self.names[0], x, y), (self.names[1], y, x)):
            sums = PairSums(own, order.differentiated, order.own, self.kernel, self.chunk_size)
            loss = loss + (sums.among_themselves(2 / pairs) - order.own * diagonal) / pairs
            # Once from either side, so that both get their derivative; together it is the factor of two.
            loss = loss - sums.against(other, uniform, -2 / B) / B
            gradient = sums.finish().div_(self.sigma).unflatten(1, features[name].shape[1:])
            cotangents[name] = order.as_wanted(gradient)
        loss = world.all_reduce(loss).to(dtype)
        return ObjectiveResult(loss, {name: cotangents[name] for name in features})
