"""Pixels as an encoder's own processor would hand them over, in torch, so that gradients reach the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# PIL's numbers of the filters, which is how processors store them.
INTERPOLATIONS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
# Root mean squared difference to the processor's own output, in its normalised units. Processors round to 8 bits after
# resizing: some .005 where an encoder's standard deviation is .22.
TOLERANCE = 0.02


@dataclass(frozen=True)
class PixelPreprocessing:
    """Resize, crop and normalise the frames of clips.

    Args:
        resize: (height, width) in pixels, or the length of the shorter edge, which keeps the proportions; None for
            none.
        crop: (height, width) of a crop from the middle, padded with black where frames are smaller; None for none.
        mean, std: per channel, of pixels in [0, 1]; subtracted, and divided by.
        interpolation: "bilinear", "bicubic" (clipped to [0, 1], as 8-bit images are) or "nearest".
    """

    resize: tuple[int, int] | int | None = None
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    interpolation: str = "bilinear"

    @classmethod
    def from_processor(cls, processor: Any) -> PixelPreprocessing:
        """What an image or video processor of transformers does, read from its settings.

        Args:
            processor: an image or video processor, or a processor that has one.

        Raises:
            ValueError: it resizes or filters in a way that is not known here.
        """
        processor = pixel_processor(processor)
        resize = crop = None
        if processor.do_resize:
            size = _sizes(processor.size)
            if "shortest_edge" in size and not size.get("longest_edge"):
                resize = int(size["shortest_edge"])
            elif "height" in size and "width" in size:
                resize = int(size["height"]), int(size["width"])
            else:
                raise ValueError(
                    f"{type(processor).__name__} resizes to {size}, and only a height and a width or a shortest edge "
                    "are known here. Give preprocessing=PixelPreprocessing(...) yourself."
                )
        if getattr(processor, "do_center_crop", False):
            size = _sizes(processor.crop_size)
            crop = int(size["height"]), int(size["width"])
        filter_number = int(processor.resample)
        if filter_number not in INTERPOLATIONS:
            raise ValueError(
                f"{type(processor).__name__} resizes with PIL's filter {filter_number}, and only "
                f"{', '.join(f'{n} ({name})' for n, name in INTERPOLATIONS.items())} are known here. Give "
                "preprocessing=PixelPreprocessing(...) yourself."
            )
        # The processor normalises pixels of 0 to 255 × rescale_factor, and clips here are of 0 to 1.
        scale = 255 * processor.rescale_factor if processor.do_rescale else 255.0
        mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
        return cls(
            resize,
            crop,
            tuple(float(m) / scale for m in mean),
            tuple(float(s) / scale for s in std),
            INTERPOLATIONS[filter_number],
        )

    def __call__(self, frames: Tensor) -> Tensor:
        """[..., 3, H, W] in [0, 1] → [..., 3, h, w], normalised; in at least fp32."""
        leading = frames.shape[:-3]
        x = frames.flatten(0, -4) if leading else frames[None]  # [n, 3, H, W]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        size = self._resized(*x.shape[-2:])
        if size != tuple(x.shape[-2:]):
            smooth = {} if self.interpolation == "nearest" else {"antialias": True, "align_corners": False}
            x = F.interpolate(x, size, mode=self.interpolation, **smooth)
            if self.interpolation == "bicubic":
                x = x.clamp(0, 1)
        if self.crop is not None:
            x = _crop(x, *self.crop)
        mean, std = (
            torch.tensor(values, dtype=x.dtype, device=x.device)[:, None, None] for values in (self.mean, self.std)
        )
        x = (x - mean) / std
        return x.unflatten(0, leading) if leading else x[0]

    def check_against(self, theirs: Tensor, clip: np.ndarray) -> None:
        """Raise unless the processor's output for a clip is ours.

        Args:
            theirs: [frames, 3, h, w], from the processor.
            clip: uint8 [frames, H, W, 3].

        Raises:
            ValueError: the outputs differ by more than interpolation explains.
        """
        ours = self(torch.from_numpy(clip).movedim(-1, -3) / 255)
        if ours.shape != theirs.shape:
            raise ValueError(
                f"The encoder's processor makes {list(theirs.shape)} of a clip, and {self} {list(ours.shape)}. Give "
                "preprocessing=PixelPreprocessing(...) that does what it does."
            )
        difference = float((ours - theirs).square().mean().sqrt())
        if not difference <= TOLERANCE:
            raise ValueError(
                f"The encoder's processor and {self} differ by {difference:.3f} (root mean square, normalised "
                f"pixels), more than interpolation explains ({TOLERANCE}). Give preprocessing=PixelPreprocessing(...) "
                "that does what it does."
            )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        # The longer edge is cut to a whole pixel, not rounded, as processors do.
        if width <= height:
            return int(self.resize * height / width), self.resize
        return self.resize, int(self.resize * width / height)


def pixel_processor(processor: Any, modality: str = "video") -> Any:
    """The image or video processor inside a processor of several modalities, or the processor itself."""
    for name in (f"{modality}_processor", "image_processor"):
        if getattr(processor, name, None) is not None:
            return getattr(processor, name)
    return processor


def probe_clip(frames: int, side: int = 96) -> np.ndarray:
    """A smooth clip to compare two ways of preprocessing on, uint8 [frames, side, side × 5/4, 3]."""
    time, y, x = np.meshgrid(np.arange(frames), np.arange(side), np.arange(side * 5 // 4), indexing="ij")
    waves = [np.sin(0.03 * (x + channel * y) + 0.2 * time + channel) for channel in range(3)]
    return np.stack([127.5 + 100 * wave for wave in waves], axis=-1).astype(np.uint8)


def _sizes(size: Any) -> dict[str, int]:
    """A processor's size, whose fields may be there and None."""
    return {name: value for name, value in dict(size).items() if value is not None}


def _crop(x: Tensor, height: int, width: int) -> Tensor:
    """The middle of [n, 3, H, W], padded with zeros where it is smaller."""
    missing_y, missing_x = max(0, height - x.shape[-2]), max(0, width - x.shape[-1])
    if missing_y or missing_x:
        x = F.pad(x, (missing_x // 2, (missing_x + 1) // 2, missing_y // 2, (missing_y + 1) // 2))
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]
