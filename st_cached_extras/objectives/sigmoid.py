"""The pairwise sigmoid loss of SigLIP (Zhai et al., arXiv 2303.15343, Eq. 1), derivative in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from st_cached_extras.objectives.checks import check_ranking_features, read_groups
from st_cached_extras.objectives.contrastive import (
    ContrastiveObjective,
    Evaluation,
    check_number,
    negligible,
    own_entries,
    same_group,
)
from st_cached_extras.objectives.similarity import ScoreBlock, Scores

SOFTPLUS_IS_LINEAR = 40.0  # from here on log(1 + exp(z)) is z in fp64, too


class Sigmoid(ContrastiveObjective):
    """Every pair of a query and a document of the batch, of all ranks, is a yes-or-no question of its own.

    With u = q/|q|, v = d/|d| for the cosine (plain for the inner product), y_ij = 1 for a positive pair and −1 for any
    other, N queries and all their documents, positives and hard negatives::

        z_ij  = s·u_i·v_j + b
        loss  = −(1/N) Σ_ij log σ(y_ij z_ij)
        dz_ij = −(1/N) y_ij σ(−y_ij z_ij)
        du_i  = s Σ_j dz_ij v_j,   dv_j = s Σ_i dz_ij u_i,   dlog s = Σ_ij dz_ij s·u_i·v_j,   db = Σ_ij dz_ij

    With the sign flipped at the positives, z' = −y z, value and derivative of all entries are one softplus and one σ,
    and nothing cancels.

    Features: "anchor", "positive" and any number of "negative_1", "negative_2", ....

    Args:
        scale: s at the start.
        bias: b at the start. Negatives outnumber positives by far: −10 makes their first loss small.
        similarity_fct: see :class:`ContrastiveObjective`.
        learnable_scale: train s, as its logarithm, a parameter ``log_scale`` that starts at log(scale).
        learnable_bias: train b, a parameter ``logit_bias``.
        positives: how many document columns, "positive" and then the first negatives by number, are positives of
            their row; the others are hard negatives.
        labels_as_groups: labels [B] are group ids: the positives of a row are positives of every row of its group.
            Without it, labels are ignored.
        chunk_size: rows of scores alive at a time; None for what fits 16 MiB, or half of the features if that is
            more, between 16 and 512.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        scale: float = 10.0,
        bias: float = -10.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        learnable_scale: bool = True,
        learnable_bias: bool = True,
        positives: int = 1,
        labels_as_groups: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(scale, similarity_fct, learnable_scale, chunk_size)
        check_number("bias", bias)
        if not math.isfinite(bias):
            raise ValueError(f"bias: found {bias}, expected a finite number. Give 0.0 for none.")
        if isinstance(positives, bool) or not isinstance(positives, int) or positives < 1:
            raise ValueError(
                f"positives: found {positives!r}, expected a positive int. It counts the document columns that are "
                "positives of their row: 1 for (anchor, positive, negatives...)."
            )
        self.logit_bias: nn.Parameter | None
        self.register_parameter("logit_bias", nn.Parameter(torch.tensor(float(bias))) if learnable_bias else None)
        self._bias = float(bias)
        self.positives = positives
        self.labels_as_groups = labels_as_groups

    @property
    def bias(self) -> float:
        """b; if it is learned, as it stands now."""
        return self._bias if self.logit_bias is None else self.logit_bias.item()

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "bias": self.bias,
            "learnable_bias": self.logit_bias is not None,
            "positives": self.positives,
            "labels_as_groups": self.labels_as_groups,
        }

    def _learned(self) -> set[str]:
        return super()._learned() | ({"bias"} if self.logit_bias is not None else set())

    def _column_order(self, features: Mapping[str, Tensor]) -> list[str]:
        """The documents first, the anchor last."""
        names = check_ranking_features(features)
        if self.positives >= len(names):
            raise ValueError(
                f"positives: {self.positives} document columns are to be positives, but there are {len(names) - 1}: "
                f"{names[:-1]}. Give as many, or lower it."
            )
        return names

    def _read_labels(self, labels: Tensor | None, count: int, columns: int) -> Tensor | None:
        return read_groups(labels, count) if self.labels_as_groups else None

    def _evaluate(self, scores: Scores, labels: Tensor | None) -> Evaluation:
        documents, N = scores.keys.shape[0] - 1, scores.keys.shape[1]
        block = ScoreBlock("query_to_doc", documents, slice(0, documents), False, slice(0, documents))
        s, b = self.scale, self.bias
        weight = scores.keys.new_full((scores.count,), s / N)
        loss, d_bias = scores.keys.new_zeros(()), scores.keys.new_zeros(())
        smallest = negligible(scores.keys.dtype)
        for begin, end, z in self._chunks(scores, documents * N):
            scores.forward(block, begin, end, s, z)
            z.add_(b)  # [b, documents·N]
            flip = self._flip_positives(z, scores, labels, begin, end)
            flip()
            loss += nn.functional.softplus(z, threshold=SOFTPLUS_IS_LINEAR).sum() / N
            if s * scores.bound + abs(b) > -smallest:
                nn.functional.threshold_(z, smallest, -torch.inf)
            z.sigmoid_()
            flip()
            d_bias += z.sum() / N
            scores.backward(block, begin, end, z, weight[begin:end])
        learned = self.logit_bias is not None and self.logit_bias.requires_grad
        return Evaluation(loss, {"logit_bias": d_bias} if learned else {})

    def _flip_positives(
        self, z: Tensor, scores: Scores, labels: Tensor | None, begin: int, end: int
    ) -> Callable[[], Tensor]:
        """What changes the sign of the positive pairs in a chunk [b, documents·N], in place."""
        if labels is None:
            return own_entries(z, scores, begin, end)[: self.positives].neg_
        same = same_group(labels, scores, begin, end)
        own_entries(same, scores, begin, end).fill_(True)
        sign = 1.0 - 2.0 * same.to(z.dtype)  # [b, N]
        return lambda: z.unflatten(1, (-1, sign.shape[1]))[:, : self.positives].mul_(sign[:, None])
