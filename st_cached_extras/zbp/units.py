"""What is estimated on its own: each unit has its own probe, its own step and its own readings.

A reading is h = <v, f(x)> over the outputs of one unit. Everything that an estimator must know of units is how
outputs are read, how readings meet the inputs again, and how many probes of which size there are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from st_cached_extras.zbp.config import Local, ZBPConfig


class UnitLayout(ABC):
    """How the input of a layer, of shape ``shape``, falls into units.

    Attributes:
        count: units U.
        size: dimensions d of the largest unit.
    """

    count: int
    size: int

    @abstractmethod
    def read(self, products: Tensor) -> Tensor:
        """Sum products [k, *output shape] (or *input shape) over each unit: readings, [k, ...]."""

    @abstractmethod
    def spread(self, readings: Tensor) -> Tensor:
        """What each input entry multiplies its probe with: [k, ...] → broadcastable to [k, *input shape]."""

    @abstractmethod
    def rms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Root mean square of a tensor per unit, twice: broadcastable to readings, and to the tensor."""

    @abstractmethod
    def as_inputs(self, probes: Tensor) -> Tensor:
        """Probes [k, U, d] in the shape of inputs, [k, *input shape]."""


class LeadingUnits(UnitLayout):
    """A unit per index of the leading axes: rows for one axis, tokens for two.

    Args:
        shape: of the input.
        output_shape: of the output; its leading axes must be the input's.
        axes: how many.
    """

    def __init__(self, shape: torch.Size, output_shape: torch.Size, axes: int) -> None:
        if len(shape) < axes or shape[:axes] != output_shape[:axes]:
            what = "rows" if axes == 1 else f"{axes} leading axes"
            raise ValueError(
                f"The layer maps {tuple(shape)} to {tuple(output_shape)}: units are its {what}, which must be the "
                "same before and after. For layers that mix or drop positions use units='sample'; for rows that are "
                "packed into one sequence, units='segments'."
            )
        self.shape, self.axes = shape, axes
        self.count = math.prod(shape[:axes])
        self.size = math.prod(shape[axes:])

    def read(self, products: Tensor) -> Tensor:
        ones = [1] * (len(self.shape) - self.axes)
        return products.reshape(len(products), *self.shape[: self.axes], -1).sum(-1).reshape(-1, *self._lead, *ones)

    def spread(self, readings: Tensor) -> Tensor:
        return readings

    def rms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        unit = x.flatten(self.axes) if x.ndim > self.axes else x[..., None]
        value = unit.square().mean(-1).sqrt().reshape(*self._lead, *[1] * (len(self.shape) - self.axes))
        return value, value.reshape(*self._lead, *[1] * (x.ndim - self.axes))

    def as_inputs(self, probes: Tensor) -> Tensor:
        return probes.reshape(len(probes), *self.shape)

    @property
    def _lead(self) -> tuple[int, ...]:
        return tuple(self.shape[: self.axes])


class SegmentUnits(UnitLayout):
    """A unit per packed segment: positions of one sequence between two entries of ``boundaries``.

    Args:
        shape: of the input, [N, C] or [1, N, C].
        output_shape: of the output, with the same N positions.
        boundaries: int [S + 1] from 0 to N, as ``cu_seqlens``.
    """

    def __init__(self, shape: torch.Size, output_shape: torch.Size, boundaries: Tensor) -> None:
        self.shape, self.axis = shape, len(shape) - 2
        positions = shape[self.axis] if len(shape) in (2, 3) else -1
        fits = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
        if not fits or output_shape[: self.axis + 1] != shape[: self.axis + 1]:
            raise ValueError(
                f"Packed segments are [N, C] or [1, N, C] before and after the layer, got {tuple(shape)} and "
                f"{tuple(output_shape)}. Use units='sample' for a layer that does not work on packed segments."
            )
        boundaries = boundaries.to(torch.int64)
        lengths = boundaries.diff()
        if int(boundaries[0]) != 0 or int(boundaries[-1]) != positions or bool((lengths < 0).any()):
            raise ValueError(
                f"Segment boundaries must rise from 0 to the {positions} positions of the input, got "
                f"{boundaries.tolist()[:8]}."
            )
        self.count = len(lengths)
        self.longest = int(lengths.max())
        self.size = self.longest * shape[-1]
        self._ids = torch.repeat_interleave(lengths)  # [N]: the segment of every position
        self._offsets = torch.arange(positions, device=lengths.device) - boundaries[self._ids]
        self._lengths = lengths

    def read(self, products: Tensor) -> Tensor:
        per_position = products.reshape(len(products), len(self._ids), -1).sum(-1)
        readings = per_position.new_zeros(len(products), self.count).index_add_(1, self._ids, per_position)
        return readings[..., None]  # [k, S, 1]

    def spread(self, readings: Tensor) -> Tensor:
        at_positions = readings[:, self._ids]  # [k, N, 1]
        return at_positions if self.axis == 0 else at_positions[:, None]

    def rms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        squares = self.read(x[None].square())[0]  # [S, 1]
        width = x.numel() // len(self._ids)
        value = (squares / (self._lengths * width).clamp_min(1)[:, None]).sqrt()
        return value, self.spread(value[None])[0]

    def as_inputs(self, probes: Tensor) -> Tensor:
        # A part of an isotropic vector is isotropic, so that short segments cut what the longest one needs.
        padded = probes.reshape(len(probes), self.count, self.longest, self.shape[-1])
        return padded[:, self._ids, self._offsets].reshape(len(probes), *self.shape)


class LocalUnits(UnitLayout):
    """Every input position of a sequence, read at the output positions that it reaches.

    Args:
        shape: of the input, [B, T, ...].
        output_shape: of the output, [B, T', ...].
        local: reach and stride.
    """

    def __init__(self, shape: torch.Size, output_shape: torch.Size, local: Local) -> None:
        if len(shape) < 3 or len(output_shape) < 3 or shape[0] != output_shape[0]:
            raise ValueError(
                f"units=Local needs [B, T, C] before and after the layer, got {tuple(shape)} and "
                f"{tuple(output_shape)}. Use units='sample'."
            )
        self.shape = shape
        self.count, self.size = shape[0], math.prod(shape[1:])
        s = torch.arange(shape[1])
        self._first = ((s - local.radius + local.stride - 1) // local.stride).clamp(0, output_shape[1])
        self._after = ((s + local.radius) // local.stride + 1).clamp(0, output_shape[1])

    def read(self, products: Tensor) -> Tensor:
        return products.flatten(3).sum(-1)[..., None]  # [k, B, T', 1]

    def spread(self, readings: Tensor) -> Tensor:
        sums = pad(readings[..., 0].cumsum(-1), (1, 0))  # [k, B, T' + 1]
        window = sums[..., self._after.to(sums.device)] - sums[..., self._first.to(sums.device)]
        return window.reshape(*window.shape, *[1] * (len(self.shape) - 2))

    def rms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = x.flatten(1).square().mean(1).sqrt()
        return value[:, None, None], value.reshape(-1, *[1] * (x.ndim - 1))

    def as_inputs(self, probes: Tensor) -> Tensor:
        return probes.reshape(len(probes), *self.shape)


def layout_of(
    config: ZBPConfig, shape: torch.Size, output_shape: torch.Size, segments: Tensor | None, batch_dims: int = 1
) -> UnitLayout:
    """The units that a configuration asks for.

    Args:
        config: its ``units``.
        shape: of the layer's input.
        output_shape: of its output.
        segments: boundaries of packed segments, where the layer was given some.
        batch_dims: leading axes that count samples.

    Raises:
        ValueError: the shapes do not fall into such units.
    """
    if isinstance(config.units, Local):
        return LocalUnits(shape, output_shape, config.units)
    if config.units == "token":
        axes = len(shape) - 1 if segments is not None else batch_dims + 1
        return LeadingUnits(shape, output_shape, axes)
    if segments is not None:
        return SegmentUnits(shape, output_shape, segments)
    if config.units == "segments":
        raise ValueError(
            "units='segments', but the layer was not given cu_seqlens: its rows are not packed. Use units='sample'."
        )
    return LeadingUnits(shape, output_shape, batch_dims)
