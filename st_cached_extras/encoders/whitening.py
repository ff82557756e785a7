"""Features on their principal axes, each of variance 1: what varies little in real clips counts as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from st_cached_extras.encoders.frozen import FrozenEncoder


class Whitened(FrozenEncoder):
    """An encoder whose features are turned to the principal axes of real clips' features, and scaled along them.

    Distances between raw features are those along a few directions of large variance, such as a shape's size or
    brightness; what tells a circle from a square is lost among them. Here all axes that are kept count the same.

    Make one with :meth:`fit`.

    Args:
        encoder: whose features [B, N, D] are whitened.
        axes: from its flattened features to the kept axes, N·D → K.
    """

    def __init__(self, encoder: FrozenEncoder, axes: nn.Linear) -> None:
        super().__init__(encoder, mini_batch_size=encoder.mini_batch_size)
        self.axes = axes.requires_grad_(False)

    @classmethod
    def fit(cls, encoder: FrozenEncoder, features: Tensor, dimensions: int = 64) -> Whitened:
        """The whitened encoder.

        Args:
            encoder: a frozen encoder.
            features: [R, N, D], its features of real clips.
            dimensions: K, the axes of largest variance that are kept; fewer where there are not as many.

        Raises:
            ValueError: fewer than two clips, or features that do not vary.
        """
        x = features.detach().flatten(1).double()
        if len(x) < 2:
            raise ValueError(f"features: found {len(x)} rows, expected at least 2: of one clip nothing varies.")
        mean = x.mean(0)
        variances, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / (len(x) - 1))  # ascending
        # Beyond the rank of the features there is only rounding to scale up.
        kept = min(dimensions, len(x) - 1, int((variances > 1e-9 * variances[-1]).sum()))
        if kept == 0 or not variances[-1] > 0:
            raise ValueError("features: all rows are the same, expected features that vary from clip to clip.")
        weight = (vectors[:, -kept:] / variances[-kept:].sqrt()).T.flip(0)  # [K, N·D], largest variance first
        axes = nn.utils.skip_init(nn.Linear, x.shape[1], kept)
        axes.weight.data.copy_(weight)
        axes.bias.data.copy_(-weight @ mean)
        return cls(encoder, axes.to(features.device))

    def encode(self, pixels: Tensor) -> Tensor:
        return self.axes(self.encoder(pixels).flatten(1).to(self.axes.weight.dtype))
