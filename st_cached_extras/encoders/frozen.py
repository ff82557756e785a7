"""Frozen encoders as feature branches: clips in, features out, gradients to the pixels and to nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel, AutoVideoProcessor

from st_cached_extras.encoders.preprocessing import PixelPreprocessing, pixel_processor, probe_clip

Output = Literal["pooled", "tokens"]


class FrozenEncoder(nn.Module):
    """Any module as a frozen feature branch.

    It is frozen in place: its parameters no longer ask for a gradient, and it stays in eval mode whatever the mode of
    what holds it. It is kept as ``encoder``: under the name ``model``, the Trainer would replace an encoder that is a
    sentence-transformers model by the student.

    Args:
        encoder: called with the preprocessed clips [B, T, 3, h, w]; returns [B, D] or [B, N, D].
        preprocessing: from clips to what the encoder takes; None for nothing.
        num_frames: frames that the encoder takes, evenly spaced over the clip; None for all.
        dtype: in which the encoder computes; None for the dtype that it has. Preprocessing and features are in at
            least fp32.
        mini_batch_size: clips at once: what :class:`Staged` runs and differentiates together. None for all.

    Inputs: clips [B, T, 3, H, W], RGB in [0, 1]. Output: features [B, N, D].
    """

    def __init__(
        self,
        encoder: nn.Module,
        preprocessing: Callable[[Tensor], Tensor] | None = None,
        *,
        num_frames: int | None = None,
        dtype: torch.dtype | None = None,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False).eval()
        if dtype is not None:
            self.encoder.to(dtype)
        self.preprocessing = preprocessing
        self.num_frames = num_frames
        self.dtype = dtype
        self.mini_batch_size = mini_batch_size

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Stays in eval mode."""
        return super().train(False)

    def forward(self, clips: Tensor) -> Tensor:
        """Features [B, N, D] of clips [B, T, 3, H, W] in [0, 1]."""
        if clips.ndim != 5 or clips.shape[2] != 3 or not clips.is_floating_point():
            raise ValueError(
                f"clips must be a floating-point tensor [clips, frames, 3, height, width], in [0, 1], got "
                f"{clips.dtype} {list(clips.shape)}."
            )
        if self.num_frames is not None and self.num_frames != clips.shape[1]:
            # The middles of as many equal stretches, as when a video is read.
            steps = (torch.arange(self.num_frames) + 0.5) * clips.shape[1] / self.num_frames
            clips = clips[:, steps.long()]
        pixels = clips if self.preprocessing is None else self.preprocessing(clips)
        features = self.encode(pixels if self.dtype is None else pixels.to(self.dtype))
        if features.ndim == 2:
            features = features[:, None]
        if features.ndim != 3 or len(features) != len(clips):
            raise ValueError(
                f"{type(self.encoder).__name__} returned {list(features.shape)} for {len(clips)} clips; expected "
                "[clips, dimension] or [clips, positions, dimension]."
            )
        return features.to(torch.promote_types(features.dtype, torch.float32))

    def encode(self, pixels: Tensor) -> Tensor:
        """Features [B, D] or [B, N, D] of preprocessed clips [B, T, 3, h, w]: what subclasses redefine."""
        return self.encoder(pixels)


class FrameEncoder(FrozenEncoder):
    """An image model of transformers on every frame: DINOv2, DINOv3, SigLIP, CLIP and their like.

    Args:
        encoder: takes ``pixel_values`` [n, 3, h, w].
        output: "pooled", the model's own summary of each frame, [B, T, D]; "tokens", all of its tokens [B, T·P, D].
        **kwargs: as for :class:`FrozenEncoder`.
    """

    def __init__(self, encoder: nn.Module, *args: Any, output: Output = "pooled", **kwargs: Any) -> None:
        super().__init__(encoder, *args, **kwargs)
        self.output = _checked(output)

    def encode(self, pixels: Tensor) -> Tensor:
        outputs = self.encoder(pixel_values=pixels.flatten(0, 1))
        tokens = outputs.last_hidden_state  # [B·T, P, D]
        if tokens.ndim == 4:  # a convolutional network's map
            tokens = tokens.flatten(2).mT
        if self.output == "tokens":
            return tokens.unflatten(0, pixels.shape[:2]).flatten(1, 2)
        pooled = getattr(outputs, "pooler_output", None)
        return (tokens.mean(1) if pooled is None else pooled.flatten(1)).unflatten(0, pixels.shape[:2])


class VideoEncoder(FrozenEncoder):
    """A video model of transformers on every clip: V-JEPA 2, VideoMAE.

    Args:
        encoder: takes clips [B, T, 3, h, w] by the name ``input_name``.
        output: "pooled", the mean over the picture at every step of time, [B, steps, D]; "tokens", all of them.
        input_name: "pixel_values_videos" or "pixel_values".
        frames_per_step: frames that one token spans.
        **kwargs: as for :class:`FrozenEncoder`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *args: Any,
        output: Output = "pooled",
        input_name: str = "pixel_values_videos",
        frames_per_step: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(encoder, *args, **kwargs)
        self.output = _checked(output)
        self.input_name = input_name
        self.frames_per_step = frames_per_step

    def encode(self, pixels: Tensor) -> Tensor:
        tokens = self.encoder(**{self.input_name: pixels}).last_hidden_state  # [B, steps · places, D], time first
        if self.output == "tokens":
            return tokens
        steps = max(1, pixels.shape[1] // self.frames_per_step)
        return tokens.unflatten(1, (steps, -1)).mean(2)


def load_encoder(
    name: str | os.PathLike,
    *,
    revision: str | None = None,
    output: Output = "pooled",
    num_frames: int | None = None,
    dtype: torch.dtype | None = None,
    mini_batch_size: int | None = None,
    preprocessing: PixelPreprocessing | None = None,
) -> FrozenEncoder:
    """Load an image or video model of transformers, with the preprocessing of its own processor.

    The preprocessing is compared with the processor's on a test clip.

    Args:
        name: Hub id or folder. Of models with a text tower (SigLIP, CLIP), only the vision tower is kept; of V-JEPA 2,
            not the predictor.
        revision: of the Hub repository.
        output: see :class:`VideoEncoder` and :class:`FrameEncoder`.
        num_frames: frames that the encoder takes; None for as many as VideoMAE must have, else all.
        dtype: in which the encoder computes, such as ``torch.bfloat16``; None for that of its weights.
        mini_batch_size: clips at once.
        preprocessing: in place of the processor's.

    Raises:
        ValueError: the processor does something to pixels that is not known here.

    Example:
        >>> encoders = {
        ...     "dinov2": load_encoder("facebook/dinov2-small"),
        ...     "vjepa2": load_encoder("facebook/vjepa2-vitl-fpc64-256", dtype=torch.bfloat16, mini_batch_size=4),
        ... }
    """
    loaded = AutoModel.from_pretrained(name, revision=revision)
    config = loaded.config
    steps = getattr(config, "tubelet_size", None)
    if preprocessing is None:
        processor = (AutoVideoProcessor if steps else AutoImageProcessor).from_pretrained(name, revision=revision)
        preprocessing = PixelPreprocessing.from_processor(processor)
        clip = probe_clip(getattr(config, "num_frames", None) or 2)
        preprocessing.check_against(_processed(pixel_processor(processor), clip, video=steps is not None), clip)
    options = {"output": output, "dtype": dtype, "mini_batch_size": mini_batch_size}
    if steps is None:
        vision = getattr(loaded, "vision_model", loaded)
        return FrameEncoder(vision, preprocessing, num_frames=num_frames, **options)
    # VideoMAE knows its positions by number; V-JEPA 2 takes any length.
    num_frames = num_frames or getattr(config, "num_frames", None)
    video = loaded.encoder if config.model_type == "vjepa2" else loaded
    return VideoEncoder(
        video,
        preprocessing,
        input_name=loaded.main_input_name,
        frames_per_step=steps,
        num_frames=num_frames,
        **options,
    )


def _processed(processor: Any, clip: Any, *, video: bool) -> Tensor:
    """What a processor makes of a clip, [frames, 3, h, w]."""
    outputs = processor(clip if video else list(clip), return_tensors="pt")
    pixels = next(value for name, value in outputs.items() if name.startswith("pixel_values"))
    return pixels[0] if video else pixels


def _checked(output: str) -> Output:
    if output not in ("pooled", "tokens"):
        raise ValueError(f'output must be "pooled" or "tokens", got {output!r}.')
    return output
