"""The default model of `train_video_embedder.py`: a tiny two-tower retriever, made from nothing in a second.

Captions go through a one-layer DistilBERT over whole words, clips through a two-layer VideoMAE; a
sentence-transformers Router sends each input to its tower by its modality. 0.34 million parameters, random at first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    DistilBertConfig,
    DistilBertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    VideoMAEConfig,
    VideoMAEModel,
    VideoMAEVideoProcessor,
)
from transformers.utils import logging

HIDDEN = 96
MAX_WORDS = 32


def tiny_video_tower(
    captions: Iterable[str], *, num_frames: int = 8, image_size: int = 56, **kwargs
) -> SentenceTransformer:
    """Builds the two-tower model; its initial weights come from torch's global generator.

    Args:
        captions: Texts whose words make the vocabulary; any other word is unknown to the model.
        num_frames: Frames per clip. VideoMAE takes exactly as many, an even number.
        image_size: Height and width to which frames are resized, a multiple of 14.
        **kwargs: Passed on to `SentenceTransformer`, such as `model_card_data` or `device`.
    """
    if num_frames % 2 or num_frames < 2:
        raise ValueError(f"num_frames must be even, because a VideoMAE token spans two frames. Got {num_frames}.")
    if image_size % 14 or image_size < 14:
        raise ValueError(f"image_size must be a multiple of the patch size 14. Got {image_size}.")
    # A Transformer module loads from a folder, so the towers pass through one.
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        text = text_tower(Path(folder) / "text", captions)
        video = _video_tower(Path(folder) / "video", num_frames, image_size)
    if had_progress_bar:
        logging.enable_progress_bar()
    router = Router(
        sub_modules={"text": [text, Pooling(HIDDEN, "mean")], "video": [video, Pooling(HIDDEN, "mean")]},
        route_mappings={(None, "text"): "text", (None, "video"): "video"},
        default_route="text",
    )
    return SentenceTransformer(modules=[router], **kwargs)


def tiny_text_model(texts: Iterable[str], **kwargs) -> SentenceTransformer:
    """The text tower alone, with the words of some texts for a vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        return SentenceTransformer(modules=[text_tower(Path(folder), texts), Pooling(HIDDEN, "mean")], **kwargs)


def text_tower(folder: Path, captions: Iterable[str]) -> Transformer:
    """A one-layer DistilBERT over whole words, which passes through a folder."""
    words = sorted({word for caption in captions for word in caption.lower().split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=MAX_WORDS
    ).save_pretrained(folder)
    # DistilBERT is BERT without the pooler, whose parameters a mean over tokens would never train.
    config = DistilBertConfig(
        vocab_size=len(vocabulary),
        dim=HIDDEN,
        n_layers=1,
        n_heads=4,
        hidden_dim=2 * HIDDEN,
        max_position_embeddings=MAX_WORDS,
        pad_token_id=0,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return as_transformer(DistilBertModel(config), folder)


def _video_tower(folder: Path, num_frames: int, image_size: int) -> Transformer:
    # The *video* processor: with VideoMAEImageProcessor the model would be taken for one of images.
    VideoMAEVideoProcessor(
        size={"shortest_edge": image_size},
        crop_size={"height": image_size, "width": image_size},
        do_sample_frames=False,
    ).save_pretrained(folder)
    config = VideoMAEConfig(
        image_size=image_size,
        patch_size=14,
        num_frames=num_frames,
        tubelet_size=2,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        use_mean_pooling=True,
    )
    return as_transformer(VideoMAEModel(config), folder)


def as_transformer(model: PreTrainedModel, folder: Path) -> Transformer:
    """A model as the first module of a sentence-transformer; its processor is in the folder already."""
    # Not model.save_pretrained, which writes on the first of several ranks alone.
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return Transformer(str(folder))
