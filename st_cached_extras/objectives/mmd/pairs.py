"""Sums of a kernel over pairs of rows and their derivative by the rows, strip by strip.

Rows are taken against themselves, every pair computed once, and against fixed targets with coefficients. Only the
rows at the front are differentiated, each against *all* rows: the derivative of a sum over pairs reaches a row
through both members of its pairs, and half of it would be lost if only one were followed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from st_cached_extras.objectives.mmd.kernels import Kernel

CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS = (32, 512)
# Two rows nearer than rounding resolves, d² < 16 eps |x|², are the same point to a kernel whose weight grows as 1/d.
RESOLUTION = 16


class PairSums:
    """Own rows of one feature among the rows of all ranks.

    Args:
        x: [N, D] in units of the bandwidth and centred, so that |x|² + |y|² − 2 x·y keeps its precision: first the
            own rows that are differentiated, then the other own rows, then those of other ranks.
        differentiated: how many of the first kind.
        own: how many of the first two kinds.
        kernel: the kernel.
        chunk_size: rows of pairs alive at a time; None for what fits 8 MiB, between 32 and 512.

    Attributes:
        gradient: [differentiated, D], the derivative of every sum so far times its factor; complete only after
            :meth:`finish`.
    """

    def __init__(
        self, x: Tensor, differentiated: int, own: int, kernel: Kernel, chunk_size: int | None = None
    ) -> None:
        self.x, self.differentiated, self.own = x, differentiated, own
        self.kernel, self.chunk_size = kernel, chunk_size
        self._farthest = kernel.farthest(x.dtype)
        self.squared_norms = x.square().sum(dim=1)  # [N]
        self.gradient = x.new_zeros(differentiated, x.shape[1])
        # Σ_j w_ij (y_j − x_i) is (W Y)_i − (Σ_j w_ij) x_i: the second part is one product at the end for all sums.
        self._weight_sums = x.new_zeros(differentiated)

    def among_themselves(self, factor: float) -> Tensor:
        """Σ_i Σ_j k(x_i, x_j) over own rows i and all rows j, i itself included; a scalar in fp64 where there is one.

        Adds factor × Σ_j ∂k(x_i, x_j)/∂x_i to the gradient. The sum over all pairs of all ranks has twice that as its
        derivative by x_i, because a row is the first member of some pairs and the second of others.
        """
        x, n, scales = self.x, len(self.x), len(self.kernel.scales)
        total = x.new_zeros((), dtype=summing_dtype(x))
        # A pair of two own rows is computed once, in the strip of the first, and stands in the sum twice.
        counts = x.new_full((scales, n), 1 / scales)
        counts[:, : self.own] *= 2
        for begin, end, buffers in self._strips(n, triangular=True):
            differentiated = end <= self.differentiated
            squared = self._squared(begin, end, x[begin:], self.squared_norms[begin:], buffers[0])
            squared[:, : end - begin].diagonal().zero_()
            counts[:, begin:end] = 1 / scales  # the square on the diagonal holds each of its pairs twice
            values, W, w = self.kernel.contract(buffers, counts[:, begin:], None, with_weights=differentiated)
            total += values.sum(dtype=total.dtype)
            if differentiated:
                self._add(begin, end, W, x[begin:], factor * w)
                # The same pairs seen from their other members.
                beyond = W[:, end - begin : self.differentiated - begin]
                self.gradient[end:].addmm_(beyond.T, x[begin:end], alpha=factor * w)
                self._weight_sums[end:].add_(beyond.sum(dim=0), alpha=factor * w)
        return total

    def against(self, targets: Tensor, coefficients: Tensor, factor: float) -> Tensor:
        """Σ_i Σ_s Σ_j c_sj k_s(x_i, y_j) over own rows i; a scalar in fp64 where there is one.

        Adds factor × Σ_s Σ_j c_sj ∂k_s(x_i, y_j)/∂x_i to the gradient.

        Args:
            targets: y, [n, D], shifted and scaled as the rows.
            coefficients: c, [scales, n].
            factor: what multiplies the derivative.
        """
        total = self.x.new_zeros((), dtype=summing_dtype(self.x))
        squared_norms = targets.square().sum(dim=1)
        for begin, end, buffers in self._strips(len(targets), triangular=False):
            differentiated = end <= self.differentiated
            self._squared(begin, end, targets, squared_norms, buffers[0])
            values, W, w = self.kernel.contract(buffers, coefficients, coefficients, with_weights=differentiated)
            total += values.sum(dtype=total.dtype)
            if differentiated:
                self._add(begin, end, W, targets, factor * w)
        return total

    def finish(self) -> Tensor:
        """The gradient [differentiated, D] of all sums together."""
        self.gradient.addcmul_(self.x[: self.differentiated], self._weight_sums[:, None], value=-1)
        self._weight_sums.zero_()
        return self.gradient

    def _add(self, begin: int, end: int, W: Tensor, y: Tensor, factor: float) -> None:
        self.gradient[begin:end].addmm_(W, y, alpha=factor)
        self._weight_sums[begin:end].add_(W.sum(dim=1), alpha=factor)

    def _squared(self, begin: int, end: int, y: Tensor, y_norms: Tensor, out: Tensor) -> Tensor:
        """|x_i − y_j|² of the rows of a strip, [end − begin, n], into ``out``."""
        norms = self.squared_norms[begin:end, None]
        torch.addmm(y_norms, self.x[begin:end], y.T, alpha=-2, out=out).add_(norms).clamp_(0, self._farthest)
        if self.kernel.by_distance:
            out.masked_fill_(out < RESOLUTION * torch.finfo(out.dtype).eps * norms, 0)
        return out

    def _strips(self, columns: int, triangular: bool) -> Iterator[tuple[int, int, list[Tensor]]]:
        """(begin, end, buffers [end − begin, columns]) over own rows; ``triangular`` leaves the columns before
        ``begin`` out. No strip holds rows of both kinds, differentiated and not."""
        count = self.kernel.buffers
        rows = self.chunk_size or chunk_rows(columns * count * self.x.element_size())
        memory = self.x.new_empty(count, min(rows, self.own) * columns)
        for first, last in ((0, self.differentiated), (self.differentiated, self.own)):
            for begin in range(first, last, rows):
                end = min(begin + rows, last)
                width = columns - begin if triangular else columns
                yield begin, end, [buffer[: (end - begin) * width].view(end - begin, width) for buffer in memory]


def chunk_rows(row_bytes: int) -> int:
    """Rows of pairs that fit the budget, within the range where the products are efficient."""
    fewest, most = CHUNK_ROWS
    return max(fewest, min(most, CHUNK_BYTES // max(1, row_bytes)))


def summing_dtype(x: Tensor) -> torch.dtype:
    """fp64, in which means of many terms may cancel against each other, where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
