"""Tiny, randomly initialised models built from configs, and batches for them: no download, milliseconds a step."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Router, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    VideoMAEConfig,
    VideoMAEModel,
    VideoMAEVideoProcessor,
)

WORDS = tuple(f"w{index}" for index in range(64))
FRAMES, PIXELS = 4, 16


def word_tokenizer(words: Sequence[str] = WORDS, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word, BERT's special tokens, and room for 64 tokens."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        padding_side=padding_side,
        model_max_length=64,
    )


def _transformer(model: PreTrainedModel, *processing: Any) -> Transformer:
    with tempfile.TemporaryDirectory() as folder:
        # Not model.save_pretrained, which writes on the first rank alone.
        for part in (model.config, *processing):
            part.save_pretrained(folder)
        save_file(model.state_dict(), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return Transformer(folder)


def tiny_bert(
    hidden: int = 16, layers: int = 2, dropout: float = 0.0, padding_side: str = "right", seed: int = 0
) -> Transformer:
    """A BERT input module over :data:`WORDS`."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(padding_side=padding_side)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.3,
    )
    return _transformer(BertModel(config), tokenizer)


def tiny_videomae(hidden: int = 16, layers: int = 1, dropout: float = 0.0, seed: int = 0) -> Transformer:
    """A VideoMAE input module for clips of :data:`FRAMES` frames of :data:`PIXELS` x :data:`PIXELS` pixels."""
    torch.manual_seed(seed)
    config = VideoMAEConfig(
        image_size=PIXELS,
        patch_size=8,
        num_frames=FRAMES,
        tubelet_size=2,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.3,
    )
    processor = VideoMAEVideoProcessor(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}, do_sample_frames=False
    )
    return _transformer(VideoMAEModel(config), processor)


def tiny_text_model(
    hidden: int = 16,
    layers: int = 2,
    dropout: float = 0.0,
    padding_side: str = "right",
    include_prompt: bool = True,
    seed: int = 0,
) -> SentenceTransformer:
    """BERT and mean pooling, in train mode."""
    pooling = Pooling(hidden, "mean", include_prompt=include_prompt)
    transformer = tiny_bert(hidden, layers, dropout, padding_side, seed)
    return SentenceTransformer(modules=[transformer, pooling], device="cpu").train()


def tiny_video_model(hidden: int = 16, dropout: float = 0.0, seed: int = 0) -> SentenceTransformer:
    """VideoMAE and mean pooling, in train mode."""
    modules = [tiny_videomae(hidden, dropout=dropout, seed=seed), Pooling(hidden, "mean")]
    return SentenceTransformer(modules=modules, device="cpu").train()


def tiny_two_tower_model(hidden: int = 16, dropout: float = 0.0, seed: int = 0) -> SentenceTransformer:
    """A Router with a BERT tower for text and a VideoMAE tower for clips, in train mode."""
    router = Router(
        sub_modules={
            "text": [tiny_bert(hidden, 1, dropout, seed=seed), Pooling(hidden, "mean")],
            "video": [tiny_videomae(hidden, 1, dropout, seed=seed), Pooling(hidden, "mean")],
        },
        route_mappings={(None, "text"): "text", (None, "video"): "video"},
        default_route="text",
    )
    return SentenceTransformer(modules=[router], device="cpu").train()


def random_sentences(count: int, seed: int = 0, longest: int = 20) -> list[str]:
    """Sentences of 1 to ``longest`` words of :data:`WORDS`."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


def random_clips(count: int, seed: int = 0) -> list[np.ndarray]:
    """uint8 clips [frames, height, width, 3] of noise."""
    generator = np.random.default_rng(seed)
    return list(generator.integers(0, 256, (count, FRAMES, PIXELS, PIXELS, 3), dtype=np.uint8))


def text_columns(model: SentenceTransformer, rows: int, columns: int = 2, seed: int = 0, **kwargs) -> list[dict]:
    """Preprocessed columns of random sentences; ``kwargs`` go to ``model.preprocess``, e.g. ``prompt``."""
    return [model.preprocess(random_sentences(rows, 97 * seed + column), **kwargs) for column in range(columns)]


def to_float64(model: SentenceTransformer, columns: list[dict]) -> tuple[SentenceTransformer, list[dict]]:
    """The model and its floating-point inputs in float64."""
    double = [
        {
            key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in column.items()
        }
        for column in columns
    ]
    return model.double(), double


def copy_columns(columns: Sequence[dict]) -> list[dict]:
    """Feature dicts that a model may write its outputs into."""
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in column.items()}
        for column in columns
    ]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameter gradients by name, zeros where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance between two sets of tensors with the same names."""
    if found.keys() != expected.keys():
        raise ValueError(f"different tensors: {sorted(found.keys() ^ expected.keys())}")
    squared = sum(((found[name].double() - expected[name].double()) ** 2).sum() for name in expected)
    norm = sum((expected[name].double() ** 2).sum() for name in expected)
    return float(((squared / norm) if norm > 0 else squared).detach().sqrt())
