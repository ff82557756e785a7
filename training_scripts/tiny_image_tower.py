"""The default model of `train_image_text_embedder.py`: a tiny two-tower retriever, made from nothing in a second.

Captions go through the text tower of `tiny_video_tower.py`, images through a two-layer ViT; a sentence-transformers
Router sends each input to its tower by its modality.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_video_tower import HIDDEN, as_transformer, text_tower
from transformers import ViTConfig, ViTImageProcessor, ViTModel


def tiny_image_tower(captions: Iterable[str], *, image_size: int = 56, **kwargs) -> SentenceTransformer:
    """Builds the two-tower model; its initial weights come from torch's global generator.

    Args:
        captions: Texts whose words make the vocabulary; any other word is unknown to the model.
        image_size: Height and width to which images are resized, a multiple of 14.
        **kwargs: Passed on to `SentenceTransformer`, such as `model_card_data` or `device`.
    """
    if image_size % 14 or image_size < 14:
        raise ValueError(f"image_size must be a multiple of the patch size 14. Got {image_size}.")
    with tempfile.TemporaryDirectory() as folder:
        text = text_tower(Path(folder) / "text", captions)
        image = _image_tower(Path(folder) / "image", image_size)
    router = Router(
        sub_modules={"text": [text, Pooling(HIDDEN, "mean")], "image": [image, Pooling(HIDDEN, "mean")]},
        route_mappings={(None, "text"): "text", (None, "image"): "image"},
        default_route="text",
    )
    return SentenceTransformer(modules=[router], **kwargs)


def _image_tower(folder: Path, image_size: int) -> Transformer:
    ViTImageProcessor(size={"height": image_size, "width": image_size}).save_pretrained(folder)
    config = ViTConfig(
        image_size=image_size,
        patch_size=14,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
    )
    return as_transformer(ViTModel(config, add_pooling_layer=False), folder)
