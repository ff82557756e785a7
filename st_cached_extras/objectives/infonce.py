"""InfoNCE over in-batch and hard negatives (van den Oord et al., arXiv 1807.03748, Eq. 4), derivative in closed form.

The mathematics of sentence-transformers' ``MultipleNegativesRankingLoss``, every option of it, as an objective: chunk
by chunk over this rank's rows, each chunk of scores turned in place into the derivative by those scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from sentence_transformers.util import cos_sim, similarity_fct_name
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult, compute_dtype
from st_cached_extras.objectives.checks import check_ranking_features, check_rows
from st_cached_extras.objectives.infonce_autograd import AutogradScores
from st_cached_extras.objectives.similarity import (
    ProductScores,
    ScoreBlock,
    Scores,
    is_cosine,
    is_dot,
    resolve_similarity,
)

logger = logging.getLogger(__name__)

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITION_MODES = ("joint", "per_direction")
HARDNESS_MODES = (None, "in_batch_negatives", "hard_negatives", "all_negatives")

CHUNK_BYTES = 16 * 2**20
CHUNK_ROWS = (16, 512)
SAFE_EXPONENT = 40.0  # exp(±40) and sums of millions of them are normal fp32 numbers: no maximum to subtract
# Below exp(this share of the smallest normal number's logarithm), e⁻⁶¹ in fp32, a factor is taken as 0: its products
# would be subnormal numbers, which make a matrix product up to 15 times slower.
NEGLIGIBLE = 0.7


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


class InfoNCE(Objective):
    """Each query's positive document against all other candidates of the batch, of all ranks.

    Notation: q, d rows of the features; u = q/|q|, v = d/|d| for the cosine, u = q, v = d for the inner product;
    s the scale; row i has the positive logit p_i = s·u_i·v_i and the negative logits l_ij of its directions:
    s·u_i·v_j (query_to_doc), s·u_i·u_j (query_to_query), s·v_i·u_j (doc_to_query), s·v_i·v_j (doc_to_doc, documents of
    the same query left out). With n_i = Σ_j exp(l_ij) over negatives only and c the number of times that the positive
    stands in the sum (twice in ``joint`` with doc_to_query, else once)::

        loss_i   = log(c·exp(p_i) + n_i) − p_i = log(c + exp(x_i)),   x_i = log n_i − p_i
        dl_ij    = exp(l_ij − log Z_i),   dp_i = −n_i / Z_i,           log Z_i = p_i + loss_i
        du_i     = (s/N)·Σ_j dl_ij key_j,   dkey_j = (s/N)·Σ_i dl_ij u_i,   dq = (du − (du·u) u) / |q|

    Keeping the positive out of the sum is what makes value and derivative right at tiny losses too: softmax − 1 would
    cancel. ``per_direction`` takes the mean over directions of such losses, each with its own sum. Hardness weighting
    (Lan et al., arXiv 2503.04812, Eq. 5) adds strength × similarity, held constant, to logits of query_to_doc: the
    factor in dl stays s.

    Arithmetic is fp32 (fp64 for fp64 features) with autocast off; torch's global TF32 setting applies as everywhere.
    Beyond features, one normalised copy of all ranks' and the cotangents, memory is one chunk of scores.

    Args:
        scale: s, the inverse temperature.
        similarity_fct: ``cos_sim``, ``dot_score`` or ``model.similarity``. Any other function (a [n, D], b [m, D]) →
            [n, m] that scores each pair by itself works too, its own derivative taken by autograd, chunk by chunk.
        directions: which candidates stand in the sum; "query_to_doc" always.
        partition_mode: "joint", one sum, or "per_direction" for "query_to_doc" and "doc_to_query".
        hardness_mode: which negatives of query_to_doc are penalised: "in_batch_negatives" (all but the row's own),
            "hard_negatives" (only the row's own), "all_negatives"; None for none.
        hardness_strength: the factor of the penalty, at least 0.
        learnable_scale: train s, as its logarithm, a parameter ``log_scale`` that starts at log(scale).
        chunk_size: rows of scores alive at a time; None for what fits 16 MiB, between 16 and 512.

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
    ) -> None:
        super().__init__()
        self.log_scale: nn.Parameter | None
        self.register_parameter("log_scale", None)
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.directions = (directions,) if isinstance(directions, str) else tuple(directions)
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self.chunk_size = chunk_size
        _check_options(self)
        if learnable_scale:
            self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def scale(self) -> float:
        """s, the inverse temperature; if it is learned, as it stands now."""
        return self._scale if self.log_scale is None else self.log_scale.exp().item()

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale
        if self.log_scale is not None:
            self.log_scale.data.fill_(math.log(scale))

    def extra_repr(self) -> str:
        scale = self.scale if self.log_scale is None else "learnable"
        return (
            f"scale={scale}, similarity_fct={similarity_fct_name(self.similarity_fct)}, "
            f"directions={self.directions}, partition_mode={self.partition_mode!r}, "
            f"hardness_mode={self.hardness_mode!r}, hardness_strength={self.hardness_strength}, "
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
        """Evaluate the loss and d loss / d features.

        Args:
            features: "anchor", "positive" and any number of "negative_1", "negative_2", ..., each [B, D], floating
                point; the same names and D on every rank.
            labels: ignored: row i's positive is "positive"[i].
            reference: ignored.
            rows: int64 [b], local rows whose cotangents are wanted (on all ranks or on none); None for all.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            An :class:`ObjectiveResult`: loss, a scalar, and cotangents, [b, D] per name, in fp32 or fp64.

        Raises:
            TypeError: features that are not floating point, or rows that are not int64.
            ValueError: names, row counts or widths that do not fit; rows outside the batch.
        """
        names = check_ranking_features(features)
        check_rows(rows, len(features["anchor"]))
        world = World() if world is None else world
        columns = [features[name] for name in names]
        rows = None if rows is None else rows.to(columns[0].device)
        with torch.no_grad(), torch.autocast(columns[0].device.type, enabled=False):
            loss, cotangents, parameter_cotangents = self._evaluate(columns, rows, world, compute_dtype(features))
        # In the features' own order of names.
        cotangents = dict(zip(names, cotangents, strict=True))
        return ObjectiveResult(loss, {name: cotangents[name] for name in features}, parameter_cotangents)

    def _evaluate(
        self, columns: list[Tensor], rows: Tensor | None, world: World, dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """``columns``: the documents' first, the anchor last, so that every direction's keys are one slice of them."""
        scores = self._scores(columns, rows, world, dtype)
        softmaxes = self._softmaxes(len(columns))
        B, N, width = scores.count, scores.keys.shape[1], softmaxes[-1].part.stop
        chunk = min(B, self.chunk_size or _chunk_rows(width * N * dtype.itemsize))
        logits = scores.keys.new_empty(chunk, width * N)
        loss = scores.keys.new_zeros(())
        s = self.scale
        for begin in range(0, B, chunk):
            end = min(begin + chunk, B)
            loss += self._chunk(s, scores, softmaxes, logits[: end - begin], begin, end)
        parameter_cotangents = {name: world.all_reduce(g) for name, g in scores.parameter_gradients.items()}
        if scores.log_scale_gradient is not None:
            parameter_cotangents["log_scale"] = world.all_reduce(scores.log_scale_gradient)
        return world.all_reduce(loss), scores.cotangents(), parameter_cotangents

    def _chunk(
        self, s: float, scores: Scores, softmaxes: list[Softmax], logits: Tensor, begin: int, end: int
    ) -> Tensor:
        """Own rows ``begin`` to ``end`` forth and back; returns their share of the loss. ``logits`` is scratch."""
        alpha, N = self._alpha(), scores.keys.shape[1]
        negligible = NEGLIGIBLE * math.log(torch.finfo(logits.dtype).tiny)
        own = {}
        for block in (block for softmax in softmaxes for block in softmax.blocks):
            out = logits[:, block.part.start * N : block.part.stop * N]  # [b, k·N]
            scores.forward(block, begin, end, self._factor(block.name, s), out)
            # Entries of row i at key rows i: the diagonal of the square at this chunk's own rows, a view.
            square = out.unflatten(1, (-1, N))[..., scores.offset + begin : scores.offset + end]  # [b, k, b]
            own[block.name] = square.diagonal(dim1=0, dim2=2)  # [k, b]
        positive = own["query_to_doc"][0] * (s / self._factor("query_to_doc", s))  # p, never penalised, [b]
        self._mask(own, s)

        loss = logits.new_zeros(())
        for softmax in softmaxes:
            E = logits[:, softmax.part.start * N : softmax.part.stop * N]  # [b, columns·N]
            m = logits.new_zeros(())
            if (s + alpha) * scores.bound > SAFE_EXPONENT:
                m = E.amax(dim=1).clamp_min_(torch.finfo(E.dtype).min)  # finite in a row without negatives, [b]
                nn.functional.threshold_(E.sub_(m[:, None]), negligible, -torch.inf)
            n = E.exp_().sum(dim=1)  # Σ_j exp(l_j − m), [b]
            x = n.log() + m - positive
            loss_i = torch.logaddexp(x, x.new_tensor(math.log(softmax.copies)))  # log(c + exp(x)), exact when tiny
            # r = exp(m − log Z) makes E the derivative; it is left to the rows, which are narrower than the chunk.
            r = nn.functional.threshold_(torch.exp(m - positive - loss_i), math.exp(negligible), 0.0)
            own[softmax.blocks[0].name][0] = -n
            share = 1.0 / (N * len(softmaxes))
            loss += loss_i.sum() * share
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

    def _scores(self, columns: list[Tensor], rows: Tensor | None, world: World, dtype: torch.dtype) -> Scores:
        similarity_fct = resolve_similarity(self.similarity_fct)
        if is_cosine(similarity_fct) or is_dot(similarity_fct):
            scores: Scores = ProductScores(columns, rows, world, dtype, normalize=is_cosine(similarity_fct))
        else:
            parameters = {name: p for name, p in self.named_parameters() if p.requires_grad and name != "log_scale"}
            scores = AutogradScores(columns, rows, world, dtype, similarity_fct=similarity_fct, parameters=parameters)
        if self.log_scale is not None and self.log_scale.requires_grad:
            scores.log_scale_gradient = scores.keys.new_zeros(())
        return scores

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


def _chunk_rows(row_bytes: int) -> int:
    """Rows of scores that fit the budget, within the range where the products are efficient."""
    fewest, most = CHUNK_ROWS
    return max(fewest, min(most, CHUNK_BYTES // row_bytes))


def _check_options(loss: InfoNCE) -> None:
    for name in ("scale", "hardness_strength"):
        value = getattr(loss, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: found {value!r}, expected a number. Give a float, such as {name}=20.0.")
    if not 0 < loss.scale < math.inf:
        raise ValueError(
            f"scale: found {loss.scale}, expected a positive finite number. It is 1 / temperature: 20.0 suits the "
            "cosine, 1.0 the inner product."
        )
    if not 0 <= loss.hardness_strength < math.inf:
        raise ValueError(
            f"hardness_strength: found {loss.hardness_strength}, expected a finite number of at least 0. "
            "Give 0.0 or hardness_mode=None for no penalty."
        )
    if not callable(loss.similarity_fct):
        raise TypeError(
            f"similarity_fct: found {loss.similarity_fct!r}, expected a function of two batches of embeddings. Give "
            "sentence_transformers.util.cos_sim or dot_score, or model.similarity."
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
    if loss.chunk_size is not None and (
        isinstance(loss.chunk_size, bool) or not isinstance(loss.chunk_size, int) or loss.chunk_size < 1
    ):
        raise ValueError(
            f"chunk_size: found {loss.chunk_size!r}, expected a positive int or None. Give None to have it chosen "
            "from a memory budget."
        )
