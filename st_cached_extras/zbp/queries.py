"""Derivatives of a layer along given directions, by forward queries, and how many queries they took.

h(x) = <v, f(x)> per unit; its derivative along u is <v, J u> = <J^T v, u>: what an estimate of J^T v is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from st_cached_extras.zbp.units import UnitLayout


@dataclass
class QueryCount:
    """How often layers were queried.

    Attributes:
        queries: forward calls that estimated an input gradient.
        parameter_queries: forward calls that estimated a gradient of parameters.
        calibration_queries: forward calls that chose a step, a mode or a parameter mode.
        exact_backwards: backpropagations through a layer (or its stand-in) for the gradient of its input.
    """

    queries: int = 0
    parameter_queries: int = 0
    calibration_queries: int = 0
    exact_backwards: int = 0


class Readout:
    """The readings of one layer call.

    Args:
        f: the layer, from input to output, both with the units' leading axes. Called without a graph.
        x: the input.
        v: d loss / d output.
        units: how inputs fall into units.
        count: where queries are counted.
        batched: f takes any number of leading axes, so that several probes are one call of it. Otherwise they are
            vmapped.
        noise: standard deviation of the noise added to every queried output, relative to its RMS per unit.
        generator: of that noise.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        x: Tensor,
        v: Tensor,
        units: UnitLayout,
        count: QueryCount,
        *,
        batched: bool = False,
        noise: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.f, self.units, self.count = f, units, count
        self.batched, self.noise, self.generator = batched, noise, generator
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.x, self.v = x, v.to(self.dtype)
        self._x_full = x.to(self.dtype)
        self._at_x: Tensor | None = None

    def steps(self, eps: float, eps_mode: str) -> tuple[Tensor, Tensor]:
        """The step of every unit, broadcastable to readings and to inputs."""
        at_readings, at_inputs = self.units.rms(self._x_full)
        if eps_mode == "absolute":
            return torch.full_like(at_readings, eps), torch.full_like(at_inputs, eps)
        smallest = torch.finfo(self.dtype).tiny ** 0.5  # a unit of zeros has no scale of its own
        return eps * at_readings.clamp_min(smallest), eps * at_inputs.clamp_min(smallest)

    def central(self, u: Tensor, steps: tuple[Tensor, Tensor]) -> Tensor:
        """[h(x + εu) − h(x − εu)] / 2ε along directions u [k, *input shape]: readings [k, ...]. 2 k queries."""
        at_readings, at_inputs = steps
        above, below = self._query(self._x_full + at_inputs * u), self._query(self._x_full - at_inputs * u)
        return self._difference(above, below) / (2 * at_readings)

    def forward(self, u: Tensor, steps: tuple[Tensor, Tensor]) -> Tensor:
        """[h(x + εu) − h(x)] / ε. k queries, and one at the first call."""
        at_readings, at_inputs = steps
        if self._at_x is None:
            self._at_x = self._query(self._x_full[None])
        return self._difference(self._query(self._x_full + at_inputs * u), self._at_x) / at_readings

    def tangent(self, u: Tensor) -> Tensor:
        """<v, J u> by forward-mode differentiation. k queries."""
        self.count.queries += len(u)
        x = self.x.contiguous()  # an expanded tensor cannot carry a tangent

        def push(direction: Tensor) -> Tensor:
            return jvp(self.f, (x,), (direction,))[1]

        # The fused attention kernels have no forward mode.
        with sdpa_kernel(SDPBackend.MATH):
            u = u.to(self.x.dtype)
            y = push(u[0])[None] if len(u) == 1 else vmap(push, randomness="same")(u)
        return self.units.read(y.to(self.dtype) * self.v)

    def _query(self, points: Tensor) -> Tensor:
        """f at points [k, *input shape]: [k, *output shape]."""
        self.count.queries += len(points)
        points = points.to(self.x.dtype)
        if len(points) == 1:
            return self.f(points[0])[None].to(self.dtype)
        return (self.f(points) if self.batched else vmap(self.f, randomness="same")(points)).to(self.dtype)

    def _difference(self, above: Tensor, below: Tensor) -> Tensor:
        # Outputs are subtracted before they are summed: h itself is large, and would drown the difference.
        readings = self.units.read((above - below) * self.v)
        if self.noise:
            norm = self.units.read(self.v[None].square()).sqrt()
            rms = self.units.rms(above[0])[0]
            draws = torch.randn(readings.shape, generator=self.generator, device=readings.device, dtype=readings.dtype)
            readings = readings + 2**0.5 * self.noise * rms * norm * draws
        return readings
