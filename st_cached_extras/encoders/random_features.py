"""Encoders that need no download and no training: pooled pixels, and convolutions with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from st_cached_extras.encoders.frozen import FrozenEncoder


class PooledPixels(FrozenEncoder):
    """Mean colours over a grid of boxes in time and space: [B, steps, rows · columns · 3].

    Coarse, and for that reason a guide from far away: a shape in the wrong place still feels where it belongs.

    Args:
        steps, rows, columns: of the grid.
        mini_batch_size: clips at once.
    """

    def __init__(self, steps: int = 4, rows: int = 7, columns: int = 7, *, mini_batch_size: int | None = None) -> None:
        super().__init__(nn.AdaptiveAvgPool3d((steps, rows, columns)), mini_batch_size=mini_batch_size)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.encoder(pixels.transpose(1, 2)).movedim(2, 1).flatten(2)  # [B, steps, 3 · rows · columns]


class RandomConvolution3d(FrozenEncoder):
    """Two layers of random convolutions over time and space, and means over boxes: [B, steps, D].

    What random features of local patches tell apart, a distribution can be matched on; nothing is learnt.

    Args:
        channels: of the two layers.
        grid: boxes per side over which the second layer's features are averaged; a position's D is
            channels · grid².
        seed: of the weights.
        mini_batch_size: clips at once.
    """

    def __init__(
        self, channels: int = 32, grid: int = 4, *, seed: int = 0, mini_batch_size: int | None = None
    ) -> None:
        empty = nn.utils.skip_init  # the weights come from a generator of their own, below
        layers = nn.Sequential(
            empty(nn.Conv3d, 3, channels, (2, 5, 5), stride=(2, 2, 2), padding=(0, 2, 2)),
            nn.GELU(),
            empty(nn.Conv3d, channels, channels, (2, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)),
            nn.GELU(),
        )
        generator = torch.Generator().manual_seed(seed)
        for layer in layers:
            if isinstance(layer, nn.Conv3d):
                nn.init.orthogonal_(layer.weight.flatten(1), 2.0, generator=generator)
                nn.init.uniform_(layer.bias, -0.5, 0.5, generator=generator)
        super().__init__(layers, mini_batch_size=mini_batch_size)
        self.grid = grid

    def encode(self, pixels: Tensor) -> Tensor:
        features = self.encoder(2 * pixels.transpose(1, 2) - 1)  # [B, C, steps, h, w]
        pooled = F.adaptive_avg_pool3d(features, (features.shape[2], self.grid, self.grid))
        return pooled.movedim(2, 1).flatten(2)
