"""What objectives that score all rows against all rows share: scale, similarity, and one chunk of scores at a time.

A chunk holds the scores of some of this rank's rows against the rows of all ranks. A subclass turns it in place into
the derivative of its loss by those scores; :mod:`~st_cached_extras.objectives.similarity` takes it from there.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.util import cos_sim, similarity_fct_name
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult, compute_dtype
from st_cached_extras.objectives.checks import check_rows
from st_cached_extras.objectives.infonce_autograd import AutogradScores
from st_cached_extras.objectives.similarity import (
    ProductScores,
    Scores,
    is_cosine,
    is_dot,
    resolve_similarity,
)

CHUNK_BYTES = 16 * 2**20
CHUNK_ROWS = (16, 512)
SAFE_EXPONENT = 40.0  # exp(±40) and sums of millions of them are normal fp32 numbers: no maximum to subtract
# Below exp(this share of the smallest normal number's logarithm), e⁻⁶¹ in fp32, a factor is taken as 0: its products
# would be subnormal numbers, which make a matrix product up to 15 times slower.
NEGLIGIBLE = 0.7


@dataclass
class Evaluation:
    """What this rank's rows yield, their sum over ranks outstanding.

    Attributes:
        loss: this rank's share of the loss.
        parameter_gradients: its share of d loss / d parameter, of the parameters that are not part of the scores.
        metrics: scalars that are the same on every rank.
    """

    loss: Tensor
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)


class ContrastiveObjective(Objective):
    """Base of the objectives over scores; a subclass says which columns there are and evaluates the chunks.

    Arithmetic is fp32 (fp64 for fp64 features) with autocast off; torch's global TF32 setting applies as everywhere.
    Beyond features, one normalised copy of all ranks' and the cotangents, memory is one or two chunks of scores.

    Args:
        scale: s, by which similarities are multiplied: the inverse temperature.
        similarity_fct: ``cos_sim``, ``dot_score`` or ``model.similarity``. Any other function (a [n, D], b [m, D]) →
            [n, m] that scores each pair by itself works too, its own derivative taken by autograd, chunk by chunk.
        learnable_scale: train s, as its logarithm, a parameter ``log_scale`` that starts at log(scale).
        chunk_size: rows of scores alive at a time; None for what fits 16 MiB, or half of the features if that is
            more, between 16 and 512.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        scale: float,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        learnable_scale: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        check_number("scale", scale)
        if not 0 < scale < math.inf:
            raise ValueError(
                f"scale: found {scale}, expected a positive finite number. It is 1 / temperature: 20.0 suits the "
                "cosine, 1.0 the inner product."
            )
        if not callable(similarity_fct):
            raise TypeError(
                f"similarity_fct: found {similarity_fct!r}, expected a function of two batches of embeddings. Give "
                "sentence_transformers.util.cos_sim or dot_score, or model.similarity."
            )
        if chunk_size is not None and (
            isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
        ):
            raise ValueError(
                f"chunk_size: found {chunk_size!r}, expected a positive int or None. Give None to have it chosen from "
                "a memory budget."
            )
        self.log_scale: nn.Parameter | None
        self.register_parameter("log_scale", nn.Parameter(torch.tensor(math.log(scale))) if learnable_scale else None)
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.chunk_size = chunk_size

    @property
    def scale(self) -> float:
        """s, the inverse temperature; if it is learned, as it stands now."""
        return self._scale if self.log_scale is None else self.log_scale.exp().item()

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale
        if self.log_scale is not None:
            self.log_scale.data.fill_(math.log(scale))

    def options(self) -> dict[str, Any]:
        """The configuration as plain JSON types; a learned value as it stands now."""
        return {
            "scale": self.scale,
            "learnable_scale": self.log_scale is not None,
            "similarity_fct": similarity_fct_name(self.similarity_fct),
        }

    def extra_repr(self) -> str:
        options = {name: value for name, value in self.options().items() if name not in self._learned()}
        return ", ".join(f"{name}={value!r}" for name, value in {**options, "chunk_size": self.chunk_size}.items())

    def _learned(self) -> set[str]:
        """The options that are where training has brought them."""
        return {"scale"} if self.log_scale is not None else set()

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
            features: the columns that the objective's own documentation names, each [B, D], floating point; the same
                names and D on every rank.
            labels: one per row, for the objectives and options that read them; of any dtype.
            reference: ignored.
            rows: int64 [b], local rows whose cotangents are wanted (on all ranks or on none); None for all.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            An :class:`ObjectiveResult`: loss, a scalar, and cotangents, [b, D] per name, in fp32 or fp64.

        Raises:
            TypeError: features that are not floating point, labels that are missing, or rows that are not int64.
            ValueError: names, row counts or widths that do not fit; rows outside the batch.
        """
        names = self._column_order(features)
        count = len(features[names[0]])
        check_rows(rows, count)
        labels = self._read_labels(labels, count, len(names))
        world = World() if world is None else world
        columns = [features[name] for name in names]
        rows = None if rows is None else rows.to(columns[0].device)
        with torch.no_grad(), torch.autocast(columns[0].device.type, enabled=False):
            scores = self._scores(columns, rows, world, compute_dtype(features))
            if labels is not None:
                labels = world.gather_rows(labels.to(columns[0].device), scores.counts)  # [N, ...]
            evaluation = self._evaluate(scores, labels)
            parameters = {**scores.parameter_gradients, **evaluation.parameter_gradients}
            if scores.log_scale_gradient is not None:
                parameters["log_scale"] = scores.log_scale_gradient
            loss = world.all_reduce(evaluation.loss)
            parameters = {name: world.all_reduce(gradient) for name, gradient in parameters.items()}
            cotangents = dict(zip(names, scores.cotangents(), strict=True))
        # In the features' own order of names.
        cotangents = {name: cotangents[name] for name in features}
        return ObjectiveResult(loss, cotangents, parameters, evaluation.metrics)

    @abstractmethod
    def _column_order(self, features: Mapping[str, Tensor]) -> list[str]:
        """The names of the columns as :meth:`_evaluate` wants them; an error if they do not fit."""

    def _read_labels(self, labels: Tensor | None, count: int, columns: int) -> Tensor | None:
        """What of the labels is gathered and read, [B, ...], not bool; None if nothing is. By default nothing."""
        return None

    @abstractmethod
    def _evaluate(self, scores: Scores, labels: Tensor | None) -> Evaluation:
        """Take every chunk of this rank's scores forth and back. ``labels`` are those of all ranks, [N, ...]."""

    def _scores(self, columns: list[Tensor], rows: Tensor | None, world: World, dtype: torch.dtype) -> Scores:
        similarity_fct = resolve_similarity(self.similarity_fct)
        if is_cosine(similarity_fct) or is_dot(similarity_fct):
            scores: Scores = ProductScores(columns, rows, world, dtype, normalize=is_cosine(similarity_fct))
        else:
            owned = similarity_fct.named_parameters() if isinstance(similarity_fct, nn.Module) else ()
            parameters = {f"similarity_fct.{name}": p for name, p in owned if p.requires_grad}
            scores = AutogradScores(columns, rows, world, dtype, similarity_fct=similarity_fct, parameters=parameters)
        if self.log_scale is not None and self.log_scale.requires_grad:
            scores.log_scale_gradient = scores.keys.new_zeros(())
        return scores

    def _chunks(self, scores: Scores, width: int) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, scratch [end − begin, width]) over this rank's rows."""
        keys = scores.keys
        rows = min(scores.count, self.chunk_size or chunk_rows(width * keys.dtype.itemsize, keys.nbytes))
        scratch = scores.keys.new_empty(rows, width)
        for begin in range(0, scores.count, rows):
            end = min(begin + rows, scores.count)
            yield begin, end, scratch[: end - begin]


def exponentiate(logits: Tensor, largest: float) -> Tensor:
    """exp(logits − m) in place; returns m, [b, 1] or a scalar: each row's maximum, or 0 if none is above ``largest``.

    Args:
        logits: [b, columns]; −∞ becomes 0. A row of −∞ alone has a finite m.
        largest: a bound on the absolute value of the finite ones.
    """
    m = logits.new_zeros(())
    if largest > SAFE_EXPONENT:
        m = logits.amax(dim=1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
        nn.functional.threshold_(logits.sub_(m), negligible(logits.dtype), -torch.inf)
    logits.exp_()
    return m


def negligible(dtype: torch.dtype) -> float:
    """The logarithm below which a factor is taken as 0."""
    return NEGLIGIBLE * math.log(torch.finfo(dtype).tiny)


def same_group(labels: Tensor, scores: Scores, begin: int, end: int) -> Tensor:
    """Whether own rows ``begin`` to ``end`` have the label of each row of all ranks: bool [end − begin, N]."""
    own = labels[scores.offset + begin : scores.offset + end]
    return own[:, None] == labels[None, :]


def own_entries(block: Tensor, scores: Scores, begin: int, end: int) -> Tensor:
    """Entries of row i at key rows i in the scores of own rows ``begin`` to ``end``, a view.

    Args:
        block: [end − begin, k·N], scores against k columns.

    Returns:
        [k, end − begin].
    """
    square = block.unflatten(1, (-1, scores.keys.shape[1]))[..., scores.offset + begin : scores.offset + end]
    return square.diagonal(dim1=0, dim2=2)


def chunk_rows(row_bytes: int, held_bytes: int) -> int:
    """Rows of scores that fit the budget, within the range where the products are efficient.

    Every chunk reads all keys and adds to the gradient of all: with few rows, a product waits for memory. In a very
    large batch the budget grows with them.

    Args:
        row_bytes: of one row of scores.
        held_bytes: of the features that are held anyway.
    """
    fewest, most = CHUNK_ROWS
    return max(fewest, min(most, max(CHUNK_BYTES, held_bytes // 2) // row_bytes))


def check_number(name: str, value: Any) -> None:
    """A number; if not, a TypeError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: found {value!r}, expected a number. Give a float, such as {name}=1.0.")
