"""InfoNCE over in-batch and hard negatives (van den Oord et al., arXiv 1807.03748, Eq. 4), derivative in closed form.

The mathematics of sentence-transformers' ``MultipleNegativesRankingLoss``, every option of it, as an objective: chunk
by chunk over this rank's rows, each chunk of scores turned in place into the derivative by those scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from st_cached_extras.levers import LEVERS
from st_cached_extras.objectives.checks import check_ranking_features, read_groups
from st_cached_extras.objectives.contrastive import (
    SAFE_EXPONENT,
    ContrastiveObjective,
    Evaluation,
    check_number,
    exponentiate,
    negligible,
    own_entries,
    same_group,
)
from st_cached_extras.objectives.infonce_symmetric import SymmetricInfoNCE
from st_cached_extras.objectives.similarity import ProductScores, ScoreBlock, Scores

logger = logging.getLogger(__name__)

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITION_MODES = ("joint", "per_direction")
HARDNESS_MODES = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


@dataclass(frozen=True)
class Softmax:
    """Blocks that share one sum. The first holds the positive whose derivative is set.

    Attributes:
        blocks: the directions of this softmax, neighbours in the chunk.
        part: their columns of N scores in the chunk.
        copies: how often the positive's logit stands among them.
    """

    blocks: tuple[ScoreBlock, ...]
    part: slice
    copies: int


class InfoNCE(ContrastiveObjective):
    """Each query's positive document against all other candidates of the batch, of all ranks.

    Notation: q, d rows of the features; u = q/|q|, v = d/|d| for the cosine, u = q, v = d for the inner product;
    s the scale; row i has the positive logit p_i = s·(u_i·v_i − margin) and the negative logits l_ij of its
    directions: s·u_i·v_j (query_to_doc), s·u_i·u_j (query_to_query), s·v_i·u_j (doc_to_query), s·v_i·v_j (doc_to_doc,
    documents of the same query left out). With n_i = Σ_j exp(l_ij) over negatives only and c the number of times that
    the positive stands in the sum (twice in ``joint`` with doc_to_query, else once)::

        loss_i   = log(c·exp(p_i) + n_i) − p_i = log(c + exp(x_i)),   x_i = log n_i − p_i
        dl_ij    = exp(l_ij − log Z_i),   dp_i = −n_i / Z_i,           log Z_i = p_i + loss_i
        du_i     = (s/N)·Σ_j dl_ij key_j,   dkey_j = (s/N)·Σ_i dl_ij u_i,   dq = (du − (du·u) u) / |q|

    Keeping the positive out of the sum is what makes value and derivative right at tiny losses too: softmax − 1 would
    cancel. ``per_direction`` takes the mean over directions of such losses, each with its own sum. Hardness weighting
    (Lan et al., arXiv 2503.04812, Eq. 5) adds strength × similarity, held constant, to logits of query_to_doc: the
    factor in dl stays s. The margin is that of additive margin softmax (Yang et al., arXiv 1902.08564, Eq. 5).

    Features: "anchor", "positive" and any number of "negative_1", "negative_2", ...; row i's positive is
    "positive"[i].

    Args:
        scale: s, the inverse temperature.
        similarity_fct: see :class:`ContrastiveObjective`.
        directions: which candidates stand in the sum; "query_to_doc" always.
        partition_mode: "joint", one sum, or "per_direction" for "query_to_doc" and "doc_to_query".
        hardness_mode: which negatives of query_to_doc are penalised: "in_batch_negatives" (all but the row's own),
            "hard_negatives" (only the row's own), "all_negatives"; None for none.
        hardness_strength: the factor of the penalty, at least 0.
        learnable_scale: train s, as its logarithm, a parameter ``log_scale`` that starts at log(scale).
        chunk_size: rows of scores alive at a time; None for what fits 16 MiB, or half of the features if that is
            more, between 16 and 512.
        labels_as_groups: labels [B] are group ids: rows of one group are never each other's negatives, in no direction
            and with none of their columns; a row's own hard negatives stay. Without it, labels are ignored.
        margin: how far a positive's similarity must exceed the others', in units of the similarity, at least 0.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of its range, or options that exclude each other.
    """

    def __init__(
        self,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        learnable_scale: bool = False,
        chunk_size: int | None = None,
        labels_as_groups: bool = False,
        margin: float = 0.0,
    ) -> None:
        super().__init__(scale, similarity_fct, learnable_scale, chunk_size)
        self.directions = (directions,) if isinstance(directions, str) else tuple(directions)
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self.labels_as_groups = labels_as_groups
        self.margin = margin
        _check_options(self)

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "directions": list(self.directions),
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
            "labels_as_groups": self.labels_as_groups,
            "margin": self.margin,
        }

    def _column_order(self, features: Mapping[str, Tensor]) -> list[str]:
        """The documents first, the anchor last, so that every direction's keys are one slice of them."""
        return check_ranking_features(features)

    def _read_labels(self, labels: Tensor | None, count: int, columns: int) -> Tensor | None:
        return read_groups(labels, count) if self.labels_as_groups else None

    def _evaluate(self, scores: Scores, labels: Tensor | None) -> Evaluation:
        columns, N, _ = scores.keys.shape
        s = self.scale
        if self._shares_products(scores, s):
            joint = self.partition_mode == "joint"
            both = SymmetricInfoNCE(scores, s, self.margin, self.directions, joint, labels, self.chunk_size)
            return Evaluation(both.evaluate())
        softmaxes = self._softmaxes(columns)
        loss = scores.keys.new_zeros(())
        for begin, end, logits in self._chunks(scores, softmaxes[-1].part.stop * N):
            loss += self._chunk(s, scores, softmaxes, labels, logits, begin, end)
        return Evaluation(loss)

    def _shares_products(self, scores: Scores, s: float) -> bool:
        """Whether one product can serve both directions, and saves more than making the scores twice costs."""
        is_plain = isinstance(scores, ProductScores) and scores.world.size == 1 and scores.wanted is None
        is_safe = s * (scores.bound + self.margin) <= SAFE_EXPONENT
        both_ways = "doc_to_query" in self.directions and self._alpha() == 0.0 and len(scores.keys) == 2
        return LEVERS.symmetric_products and is_plain and is_safe and both_ways

    def _chunk(
        self,
        s: float,
        scores: Scores,
        softmaxes: list[Softmax],
        labels: Tensor | None,
        logits: Tensor,
        begin: int,
        end: int,
    ) -> Tensor:
        """Own rows ``begin`` to ``end`` forth and back; returns their share of the loss. ``logits`` is scratch."""
        N = scores.keys.shape[1]
        smallest = negligible(logits.dtype)
        own = {}
        for block in (block for softmax in softmaxes for block in softmax.blocks):
            out = logits[:, block.part.start * N : block.part.stop * N]  # [b, k·N]
            scores.forward(block, begin, end, self._factor(block.name, s), out)
            own[block.name] = own_entries(out, scores, begin, end)  # [k, b]
        positive = own["query_to_doc"][0] * (s / self._factor("query_to_doc", s)) - s * self.margin  # p, [b]
        self._mask(own, s)
        if labels is not None:
            others = same_group(labels, scores, begin, end)  # [b, N]
            own_entries(others, scores, begin, end).fill_(False)
            logits.unflatten(1, (-1, N)).masked_fill_(others[:, None], -torch.inf)

        loss = logits.new_zeros(())
        for softmax in softmaxes:
            E = logits[:, softmax.part.start * N : softmax.part.stop * N]  # [b, columns·N]
            m = exponentiate(E, (s + self._alpha()) * scores.bound + s * self.margin)
            m = m.squeeze(-1) if m.ndim else m  # [b] or []
            n = E.sum(dim=1)  # Σ_j exp(l_j − m), [b]
            x = n.log() + m - positive
            loss_i = torch.logaddexp(x, x.new_full((), math.log(softmax.copies)))  # log(c + exp(x)), exact when tiny
            # r = exp(m − log Z) makes E the derivative; it is left to the rows, which are narrower than the chunk.
            r = nn.functional.threshold_(torch.exp(m - positive - loss_i), math.exp(smallest), 0.0)
            own[softmax.blocks[0].name][0] = -n
            share = 1.0 / (N * len(softmaxes))
            loss += loss_i.sum() * share
            if scores.log_scale_gradient is not None:
                scores.log_scale_gradient += (n * r).sum() * (s * share * self.margin)
            for block in softmax.blocks:
                derivative = logits[:, block.part.start * N : block.part.stop * N]
                scores.backward(block, begin, end, derivative, r * (s * share))
        return loss

    def _mask(self, own: dict[str, Tensor], s: float) -> None:
        """Take the positive and what is no candidate out of the sums, and mend what the penalty must not touch."""
        own_negatives = own["query_to_doc"][1:]  # hard negatives of the same query, [k − 1, b]
        if self.hardness_mode == "in_batch_negatives":
            own_negatives.mul_(s / (s + self._alpha()))
        elif self.hardness_mode == "hard_negatives":
            own_negatives.mul_((s + self._alpha()) / s)
        own["query_to_doc"][0] = -torch.inf
        for name in own.keys() - {"query_to_doc"}:
            # The query itself, the positive again, or all documents of the same query.
            own[name].fill_(-torch.inf)

    def _alpha(self) -> float:
        return self.hardness_strength if self.hardness_mode is not None else 0.0

    def _factor(self, direction: str, s: float) -> float:
        """Logit per similarity, for all of a direction's entries but those that ``_mask`` mends."""
        penalised = direction == "query_to_doc" and self.hardness_mode in ("in_batch_negatives", "all_negatives")
        return s + self.hardness_strength if penalised else s

    def _softmaxes(self, columns: int) -> list[Softmax]:
        """The directions' blocks side by side in the chunk, in the order of DIRECTIONS, and who shares a sum."""
        documents, queries = slice(0, columns - 1), slice(columns - 1, columns)
        blocks, start = [], 0
        for name in (name for name in DIRECTIONS if name in self.directions):
            rows, keys = name.split("_to_")
            key_columns = documents if keys == "doc" else queries
            stop = start + key_columns.stop - key_columns.start
            row_column = queries.start if rows == "query" else documents.start
            blocks.append(ScoreBlock(name, row_column, key_columns, rows == "doc", slice(start, stop)))
            start = stop
        if self.partition_mode == "per_direction":
            return [Softmax((block,), block.part, copies=1) for block in blocks]
        return [Softmax(tuple(blocks), slice(0, start), copies=2 if "doc_to_query" in self.directions else 1)]


def _check_options(loss: InfoNCE) -> None:
    check_number("hardness_strength", loss.hardness_strength)
    check_number("margin", loss.margin)
    if not 0 <= loss.hardness_strength < math.inf:
        raise ValueError(
            f"hardness_strength: found {loss.hardness_strength}, expected a finite number of at least 0. "
            "Give 0.0 or hardness_mode=None for no penalty."
        )
    if not 0 <= loss.margin < math.inf:
        raise ValueError(
            f"margin: found {loss.margin}, expected a finite number of at least 0. It is in units of the similarity: "
            "0.1 to 0.3 suits the cosine, 0.0 is none."
        )
    unknown = [direction for direction in loss.directions if direction not in DIRECTIONS]
    if unknown or "query_to_doc" not in loss.directions:
        raise ValueError(
            f"directions: found {loss.directions!r}, expected 'query_to_doc' and any of {DIRECTIONS[1:]}. Give a "
            "tuple that contains 'query_to_doc', where the positive pair stands."
        )
    if loss.partition_mode not in PARTITION_MODES:
        raise ValueError(
            f"partition_mode: found {loss.partition_mode!r}, expected one of {PARTITION_MODES}. Give 'joint' for one "
            "softmax over all directions."
        )
    if loss.partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(loss.directions):
        raise ValueError(
            f"partition_mode: found 'per_direction' with directions={loss.directions!r}, expected only 'query_to_doc' "
            "and 'doc_to_query' with it, whose candidates include the positive. Give partition_mode='joint' or leave "
            "'query_to_query' and 'doc_to_doc' out."
        )
    if loss.hardness_mode not in HARDNESS_MODES:
        raise ValueError(
            f"hardness_mode: found {loss.hardness_mode!r}, expected one of {HARDNESS_MODES}. Give None for no penalty."
        )
    if loss.hardness_mode is not None and loss.hardness_strength == 0.0:
        logger.warning(
            f"hardness_mode={loss.hardness_mode!r} has no effect with hardness_strength=0.0. Set hardness_strength to "
            "a positive value, or hardness_mode to None."
        )
