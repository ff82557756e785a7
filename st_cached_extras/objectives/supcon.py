"""Supervised contrastive loss (Khosla et al., arXiv 2004.11362, Eq. 2, L_out), derivative in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from sentence_transformers.util import cos_sim
from torch import Tensor

from st_cached_extras.objectives.checks import check_embeddings, check_labels, check_widths
from st_cached_extras.objectives.contrastive import (
    ContrastiveObjective,
    Evaluation,
    exponentiate,
    own_entries,
)
from st_cached_extras.objectives.similarity import ScoreBlock, Scores


class SupCon(ContrastiveObjective):
    """Every embedding against all others of the batch, of all ranks: those of its class are its positives.

    With z the normalised embeddings of all rows and columns (plain for the inner product), A_i all of them but i,
    P_i those of A_i whose row is the same or shares a class, I the embeddings that have any, and l_ij = s·z_i·z_j::

        loss  = (1/|I|) Σ_{i ∈ I} [log Σ_{a ∈ A_i} exp(l_ia) − (1/|P_i|) Σ_{p ∈ P_i} l_ip]
        dl_ij = (1/|I|) [exp(l_ij) / Σ_a exp(l_ia) − [j ∈ P_i] / |P_i|]
        dz_i  = s Σ_j dl_ij z_j + s Σ_j dl_ji z_j

    With a single positive, a loss far below 1 is the small difference of two logits: there InfoNCE, which keeps the
    positive out of the sum, is more exact in fp32.

    Embeddings without positives contribute nothing as anchors, and are others' negatives. The metric
    ``rows_without_positives`` counts them.

    Features: one or more columns, each of them one view of its row, whatever their names; views of one row are always
    positives of each other. Labels: classes [B] (or [B, 1]) of any dtype; or multi-hot rows [B, L], where sharing one
    class is enough; None with several columns: every row is a class of its own.

    Args:
        scale: s, the inverse temperature.
        similarity_fct: see :class:`ContrastiveObjective`.
        learnable_scale: train s, as its logarithm, a parameter ``log_scale`` that starts at log(scale).
        chunk_size: rows of scores alive at a time; None for what fits 16 MiB, or half of the features if that is
            more, between 16 and 512.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        scale: float = 10.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        learnable_scale: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(scale, similarity_fct, learnable_scale, chunk_size)

    def _column_order(self, features: Mapping[str, Tensor]) -> list[str]:
        check_embeddings(features)
        check_widths(features)
        return list(features)

    def _read_labels(self, labels: Tensor | None, count: int, columns: int) -> Tensor | None:
        if labels is None and columns > 1:
            return None
        check_labels(labels, count, what="a class, or a multi-hot row of classes, or several columns as views,")
        if labels.ndim > 2:
            raise ValueError(
                f"labels: shape {tuple(labels.shape)}, expected classes [B] or multi-hot rows [B, L]. Give integers, "
                "or one list of 0 and 1 per row."
            )
        if labels.ndim == 2 and labels.shape[1] > 1:
            return (labels != 0).to(torch.uint8)
        return labels.flatten().to(torch.uint8) if labels.dtype == torch.bool else labels.flatten()

    def _evaluate(self, scores: Scores, labels: Tensor | None) -> Evaluation:
        views, N, _ = scores.keys.shape
        if labels is not None:
            if labels.ndim == 1:  # as consecutive numbers, which the scores' dtype holds exactly
                labels = labels.unique(return_inverse=True)[1]
            labels = labels.to(scores.keys.dtype)
        has_positives = self._has_positives(scores, labels)  # [N]
        # 1/|I|, or 0 where there are none, [N].
        share = has_positives.to(scores.keys.dtype) / (views * has_positives.sum()).clamp_min(1)
        loss = scores.keys.new_zeros(())
        s = self.scale
        for begin, end, scratch in self._chunks(scores, (views + 2) * N):
            logits, positive, spare = scratch.split([views * N, N, N], dim=1)
            self._mark_positives(positive, scores, labels, begin, end)
            own = slice(scores.offset + begin, scores.offset + end)
            for view in range(views):
                block = ScoreBlock("view", view, slice(0, views), False, slice(0, views))
                loss += self._chunk(s, scores, block, positive, share[own], logits, spare, begin, end)
        return Evaluation(loss, metrics={"rows_without_positives": N - has_positives.sum()})

    def _chunk(
        self,
        s: float,
        scores: Scores,
        block: ScoreBlock,
        positive: Tensor,
        share: Tensor,
        logits: Tensor,
        spare: Tensor,
        begin: int,
        end: int,
    ) -> Tensor:
        """One view of own rows ``begin`` to ``end`` forth and back; returns their share of the loss.

        Args:
            positive: 1 or 0, [b, N].
            share: what each row counts, [b].
            logits, spare: scratch, [b, views·N] and [b, N].
        """
        views, N, _ = scores.keys.shape
        scores.forward(block, begin, end, s, logits)
        E = logits.unflatten(1, (views, N))  # [b, views, N]
        itself = own_entries(logits, scores, begin, end)[block.row_column]  # [b]
        count = (views * positive.sum(dim=1) - 1).clamp_min_(1)  # |P_i|, [b]
        mean_positive = (torch.sum(E, dim=1, out=spare).mul_(positive).sum(dim=1) - itself) / count
        itself.fill_(-torch.inf)
        m = exponentiate(logits, s * scores.bound)
        n = logits.sum(dim=1)  # Σ_a exp(l_ia − m), [b]
        loss_i = n.log() + (m.squeeze(-1) if m.ndim else m) - mean_positive
        # 1/n makes E the softmax; it is left to the rows, which are narrower than the chunk.
        E.addcmul_(positive[:, None], (n / count)[:, None, None], value=-1.0)
        itself.zero_()
        scores.backward(block, begin, end, logits, torch.where(share > 0, s * share / n, 0.0))
        return torch.where(share > 0, share * loss_i, 0.0).sum()

    def _has_positives(self, scores: Scores, labels: Tensor | None) -> Tensor:
        """Which rows of all ranks have a positive: bool [N]."""
        views, N, _ = scores.keys.shape
        if views > 1:
            return torch.ones(N, dtype=torch.bool, device=scores.keys.device)
        if labels.ndim == 1:
            classes = labels.long()
            return classes.bincount()[classes] > 1
        return ((labels.sum(dim=0) > 1) & (labels > 0)).any(dim=1)

    def _mark_positives(self, positive: Tensor, scores: Scores, labels: Tensor | None, begin: int, end: int) -> None:
        """1 where a row of all ranks shares a class with own rows ``begin`` to ``end`` or is that row, else 0."""
        own = slice(scores.offset + begin, scores.offset + end)
        if labels is None:
            positive.zero_()
        elif labels.ndim == 1:
            torch.eq(labels[own, None], labels, out=positive)
        else:
            torch.mm(labels[own], labels.T, out=positive).clamp_max_(1.0)
        own_entries(positive, scores, begin, end).fill_(1.0)
