"""InfoNCE of pairs in both directions, every product of features made once for both.

Scores of documents against queries are those of queries against documents, transposed, and a column's scores against
itself are their own transpose. Chunk by chunk over rows, each direction makes its own product forward and two back:
a row's derivative needs the sum over that row alone. Here all sums come first, so that one product forward and two
back serve both directions, and half a product each where a column meets itself. The scores are made twice for that: in
all 4 products instead of 6 for both directions, and 2 instead of 3 for a column against itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from st_cached_extras.objectives.contrastive import chunk_rows, negligible
from st_cached_extras.objectives.similarity import ProductScores


@dataclass(frozen=True)
class Pairing:
    """Two columns whose rows are scored against each other.

    Attributes:
        rows, keys: the columns, indices of the keys of the scores; the same if a column meets itself.
        by_row: the direction in which row i of the first chooses among the keys.
        by_key: the direction in which row j of the second chooses among the rows.
    """

    rows: int
    keys: int
    by_row: str
    by_key: str

    @property
    def is_triangle(self) -> bool:
        return self.rows == self.keys


DOCUMENTS, QUERIES = 0, 1  # as InfoNCE orders the columns
PAIRINGS = (
    Pairing(QUERIES, DOCUMENTS, "query_to_doc", "doc_to_query"),
    Pairing(QUERIES, QUERIES, "query_to_query", "query_to_query"),
    Pairing(DOCUMENTS, DOCUMENTS, "doc_to_doc", "doc_to_doc"),
)


@dataclass
class SymmetricInfoNCE:
    """The loss of one rank's pairs and its derivative, in the notation of :class:`InfoNCE`, without penalties::

        E_ij = exp(s u_i·v_j),   n_i = Σ_j E_ij,   m_j = Σ_i E_ij,   r_i = exp(−log Z_i)
        W_ij = E_ij (r_i + r'_j) off the diagonal, −n_i r_i − m_i r'_i on it;   du = s W v,   dv = s Wᵀ u

    with r' the factors of the other direction; of a column against itself, du = s W u with W of both triangles.
    No maximum is subtracted: s must be small enough for exp(±s (1 + margin)) and sums of such to be normal numbers.

    Attributes:
        scores: cosines of one document and one query column, all rows wanted; takes in the derivative.
        scale: s.
        margin: of the positives.
        directions: "query_to_doc", "doc_to_query" and any of the others.
        is_joint: one sum over all directions, or one each.
        labels: group ids [N], rows of one group not being each other's negatives, or None.
        chunk_size: rows of scores alive at a time; None to choose.
    """

    scores: ProductScores
    scale: float
    margin: float
    directions: tuple[str, ...]
    is_joint: bool
    labels: Tensor | None
    chunk_size: int | None

    def evaluate(self) -> Tensor:
        """The loss, a scalar."""
        N, s = self.scores.count, self.scale
        v, u = self.scores.keys
        positive = torch.linalg.vecdot(u, v) * s - s * self.margin  # p, [N]
        sums = {name: u.new_zeros(N) for name in self.directions}
        for pairing, begin, end, E, _ in self._strips():
            self._add(sums, pairing, begin, end, E)
        if self.is_joint:
            sums = dict.fromkeys(self.directions, sum(sums.values()))  # one and the same tensor
        softmaxes = {id(n): n for n in sums.values()}
        copies, share = (2 if self.is_joint else 1), 1 / (N * len(softmaxes))
        loss, r, dp = u.new_zeros(()), {}, u.new_zeros(N)
        for key, n in softmaxes.items():
            x = n.log() - positive
            loss_i = torch.logaddexp(x, x.new_full((), math.log(copies)))  # log(c + exp(x)), exact when tiny
            factor = torch.exp(-positive - loss_i)
            r[key] = nn.functional.threshold_(factor, math.exp(negligible(u.dtype)), 0.0) * share
            dp -= n * r[key]
            loss += loss_i.sum() * share
        self._differentiate({name: r[id(n)] for name, n in sums.items()}, dp)
        if self.scores.log_scale_gradient is not None:
            # The loss is a function of s u_i·u_j and s·margin, bilinear forms of the features: Euler's theorem.
            self.scores.log_scale_gradient += (self.scores.keys * self.scores.gradient).sum() / 2
            self.scores.log_scale_gradient -= dp.sum() * (s * self.margin)
        return loss

    def _strips(self) -> Iterator[tuple[Pairing, int, int, Tensor, Tensor]]:
        """(pairing, begin, end, E, scratch of its shape): rows ``begin`` to ``end`` against all keys [b, N], of a
        column against itself against those from ``begin`` on; E is 0 where a pair is not a negative."""
        N, keys = self.scores.count, self.scores.keys
        rows = min(N, self.chunk_size or chunk_rows(2 * N * keys.dtype.itemsize, keys.nbytes))
        buffers = keys.new_empty(2, rows, N)
        for pairing in PAIRINGS:
            if pairing.by_row not in self.directions:
                continue
            for begin in range(0, N, rows):
                end, first = min(begin + rows, N), begin if pairing.is_triangle else 0
                E, scratch = buffers[:, : end - begin, : N - first]
                torch.mm(keys[pairing.rows, begin:end] * self.scale, keys[pairing.keys, first:].T, out=E).exp_()
                E.diagonal(begin - first).fill_(0.0)
                if self.labels is not None:
                    E.masked_fill_(self.labels[begin:end, None] == self.labels[None, first:], 0.0)
                yield pairing, begin, end, E, scratch

    def _add(self, sums: dict[str, Tensor], pairing: Pairing, begin: int, end: int, E: Tensor) -> None:
        sums[pairing.by_row][begin:end] += E.sum(dim=1)
        if pairing.is_triangle:
            sums[pairing.by_key][end:] += E[:, end - begin :].sum(dim=0)
        else:
            sums[pairing.by_key] += E.sum(dim=0)

    def _differentiate(self, r: dict[str, Tensor], dp: Tensor) -> None:
        """Add to the gradient of the scores; r [N] by direction, and dp [N], carry the share of the loss."""
        keys, gradient, s = self.scores.keys, self.scores.gradient, self.scale
        for pairing, begin, end, E, scratch in self._strips():
            first = begin if pairing.is_triangle else 0
            torch.add(r[pairing.by_row][begin:end, None], r[pairing.by_key][None, first:], out=scratch)
            W = E.mul_(scratch)
            if not pairing.is_triangle:
                W.diagonal(begin).copy_(dp[begin:end])
            gradient[pairing.rows, begin:end].addmm_(W, keys[pairing.keys, first:], alpha=s)
            if pairing.is_triangle:  # the square on the diagonal holds each of its pairs twice
                W, first = W[:, end - begin :], end
            gradient[pairing.keys, first:].addmm_(W.T, keys[pairing.rows, begin:end], alpha=s)
