"""Encoders that need no download and no training: pooled pixels, and statistics of random filters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from st_cached_extras.encoders.frozen import FrozenEncoder


class PooledPixels(FrozenEncoder):
    """Mean colours over a grid of boxes in time and space: [B, steps, 3 · rows · columns].

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
    """How strongly random filters over space and two frames respond, whatever the place: [B, steps, 2 · channels].

    Per step of time, the mean and the standard deviation over the picture of each filter's rectified response. What
    there is to see, such as colours, corners and motion, is in them, and where it is, is not: two random clips of the
    same kind come close to each other, and a kernel of modest width has something to compare.

    Args:
        channels: number of filters.
        seed: of the filters.
        mini_batch_size: clips at once.
    """

    def __init__(self, channels: int = 64, *, seed: int = 0, mini_batch_size: int | None = None) -> None:
        # The weights come from a generator of their own.
        filters = nn.utils.skip_init(nn.Conv3d, 3, channels, (2, 5, 5), stride=2, padding=(0, 2, 2))
        generator = torch.Generator().manual_seed(seed)
        nn.init.orthogonal_(filters.weight.flatten(1), 2.0, generator=generator)
        nn.init.uniform_(filters.bias, -0.5, 0.5, generator=generator)
        super().__init__(filters, mini_batch_size=mini_batch_size)

    def encode(self, pixels: Tensor) -> Tensor:
        responses = F.relu(self.encoder(2 * pixels.transpose(1, 2) - 1))
        responses = responses.transpose(1, 2)  # [B, steps, channels, h, w]
        mean = responses.mean(dim=(-2, -1), keepdim=True)
        variance = (responses - mean).square().mean(dim=(-2, -1))  # faster than torch.var_mean on a CPU
        deviation = (variance + 1e-6).sqrt()  # has a derivative where nothing responds
        return torch.cat([mean.flatten(-3), deviation], dim=-1)
