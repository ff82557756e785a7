"""Radial kernels: value and derivative weight from squared distances, chunk by chunk, in place.

A radial kernel is k(x, y) = f(|x − y|²). Its derivative needs one number per pair, the weight w = −2 f′(|x − y|²)::

    ∂k/∂x = −w (x − y),      Σ_j ∂k(x, y_j)/∂x = (W Y)_x − (Σ_j w_j) x

so that a sum over pairs costs one product for the distances and one for the derivative, and never a [b, n, D] tensor.
Distances are in units of the bandwidth; a kernel of several scales is the mean of its kernel at each of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

# A power of a kernel's value is that of a narrower scale: exp(−d²/2s²) to the fourth is that at s/2. Up to the 16th
# power, four squarings, which multiply the rounding error by no more than that.
MOST_SQUARINGS = 4
# At exp of this share of the smallest normal number's logarithm, e⁻⁶¹ in fp32, exponential kernels stay: still smaller
# values would be subnormal numbers, which make a matrix product several times slower.
NEGLIGIBLE = 0.7


class Kernel(ABC):
    """Mean over scales s of a radial kernel k_s.

    Args:
        scales: the scales, in units of the bandwidth σ.

    Attributes:
        name: what files and arguments call it.
        at_zero: k(x, x).
        by_distance: whether its weight grows as 1/d, so that the weight of coincident points is set to 0.
        is_positive_definite: whether every Gram matrix is; if not, the kernel is so only for coefficients of sum 0.

    Raises:
        ValueError: no scale, or one that is not a positive finite number.
    """

    name: ClassVar[str]
    at_zero: ClassVar[float] = 1.0
    by_distance: ClassVar[bool] = False
    is_positive_definite: ClassVar[bool] = True

    def __init__(self, scales: Sequence[float] = (1.0,)) -> None:
        self.scales = tuple(float(scale) for scale in scales)
        if not self.scales or not all(0 < scale < math.inf for scale in self.scales):
            raise ValueError(
                f"scales: found {tuple(scales)!r}, expected at least one positive finite number. Give (0.5, 1, 2), or "
                "(1,) for a single bandwidth."
            )
        # Widest first: (index of the scale, squarings that make it out of the one before, None to compute it).
        self._plan: list[tuple[int, int | None]] = []
        for index in sorted(range(len(self.scales)), key=lambda index: -self.scales[index]):
            wider = self.scales[self._plan[-1][0]] if self._plan else None
            self._plan.append((index, None if wider is None else self._squarings(wider, self.scales[index])))
        self._keeps_argument = self.by_distance or any(squarings is None for _, squarings in self._plan[1:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(scales={self.scales})"

    # ------------------------------------------------------------------------------ what a kernel is defined by

    @abstractmethod
    def _value(self, argument: Tensor, scale: float, out: Tensor) -> Tensor:
        """k_s into ``out``, which may be ``argument``: d² in units of σ, or d where ``by_distance``."""

    @abstractmethod
    def _weight_(self, value: Tensor, scale: float) -> tuple[Tensor, float]:
        """(w, factor) out of k_s, in place: the weight is w × factor, still to be divided by d if ``by_distance``."""

    def _squarings(self, wider: float, scale: float) -> int | None:
        """How often k at the wider scale is squared to give k at this one; None if it does not."""
        return None

    def farthest(self, dtype: torch.dtype) -> float:
        """The squared distance beyond which k is as good as 0; farther pairs may be taken to be that far."""
        return math.inf

    # ------------------------------------------------------------------------------------------- what it is for

    def value(self, squared: Tensor) -> Tensor:
        """k for squared distances in units of σ², of any shape."""
        return self.values(squared).mean(dim=0)

    def values(self, squared: Tensor) -> Tensor:
        """k_s per scale, [scales, ...], for squared distances in units of σ²."""
        argument = squared.sqrt() if self.by_distance else squared
        return torch.stack([self._value(argument, scale, torch.empty_like(argument)) for scale in self.scales])

    def weight(self, squared: Tensor) -> Tensor:
        """w for squared distances in units of σ², of any shape; 0 at 0 where ``by_distance``."""
        weights = []
        for value, scale in zip(self.values(squared), self.scales, strict=True):
            weight, factor = self._weight_(value, scale)
            weights.append(weight * factor)
        weight = torch.stack(weights).mean(dim=0)
        return torch.where(squared > 0, weight / squared.sqrt(), 0.0) if self.by_distance else weight

    @property
    def buffers(self) -> int:
        """How many [b, n] buffers :meth:`contract` works in, the squared distances among them."""
        return 1 + self._keeps_argument + (len(self.scales) > 1)

    def contract(
        self,
        buffers: Sequence[Tensor],
        value_coefficients: Tensor,
        weight_coefficients: Tensor | None = None,
        with_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None, float]:
        """Sum a block of pairs over its columns, and leave the weights for the product that is the derivative.

        Args:
            buffers: :attr:`buffers` tensors [b, n]; the first holds d², all are overwritten.
            value_coefficients: c, [scales, n].
            weight_coefficients: e, [scales, n]; None for 1 / scales throughout.
            with_weights: False leaves the weights out.

        Returns:
            (Σ_s Σ_j c_sj k_s(d_ij), [b]; W, [b, n]; a factor): W × factor is Σ_s e_sj w_s(d_ij).
        """
        argument = buffers[0].sqrt_() if self.by_distance else buffers[0]
        k = buffers[1] if self._keeps_argument else argument
        several = len(self.scales) > 1
        W, common = (buffers[-1] if several else k), 1.0
        values: Tensor | None = None
        for position, (index, squarings) in enumerate(self._plan):
            scale = self.scales[index]
            if squarings is None:
                self._value(argument, scale, out=k)
            else:
                for _ in range(squarings):
                    k.mul_(k)
            of_scale = k @ value_coefficients[index]
            values = of_scale if values is None else values.add_(of_scale)
            if not with_weights:
                continue
            w, factor = self._weight_(k, scale)
            if weight_coefficients is None and not several:
                common = factor  # left to the product
            elif weight_coefficients is None:
                factor /= len(self.scales)
                W.add_(w, alpha=factor) if position else torch.mul(w, factor, out=W)
            else:
                e = weight_coefficients[index] * factor
                W.addcmul_(w, e) if position else torch.mul(w, e, out=W)
        if not with_weights:
            return values, None, common
        if self.by_distance:
            W.div_(argument.masked_fill_(argument == 0, torch.inf))
        return values, W, common


class Gaussian(Kernel):
    """k = exp(−d²/2s²), w = k/s²."""

    name = "gaussian"

    def _value(self, argument: Tensor, scale: float, out: Tensor) -> Tensor:
        return torch.mul(argument, -0.5 / scale**2, out=out).exp_()

    def _weight_(self, value: Tensor, scale: float) -> tuple[Tensor, float]:
        return value, 1 / scale**2

    def _squarings(self, wider: float, scale: float) -> int | None:
        return _exact_squarings((wider / scale) ** 2)

    def farthest(self, dtype: torch.dtype) -> float:
        return 2 * max(self.scales) ** 2 * _largest_exponent(dtype)


class Laplace(Kernel):
    """k = exp(−d/s), w = k/(s d), 0 at d = 0."""

    name = "laplace"
    by_distance = True

    def _value(self, argument: Tensor, scale: float, out: Tensor) -> Tensor:
        return torch.mul(argument, -1 / scale, out=out).exp_()

    def _weight_(self, value: Tensor, scale: float) -> tuple[Tensor, float]:
        return value, 1 / scale

    def _squarings(self, wider: float, scale: float) -> int | None:
        return _exact_squarings(wider / scale)

    def farthest(self, dtype: torch.dtype) -> float:
        return (max(self.scales) * _largest_exponent(dtype)) ** 2


class RationalQuadratic(Kernel):
    """k = 1/(1 + d²/2s²), w = k²/s²: tails that still pull where a gaussian's force has died."""

    name = "rational_quadratic"

    def _value(self, argument: Tensor, scale: float, out: Tensor) -> Tensor:
        return torch.mul(argument, 0.5 / scale**2, out=out).add_(1).reciprocal_()

    def _weight_(self, value: Tensor, scale: float) -> tuple[Tensor, float]:
        return value.square_(), 1 / scale**2


class Energy(Kernel):
    """k = −d, w = 1/d, 0 at d = 0: the energy distance. It knows no scale: any other would only multiply it."""

    name = "energy"
    at_zero = 0.0
    by_distance = True
    is_positive_definite = False

    def __init__(self, scales: Sequence[float] = (1.0,)) -> None:
        super().__init__(scales)
        super().__init__((1.0,))

    def _value(self, argument: Tensor, scale: float, out: Tensor) -> Tensor:
        return torch.neg(argument, out=out)

    def _weight_(self, value: Tensor, scale: float) -> tuple[Tensor, float]:
        return value.fill_(1), 1.0


KERNELS: dict[str, type[Kernel]] = {kernel.name: kernel for kernel in (Gaussian, Laplace, RationalQuadratic, Energy)}


def make_kernel(name: str, scales: Sequence[float]) -> Kernel:
    """The kernel of this name at these scales; a ValueError if there is none."""
    if name not in KERNELS:
        raise ValueError(f"kernel: found {name!r}, expected one of {tuple(KERNELS)}. Give 'gaussian' to begin with.")
    return KERNELS[name](scales)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i − y_j|², [b, n], of rows [b, D] and [n, D]; never below 0."""
    squared = torch.addmm(y.square().sum(dim=1), x, y.T, alpha=-2)
    return squared.add_(x.square().sum(dim=1)[:, None]).clamp_min_(0)


def median_bandwidth(features: Tensor, *, rows: int = 2048, seed: int = 0) -> float:
    """σ: the root of the median squared distance between different rows.

    Args:
        features: [n, ...], flattened to vectors.
        rows: of more rows than this, a random sample is taken.
        seed: of that sample.

    Raises:
        ValueError: fewer than two rows, or more than half of the distances are 0.
    """
    x = features.flatten(1)
    if len(x) < 2:
        raise ValueError(f"features: found {len(x)} row(s), expected at least 2, for a distance between rows.")
    if len(x) > rows:
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:rows].to(x.device)]
    x = x.double()
    squared = squared_distances(x - x.mean(dim=0), x - x.mean(dim=0))
    first, second = torch.triu_indices(len(x), len(x), offset=1, device=x.device)
    sigma = float(squared[first, second].median().sqrt())
    # Of equal rows, what rounding leaves of |x|² + |y|² − 2 x·y.
    if not sigma > 1e-6 * float(x.norm(dim=1).max()):
        raise ValueError(
            "features: more than half of the distances between rows are 0, and a bandwidth cannot be taken from them. "
            "Remove duplicate rows, or give sigma yourself."
        )
    return sigma


def _largest_exponent(dtype: torch.dtype) -> float:
    return -NEGLIGIBLE * math.log(torch.finfo(dtype).tiny)


def _exact_squarings(power: float) -> int | None:
    """log2 of the power if that is a whole number of squarings, within bounds."""
    squarings = round(math.log2(power))
    return squarings if 1 <= squarings <= MOST_SQUARINGS and math.isclose(2.0**squarings, power) else None
