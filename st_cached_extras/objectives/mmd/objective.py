"""Distribution matching against several frozen encoders (arXiv 2607.02375), value and derivative in closed form.

Per encoder the squared maximum mean discrepancy between the batch and a reference that landmarks sum up, and its
derivative by the features, in one pass over the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult, compute_dtype
from st_cached_extras.objectives.checks import check_rows
from st_cached_extras.objectives.mmd.balance import EncoderBalance
from st_cached_extras.objectives.mmd.checks import check_features, check_statistic
from st_cached_extras.objectives.mmd.layouts import from_blocks, to_blocks
from st_cached_extras.objectives.mmd.nystrom import NystromReference
from st_cached_extras.objectives.mmd.pairs import PairSums
from st_cached_extras.objectives.mmd.row_order import RowOrder
from st_cached_extras.replay.cotangents import attach_cotangents

Statistic = Literal["v", "u"]
CONDITION = "condition"


class MultiEncoderMMD(Objective):
    """Weighted sum over encoders of the squared MMD between the batch's features and each encoder's reference.

    With x the B rows of all ranks under one encoder, Z and α its landmarks and their coefficients, c the T rows of the
    current reference, ρ their weight, and w = −2 dk/d(d²) the kernel's derivative weight::

        raw = (1/B²) Σ_ij k(x_i, x_j) − (2/B) Σ_i [(1−ρ) k(x_i, Z) α + (ρ/T) Σ_t k(x_i, c_t)]
              + (1−ρ)² k_rr + 2ρ(1−ρ) k_rc + ρ² k_cc
        ∂raw/∂x_i = −(2/B²) Σ_j w_ij (x_i − x_j) + (2/B) [(1−ρ) Σ_m α_m w_im (x_i − z_m) + (ρ/T) Σ_t w_it (x_i − c_t)]
        loss = Σ_e weight_e · raw_e / (|raw_e| + eps)        (without normalize: Σ_e weight_e · raw_e)

    The normaliser |raw_e| + eps is held constant in the derivative: every encoder then pulls as hard as its weight
    says, whatever its scale, and the loss itself stays near the sum of the weights. Watch ``metrics``, the raw values.
    With the V-statistic, i = j included, raw has for equal distributions the mean (k(0) − k_rr)/B, its floor. The
    U-statistic leaves i = j out and divides by B(B − 1): its mean is then 0, and it goes below.

    Each row's derivative is against all B rows, also where only ``rows`` are wanted. Arithmetic is fp32 (fp64 for
    fp64 features) with autocast off, on rows relative to the batch's mean; sums of kernel values are in fp64.

    A reference with a condition holds the joint law of features and condition: "condition" [B, C] is then expected
    beside the encoders' features (and beside those of the current reference), and its cotangent is 0.

    Args:
        references: a reference per encoder; its name is the name of the features.
        weights: a weight per encoder, or an :class:`EncoderBalance` that sets them; None for 1 each.
        statistic: "v" or "u".
        normalize: divide each encoder's part by its own value.
        eps: added to the normaliser, so that a part that has vanished is not blown up.
        current_reference_weight: ρ, from 0 to 1: how much of the target are the rows given as ``reference``, e.g. the
            teacher's features of this very batch, instead of the landmarks.
        chunk_size: rows of pairs alive at a time; None for what fits 8 MiB, between 32 and 512.

    Attributes:
        references: by encoder.
        weights: by encoder, as they stand now.

    Raises:
        TypeError: ``references`` or ``weights`` of the wrong type.
        ValueError: an argument out of its range, or names that do not fit.
    """

    def __init__(
        self,
        references: Mapping[str, NystromReference],
        weights: Mapping[str, float] | EncoderBalance | None = None,
        statistic: Statistic = "v",
        normalize: bool = True,
        eps: float = 1e-7,
        current_reference_weight: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        _check_references(references)
        check_statistic(statistic, chunk_size)
        if not 0 < eps < math.inf:
            raise ValueError(f"eps: found {eps!r}, expected a positive finite number. Give 1e-7.")
        if not 0 <= current_reference_weight <= 1:
            raise ValueError(
                f"current_reference_weight: found {current_reference_weight!r}, expected a number from 0 (landmarks "
                "alone) to 1 (the rows given as reference alone)."
            )
        # A list, because the names of encoders hold characters that those of modules may not.
        self._references = nn.ModuleList(references.values())
        self._encoders = tuple(references)
        self.conditional = any(reference.condition_size for reference in references.values())
        self.names = (*self._encoders, CONDITION) if self.conditional else self._encoders
        self.statistic = statistic
        self.normalize = normalize
        self.eps = eps
        self.current_reference_weight = current_reference_weight
        self.chunk_size = chunk_size
        self.balance: EncoderBalance | None = None
        self.set_weights(weights)

    @property
    def references(self) -> dict[str, NystromReference]:
        return dict(zip(self._encoders, self._references, strict=True))

    @property
    def uses_reference(self) -> bool:
        return self.current_reference_weight > 0

    @property
    def sample_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: ref.sample_shape for name, ref in self.references.items() if ref.sample_shape is not None}
        if self.conditional:
            shapes[CONDITION] = (max(reference.condition_size for reference in self._references),)
        return shapes

    @property
    def weights(self) -> dict[str, float]:
        return dict(self._weights if self.balance is None else self.balance.weights)

    def set_weights(self, weights: Mapping[str, float] | EncoderBalance | None) -> None:
        """Replace the weights; arguments as of the constructor."""
        values = weights.weights if isinstance(weights, EncoderBalance) else weights
        values = dict.fromkeys(self._encoders, 1.0) if values is None else values
        if not isinstance(values, Mapping):
            raise TypeError(f"weights: found {type(values).__name__}, expected a mapping from encoder to number.")
        if values.keys() != set(self._encoders) or not all(0 <= weight < math.inf for weight in values.values()):
            raise ValueError(
                f"weights: found {dict(values)}, expected one finite number of at least 0 for each of "
                f"{', '.join(self._encoders)}. Give None for 1 each."
            )
        self.balance = weights if isinstance(weights, EncoderBalance) else None
        self._weights = {name: float(values[name]) for name in self._encoders}

    def extra_repr(self) -> str:
        return (
            f"encoders={self._encoders}, statistic={self.statistic!r}, normalize={self.normalize}, eps={self.eps}, "
            f"current_reference_weight={self.current_reference_weight}, chunk_size={self.chunk_size}"
        )

    # ------------------------------------------------------------------------------------ value and cotangents

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
            features: per encoder [B, ...] as its reference says; "condition" [B, C] where references have one.
            labels: ignored.
            reference: the current reference, under the same names, [T, ...] each; ignored where its weight is 0.
            rows: int64 [b], local rows whose cotangents are wanted (on all ranks or on none); None for all.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            An :class:`ObjectiveResult`; ``metrics["mmd/NAME"]`` is the raw value of encoder NAME.

        Raises:
            TypeError: features that are not floating point, or rows that are not int64.
            ValueError: names, shapes or row counts that do not fit; rows outside the batch.
        """
        current = reference if self.uses_reference else None
        check_features("features", features, self.names, self.sample_shapes)
        if self.uses_reference:
            if current is None:
                raise ValueError(
                    f"reference: found None with current_reference_weight={self.current_reference_weight}, expected "
                    f"features of {', '.join(self.names)}. Give them, or set current_reference_weight=0."
                )
            check_features("reference", current, self.names, self.sample_shapes, may_be_empty=True)
        first = next(iter(features.values()))
        check_rows(rows, len(first))
        world = World() if world is None else world
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            return self._evaluate(features, current, rows, world, compute_dtype(features))

    def _evaluate(
        self,
        features: Mapping[str, Tensor],
        current: Mapping[str, Tensor] | None,
        rows: Tensor | None,
        world: World,
        dtype: torch.dtype,
    ) -> ObjectiveResult:
        first = next(iter(features.values()))
        order = RowOrder(len(first), rows, world, first.device)
        current_order = None
        if current is not None:
            empty = torch.zeros(0, dtype=torch.int64)
            current_order = RowOrder(len(next(iter(current.values()))), empty, world, first.device)
        condition = self._gathered(features, CONDITION, order, dtype) if self.conditional else None
        current_condition = None
        if self.conditional and current is not None:
            current_condition = self._gathered(current, CONDITION, current_order, dtype)

        partial: list[Tensor] = []  # own rows' part of the raw values, by encoder
        gradients: dict[str, Tensor] = {}
        for name, ref in self.references.items():
            x = self._blocks(ref, self._gathered(features, name, order, dtype), condition)
            c = None
            if current is not None:
                c = self._blocks(ref, self._gathered(current, name, current_order, dtype), current_condition)
            raw, gradient = zip(
                *(
                    self._of_block(ref, p, x[p], order, None if c is None else c[p], current_order)
                    for p in range(len(x))
                ),
                strict=True,
            )
            partial.append(torch.stack(raw).mean())
            gradient = torch.stack(gradient).div_(len(x))  # [P, b, J]
            gradients[name] = from_blocks(gradient, ref.layout, tuple(features[name].shape[1:]))

        raws = world.all_reduce(torch.stack(partial))  # [encoders]
        loss = raws.new_zeros(())
        metrics, cotangents = {}, {}
        for (name, gradient), raw in zip(gradients.items(), raws, strict=True):
            scale = self.weights[name] / (raw.abs() + self.eps) if self.normalize else self.weights[name]
            loss += scale * raw
            metrics[f"mmd/{name}"] = raw.to(dtype)
            cotangents[name] = order.as_wanted(gradient.mul_(scale))
        if self.conditional:
            cotangents[CONDITION] = condition.new_zeros(order.wanted, *features[CONDITION].shape[1:])
        # In the features' own order of names.
        return ObjectiveResult(loss.to(dtype), {name: cotangents[name] for name in features}, metrics=metrics)

    def _gathered(self, features: Mapping[str, Tensor], name: str, order: RowOrder, dtype: torch.dtype) -> Tensor:
        return order.gather(features[name].detach()).to(dtype)

    def _blocks(self, ref: NystromReference, x: Tensor, condition: Tensor | None) -> Tensor:
        weighted = None if condition is None or not ref.condition_size else ref.condition_weight * condition
        return to_blocks(x, ref.layout, weighted)

    def _of_block(
        self,
        ref: NystromReference,
        block: int,
        x: Tensor,
        order: RowOrder,
        c: Tensor | None,
        current_order: RowOrder | None,
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of raw, a scalar, and d raw / d x [differentiated, J].

        Args:
            x: [N, J], rows of all ranks in ``order``.
            c: [T, J], the current reference's, in ``current_order``.
        """
        sigma, rho, scales = ref.sigma[block], self.current_reference_weight, len(ref.kernel.scales)
        shift = x.mean(dim=0)
        targets, alpha = ref.targets(block, shift)  # [M, J], [scales, M]
        sums = PairSums((x - shift).div_(sigma), order.differentiated, order.own, ref.kernel, self.chunk_size)
        B = order.total
        diagonal, pairs = (0.0, B * B) if self.statistic == "v" else (ref.kernel.at_zero, max(1, B * (B - 1)))
        share = order.own / B  # of what is the same on every rank
        raw = (sums.among_themselves(2 / pairs) - order.own * diagonal) / pairs
        constant = ref.k_rr[block]
        if c is None:
            coefficients = alpha
        else:
            c, T = (c - shift).div_(sigma), current_order.total
            current_sums = PairSums(c, 0, current_order.own, ref.kernel, self.chunk_size)
            k_rc = current_sums.against(targets, alpha / scales, 0.0) / T
            k_cc = current_sums.among_themselves(0.0) / T**2
            raw = raw + 2 * rho * (1 - rho) * k_rc + rho**2 * k_cc
            constant *= (1 - rho) ** 2
            coefficients = torch.cat([(1 - rho) * alpha, alpha.new_full((scales, T), rho / T)], dim=1)
            targets = torch.cat([targets, c])
        raw = raw - sums.against(targets, coefficients / scales, -2 / B) * (2 / B) + share * constant
        return raw, sums.finish().div_(sigma)

    # -------------------------------------------------------------------------------------------- as a function

    def forward(
        self,
        *,
        gradient_students: Mapping[str, Tensor],
        student_reference: Mapping[str, Tensor] | None = None,
        current_teacher: Mapping[str, Tensor] | None = None,
        gradient_student_indices: Tensor | None = None,
        world: World | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss as a function under autograd, differentiable in some of the rows.

        Args:
            gradient_students: per encoder, [b, ...] with a graph: the rows that are differentiated.
            student_reference: per encoder, [B, ...], the features of the whole batch, those rows among them as they
                were collected without a graph; None if ``gradient_students`` are the whole batch.
            current_teacher: the current reference, [T, ...], where its weight is above 0.
            gradient_student_indices: int64 [b], where in the batch ``gradient_students`` stand; None for all.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            (loss, metadata): a scalar whose derivative by ``gradient_students`` is that of the whole batch's loss
            by those rows, no more and no less (an estimate from b of B rows drawn at random wants B/b times it); and
            the raw values by encoder, "mmd/NAME", detached.

        Raises:
            TypeError, ValueError: as :meth:`value_and_cotangents`, or rows and indices that do not fit.
        """
        batch = gradient_students if student_reference is None else student_reference
        check_features("gradient_students", gradient_students, self.names, self.sample_shapes)
        result = self.value_and_cotangents(
            {name: batch[name].detach() for name in self.names if name in batch},
            reference=current_teacher,
            rows=gradient_student_indices,
            world=world,
        )
        tensors, cotangents = [], []
        for name, students in gradient_students.items():
            if students.shape != result.cotangents[name].shape:
                raise ValueError(
                    f"gradient_students[{name!r}]: shape {list(students.shape)}, expected "
                    f"{list(result.cotangents[name].shape)}: a row for each of gradient_student_indices, or all rows "
                    "without them."
                )
            if students.requires_grad:
                tensors.append(students)
                cotangents.append(result.cotangents[name])
        loss = attach_cotangents(result.loss, tensors, cotangents) if tensors else result.loss
        return loss, result.metrics


def _check_references(references: Any) -> None:
    if not isinstance(references, Mapping) or not all(isinstance(x, NystromReference) for x in references.values()):
        raise TypeError(
            f"references: found {references!r}, expected a mapping from encoder to NystromReference. Give "
            "{'encoder': NystromReference.load(path)}."
        )
    if not references or CONDITION in references:
        raise ValueError(
            f"references: found the encoders {list(references)}, expected one or more, none named {CONDITION!r}."
        )
    sizes = {name: reference.condition_size for name, reference in references.items() if reference.condition_size}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"references: conditions of different sizes, {sizes}, expected one condition for all.")
