"""Scores of this rank's rows against the rows of all ranks, and the way back from scores to features.

A contrastive objective asks for one chunk of scores at a time, turns it in place into the derivative by those scores,
and hands it back; how features become scores, and which ranks they came from, is known only here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sentence_transformers.util import cos_sim, dot_score, pytorch_cos_sim
from sentence_transformers.util.similarity import SimilarityFunction
from torch import Tensor

from st_cached_extras.distributed.world import World

EPSILON = 1e-12  # as torch.nn.functional.normalize
NORMALIZATION_ROWS = 1024


def resolve_similarity(similarity_fct: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The function itself, or for ``model.similarity`` the one that the model's ``similarity_fn_name`` stands for."""
    owner = getattr(similarity_fct, "__self__", None)
    if getattr(similarity_fct, "__name__", None) == "similarity" and hasattr(owner, "similarity_fn_name"):
        return SimilarityFunction.to_similarity_fn(owner.similarity_fn_name)
    return similarity_fct


def is_cosine(similarity_fct: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a resolved similarity is sentence-transformers' cosine."""
    return similarity_fct in (cos_sim, pytorch_cos_sim)


def is_dot(similarity_fct: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a resolved similarity is sentence-transformers' inner product."""
    return similarity_fct is dot_score


@dataclass(frozen=True)
class ScoreBlock:
    """Own rows of one column against all rows of some columns: a [b, k·N] part of the score chunk.

    Attributes:
        name: the direction, "query_to_doc" for instance.
        row_column: the column whose own rows are scored.
        key_columns: the k columns whose rows of all ranks they are scored against.
        keys_first: whether the keys are the first argument of the similarity, rows and keys then being transposed.
        part: where the block stands in the chunk of scores, in columns of N scores.
    """

    name: str
    row_column: int
    key_columns: slice
    keys_first: bool
    part: slice


class Scores(ABC):
    """The columns of all ranks as keys [C, N, D], own rows among them, and the derivative by every wanted row.

    Attributes:
        keys: [C, N, D] in the dtype of the arithmetic, N rows in rank order.
        offset: where this rank's B rows start among the N.
        bound: a bound on the absolute value of every score, infinite if there is none.
        log_scale_gradient: Σ score × d loss / d score of this rank's blocks, which is d loss / d log s; None if the
            scale is not learned.
        parameter_gradients: d loss / d parameter of this rank's blocks, by name, where the similarity has parameters.
    """

    bound: float = float("inf")
    log_scale_gradient: Tensor | None = None

    def __init__(self, columns: Sequence[Tensor], rows: Tensor | None, world: World, dtype: torch.dtype) -> None:
        """Gather the columns, [B, D] each, in one collective; ``rows`` (int64 [b], or None) are those wanted."""
        count, width = columns[0].shape
        self.world, self.count = world, count
        self.parameter_gradients: dict[str, Tensor] = {}
        self.counts = list(world.row_counts(count))
        self.offset, total = sum(self.counts[: world.rank]), sum(self.counts)
        if world.size > 1:
            stacked = world.gather_rows(torch.cat(list(columns), dim=1), self.counts)  # [N, C·D]
            columns = stacked.split(width, dim=1)  # C × [N, D]
        self.keys = torch.empty(len(columns), total, width, dtype=dtype, device=columns[0].device)
        for keys, column in zip(self.keys, columns, strict=True):
            keys.copy_(column)
        self._select(rows)

    def _select(self, rows: Tensor | None) -> None:
        """Which rows of the world are wanted, and where in their order this rank's own stand."""
        self.rows, self.wanted = rows, None
        self.wanted_counts, self.wanted_offset = self.counts, self.offset
        if rows is None:
            return
        self.wanted_counts = list(self.world.row_counts(len(rows)))
        self.wanted_offset = sum(self.wanted_counts[: self.world.rank])
        self.wanted = self.world.gather_rows(rows + self.offset, self.wanted_counts)  # [n]

    def own(self, column: int, begin: int, end: int) -> Tensor:
        """Own rows ``begin`` to ``end`` of a column, [end − begin, D]."""
        return self.keys[column, self.offset + begin : self.offset + end]

    @abstractmethod
    def forward(self, block: ScoreBlock, begin: int, end: int, factor: float, out: Tensor) -> None:
        """Write factor × score of own rows ``begin`` to ``end`` into ``out`` [b, k·N]."""

    @abstractmethod
    def backward(self, block: ScoreBlock, begin: int, end: int, derivative: Tensor, weight: Tensor) -> None:
        """Take in d loss / d score, ``weight`` [b] times the rows of ``derivative`` [b, k·N], of the same block."""

    @abstractmethod
    def cotangents(self) -> list[Tensor]:
        """d loss / d column[rows] for every column, [b, D] each, all ranks' contributions summed."""

    def _reduce(self, gradient: Tensor) -> Tensor:
        """Sum [C, n, D] over ranks in one collective and keep this rank's rows, [C, b, D]."""
        if self.world.size == 1:
            return gradient
        columns, total, width = gradient.shape
        stacked = gradient.transpose(0, 1).reshape(total, columns * width)  # [n, C·D]
        stacked = self.world.reduce_scatter_rows(stacked, self.wanted_counts)  # [b, C·D]
        return stacked.unflatten(1, (columns, width)).transpose(0, 1).contiguous()


class ProductScores(Scores):
    """Inner products, of normalised rows for the cosine: one product per chunk forward, two back."""

    def __init__(
        self, columns: Sequence[Tensor], rows: Tensor | None, world: World, dtype: torch.dtype, *, normalize: bool
    ) -> None:
        super().__init__(columns, rows, world, dtype)
        self.normalize = normalize
        if normalize:
            self.bound = 1.0
            self.norms = torch.linalg.vector_norm(self.keys, dim=2)  # [C, N]
            self.keys.div_(self.norms.clamp_min(EPSILON)[..., None])
        wanted = self.keys.shape[1] if self.wanted is None else len(self.wanted)
        self.gradient = self.keys.new_zeros(self.keys.shape[0], wanted, self.keys.shape[2])  # [C, n, D]
        if rows is not None:
            # Sorted, so that the wanted rows of a chunk are one slice of this order.
            self._in_order, self._order = rows.sort()
            self._in_order_list = self._in_order.tolist()

    def forward(self, block: ScoreBlock, begin: int, end: int, factor: float, out: Tensor) -> None:
        rows = self.own(block.row_column, begin, end) * factor  # [b, D]
        torch.mm(rows, self.keys[block.key_columns].flatten(0, 1).T, out=out)  # [b, k·N]

    def backward(self, block: ScoreBlock, begin: int, end: int, derivative: Tensor, weight: Tensor) -> None:
        backward = self._backward_all if self.wanted is None else self._backward_wanted
        backward(block, begin, end, derivative, weight[:, None])

    def _backward_all(self, block: ScoreBlock, begin: int, end: int, E: Tensor, weight: Tensor) -> None:
        rows = self.own(block.row_column, begin, end) * weight  # [b, D], narrower than E, which is only read
        self.gradient[block.key_columns].flatten(0, 1).addmm_(E.T, rows)  # [k·N, D]
        d_rows = E @ self.keys[block.key_columns].flatten(0, 1)  # [b, D]
        if self.log_scale_gradient is not None:
            self.log_scale_gradient += (rows * d_rows).sum()
        self.gradient[block.row_column, self.offset + begin : self.offset + end].addcmul_(d_rows, weight)

    def _backward_wanted(self, block: ScoreBlock, begin: int, end: int, E: Tensor, weight: Tensor) -> None:
        rows = self.own(block.row_column, begin, end) * weight  # [b, D]
        N = self.keys.shape[1]
        wanted_E = E.unflatten(1, (-1, N)).index_select(2, self.wanted).flatten(1)  # [b, k·n]
        self.gradient[block.key_columns].flatten(0, 1).addmm_(wanted_E.T, rows)  # [k·n, D]
        if self.log_scale_gradient is not None:
            self.log_scale_gradient += (rows * (E @ self.keys[block.key_columns].flatten(0, 1))).sum()
        first, last = bisect_left(self._in_order_list, begin), bisect_left(self._in_order_list, end)
        if first < last:
            here = self._in_order[first:last] - begin
            d_rows = E.index_select(0, here) @ self.keys[block.key_columns].flatten(0, 1)  # [wanted of b, D]
            d_rows.mul_(weight[here])
            self.gradient[block.row_column].index_add_(0, self._order[first:last] + self.wanted_offset, d_rows)

    def cotangents(self) -> list[Tensor]:
        gradient = self._reduce(self.gradient)  # [C, b, D]
        if self.normalize:
            self._through_normalization(gradient)
        return list(gradient)

    def _through_normalization(self, gradient: Tensor) -> None:
        """u = q / |q|: dq = (du − (du·u) u) / |q|, in place; below epsilon u = q / epsilon and nothing to project."""
        for column, d_column in enumerate(gradient):
            for begin in range(0, len(d_column), NORMALIZATION_ROWS):
                du = d_column[begin : begin + NORMALIZATION_ROWS]
                end = begin + len(du)
                here = slice(self.offset + begin, self.offset + end)
                if self.rows is not None:
                    here = self.rows[begin:end] + self.offset
                u, norm = self.keys[column, here], self.norms[column, here]
                along = torch.linalg.vecdot(du, u).masked_fill_(norm < EPSILON, 0.0)
                du.addcmul_(u, along[:, None], value=-1.0).div_(norm.clamp_min(EPSILON)[:, None])
