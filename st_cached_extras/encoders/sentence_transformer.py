"""A sentence-transformers model as a frozen branch that is differentiable from the pixels."""

from __future__ import annotations

from typing import Any

from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from st_cached_extras.encoders.frozen import FrozenEncoder
from st_cached_extras.encoders.preprocessing import PixelPreprocessing, probe_clip


class SentenceTransformerEncoder(FrozenEncoder):
    """A sentence-transformers model on clips, or frame by frame if it knows images but no videos.

    The model's own ``preprocess`` turns arrays into pixels without a graph. Here the same is done in torch, compared
    with the model's on a test clip, and its modules run on the result.

    Args:
        sentence_transformer: a model with the modality "video" or "image".
        output: "sentence_embedding", [B, 1, D] of a clip and [B, T, D] frame by frame; or "token_embeddings",
            [B, N, D].
        task: of a Router that has a route per task.
        num_frames: frames that the model takes; None for all.
        preprocessing: in place of its processor's.
        **kwargs: ``dtype`` and ``mini_batch_size``, as for :class:`FrozenEncoder`.

    Raises:
        ValueError: it takes neither clips nor images, or takes them otherwise than as one tensor of pixels: in patches
            or beside text, as models with a chat template do, which is seen on a test clip.
    """

    def __init__(
        self,
        sentence_transformer: SentenceTransformer,
        *,
        output: str = "sentence_embedding",
        task: str = "document",
        num_frames: int | None = None,
        preprocessing: PixelPreprocessing | None = None,
        **kwargs: Any,
    ) -> None:
        modality = next((one for one in ("video", "image") if sentence_transformer.supports(one)), None)
        if modality is None:
            raise ValueError(
                f"The model embeds {', '.join(map(str, sentence_transformer.modalities))}, and neither videos nor "
                "images: it cannot be an encoder of clips."
            )
        if output not in ("sentence_embedding", "token_embeddings"):
            raise ValueError(f'output must be "sentence_embedding" or "token_embeddings", got {output!r}.')
        transformer = next(
            module
            for module in sentence_transformer.modules()
            if isinstance(module, Transformer) and modality in module.modalities
        )
        num_frames = num_frames or (getattr(transformer.config, "num_frames", None) if modality == "video" else None)
        clip = probe_clip(num_frames or 2)
        inputs = [clip] if modality == "video" else [Image.fromarray(frame) for frame in clip]
        expected = 5 if modality == "video" else 4
        try:
            features = sentence_transformer.preprocess(inputs, task=task)
        except Exception as error:  # whatever it is that a processor wants beside pixels
            raise _refusal(modality, expected, f"its processor raises {type(error).__name__}: {error}") from error
        tensors = {name: x for name, x in features.items() if isinstance(x, Tensor)}
        pixel_name = next((name for name in tensors if str(name).startswith("pixel_values")), None)
        if pixel_name is None or len(tensors) > 1 or tensors[pixel_name].ndim != expected:
            found = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
            raise _refusal(modality, expected, f"its processor makes {found or 'no tensor'} of the test clip")
        if preprocessing is None:
            preprocessing = PixelPreprocessing.from_processor(transformer.processor)
            theirs = tensors[pixel_name]
            preprocessing.check_against((theirs[0] if modality == "video" else theirs).cpu(), clip)
        super().__init__(sentence_transformer, preprocessing, num_frames=num_frames, **kwargs)
        self.modality = modality
        self.output = output
        self._pixel_name = pixel_name
        self._constants = {name: x for name, x in features.items() if not isinstance(x, Tensor)}

    def encode(self, pixels: Tensor) -> Tensor:
        rows = pixels if self.modality == "video" else pixels.flatten(0, 1)
        features = self.encoder({**self._constants, self._pixel_name: rows})[self.output]
        if self.modality == "video":
            return features
        features = features.unflatten(0, pixels.shape[:2])  # [B, T, D] or [B, T, N, D]
        return features.flatten(1, -2) if features.ndim == 4 else features


def _refusal(modality: str, axes: int, found: str) -> ValueError:
    return ValueError(
        f"The model does not take the modality {modality!r} as one tensor of pixels with {axes} axes and nothing "
        f"beside it: {found}. Gradients cannot be brought to the pixels; take a model without a chat template."
    )
