"""Encoders that look where something stands out: its outline whatever its place and colour, and how it moves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from st_cached_extras.encoders.frozen import FrozenEncoder


class Glimpse(FrozenEncoder):
    """What stands out from a picture's border, cut out around its centre, in black and white: [B, steps, cells²].

    Of every picture that it looks at, the mean colour of the border is the background. The window is centred where
    the squared differences from that colour have their mean. A pixel's value is how far it lies on the way from the
    background to the colour that stands out: the opacity of a sprite of one colour, and the same for any two colours.
    What is left is form and size, pixel by pixel, so that a generator is told where its outline is wrong, and not
    just that its statistics are. Gradients pass through the centre as well (Jaderberg et al., "Spatial Transformer
    Networks", NeurIPS 2015, equation 5).

    Args:
        cells: rows and columns of the window's grid.
        window: side of the window as a share of the picture's shorter side.
        every: a step of time is as many pictures, of which the first is looked at.
        mini_batch_size: clips at once.

    Raises:
        ValueError: ``cells`` or ``every`` is less than 1, or ``window`` is not in (0, 1].
    """

    def __init__(
        self, cells: int = 16, *, window: float = 0.6, every: int = 2, mini_batch_size: int | None = None
    ) -> None:
        if cells < 1 or every < 1 or not 0 < window <= 1:
            raise ValueError(
                "cells and every must be at least 1, and window in (0, 1], got "
                f"cells={cells}, every={every}, window={window}."
            )
        super().__init__(nn.Identity(), mini_batch_size=mini_batch_size)
        self.cells, self.window, self.every = cells, window, every

    def encode(self, pixels: Tensor) -> Tensor:
        pictures = pixels[:, :: self.every].flatten(0, 1)  # [B · steps, 3, H, W]
        difference, weight = stands_out(pictures)
        colour = torch.einsum("nhw,nchw->nc", weight, difference)  # that stands out, off the background's
        along = torch.einsum("nc,nchw->nhw", colour, difference)
        opacity = along / (colour.square().sum(1) + 1e-3)[:, None, None]  # about 0 and 1
        height, width = opacity.shape[1:]
        pitch = self.window * min(height, width) / self.cells
        smooth = 2 * round(pitch / 2) + 1  # odd, so that a box has a pixel in its middle
        opacity = F.avg_pool2d(opacity[:, None], smooth, stride=1, padding=smooth // 2, count_include_pad=False)
        offset = (torch.arange(self.cells, device=pixels.device, dtype=pixels.dtype) - (self.cells - 1) / 2) * pitch
        place = centre_of(weight)[..., None] + offset  # [n, 2, cells], x and y in pixels from the top left corner
        x, y = (2 * place[:, axis] / size - 1 for axis, size in ((0, width), (1, height)))
        grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
        return F.grid_sample(opacity, grid, align_corners=False).flatten(1).unflatten(0, (len(pixels), -1))


class Motion(FrozenEncoder):
    """How what stands out moves, whatever it is and wherever: [B, 1, 2 T].

    Its centre in every picture, as for :class:`Glimpse`, off its mean over the clip, in half sides of the picture.

    Args:
        mini_batch_size: clips at once.
    """

    def __init__(self, *, mini_batch_size: int | None = None) -> None:
        super().__init__(nn.Identity(), mini_batch_size=mini_batch_size)

    def encode(self, pixels: Tensor) -> Tensor:
        height, width = pixels.shape[3:]
        _, weight = stands_out(pixels.flatten(0, 1))
        x, y = centre_of(weight).unbind(1)
        path = torch.stack([2 * x / width, 2 * y / height], dim=1).unflatten(0, pixels.shape[:2])  # [B, T, 2]
        return (path - path.mean(dim=1, keepdim=True)).flatten(1)


def stands_out(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """What stands out from the border's mean colour.

    Args:
        pictures: RGB [n, 3, H, W].

    Returns:
        How far each pixel's colour is from it, [n, 3, H, W]; and how much of all that stands out is there,
        [n, H, W] of sum 1.
    """
    rows = torch.cat([pictures[:, :, 0], pictures[:, :, -1]], dim=2)
    columns = torch.cat([pictures[:, :, 1:-1, 0], pictures[:, :, 1:-1, -1]], dim=2)
    background = torch.cat([rows, columns], dim=2).mean(2)
    difference = pictures - background[:, :, None, None]
    weight = difference.square().sum(1) + 1e-6  # a picture with nothing on it has its centre in the middle
    return difference, weight / weight.sum(dim=(1, 2), keepdim=True)


def centre_of(weight: Tensor) -> Tensor:
    """The mean place (x, y) under weights [n, H, W], in pixels from the top left corner: [n, 2]."""
    y, x = (torch.arange(size, device=weight.device, dtype=weight.dtype) + 0.5 for size in weight.shape[1:])
    return torch.stack([weight.sum(1) @ x, weight.sum(2) @ y], dim=1)
