"""How a signal at the output (an error, a target) meets the input of a layer, when a matrix carries it there.

    input             signal           matrix
    [B, C]            [B, K]           K x C
    [B, T, C]         [B, T, K]        K x C, shared by tokens: any length will do
    [B, T, C]         [B, K]           K x C, shared by tokens, each of which gets the sample's signal
    anything else     anything         all of a sample's signal x all of its input

Matrices are as large as features, not as sequences, wherever that makes sense, so that lengths may change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


class FeedbackLayout:
    """The layout of one call's signal.

    Args:
        call: of the layer.
        shape: of the signal.

    Attributes:
        sizes: (K, C) of the matrix.
        spreads: one signal a sample meets a sequence.

    Raises:
        ValueError: input and signal do not hold the same samples.
    """

    def __init__(self, call: LayerCall, shape: torch.Size) -> None:
        self.input_shape, lead = call.x.shape, call.batch_dims
        x, ndim = self.input_shape, len(self.input_shape)
        if len(shape) < lead or shape[:lead] != x[:lead]:
            raise ValueError(
                f"mode={call.config.mode!r} carries a signal of shape {tuple(shape)} to the input of the layer "
                f"{call.name!r}, {tuple(x)}: the leading {lead} axes, which count samples, must be the same. Packed "
                "rows cannot be told apart there: give the layer padded ones."
            )
        self.spreads = ndim == lead + 2 and len(shape) == lead + 1
        shared = ndim in (lead + 1, lead + 2) and len(shape) == ndim and shape[:-1] == x[:-1]
        self._is_full = not (self.spreads or shared)
        if not self._is_full:
            self.sizes = shape[-1], x[-1]
        else:
            self.sizes = math.prod(shape[lead:]), math.prod(x[lead:])
        valid = call.valid if call.config.mask_padding else None
        self._valid = None if valid is None else valid.to(call.x.device)

    @property
    def key(self) -> str:
        """The sizes in words."""
        return "x".join(map(str, self.sizes))

    def project(self, signal: Tensor, matrix: Tensor) -> Tensor:
        """Carry a signal to the input by a matrix [K, C]: of the input's shape, zero at padding."""
        rows = product(signal.reshape(-1, self.sizes[0]).to(matrix.dtype), matrix)  # [R, C]
        if self.spreads:
            rows = rows.reshape(*self.input_shape[:-2], 1, -1).expand(self.input_shape)
        gradient = rows.reshape(self.input_shape)
        return gradient if self._valid is None else gradient * self._valid

    def share(self, dtype: torch.dtype) -> Tensor | float:
        """What of a sample's signal one token gets, if all have the same share: 1 / T, without padding."""
        if not self.spreads:
            return 1.0
        if self._valid is None:
            return 1 / self.input_shape[-2]
        valid = self._valid.expand(*self.input_shape[:-1], 1).to(dtype)
        return 1 / valid.sum(-2, keepdim=True).clamp_min(1)

    def mean_outer(self, signal: Tensor, z: Tensor) -> Tensor:
        """Mean over rows (tokens or samples) of signal ⊗ z, [K, C]; z of the input's shape, zero at padding."""
        signal = signal.to(z.dtype)
        if self.spreads:
            rows = signal.reshape(-1, self.sizes[0]), z.sum(-2).reshape(-1, self.sizes[1])
        else:
            rows = signal.reshape(-1, self.sizes[0]), z.reshape(-1, self.sizes[1])
        count = z.numel() / self.sizes[1]
        if self._valid is not None and not self._is_full:
            count = self._valid.expand(*self.input_shape[:-1], 1).sum().clamp_min(1)
        return product(rows[0].T, rows[1]) / count


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own dtype, also where a forward or a backward runs under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
