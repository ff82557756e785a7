"""Texts of real lengths, and a model of MiniLM's architecture, for the benchmarks. No download.

Pairs come from the installed packages (name of a class or function → first paragraph of its docstring), from a
parquet file with two text columns, from WordNet as Debian's package ``wordnet-base`` ships it (term → definition), or
they are random words of such lengths, to see whether a benchmark runs.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from st_cached_extras.data.docstrings import docstring_pairs

Pairs = list[tuple[str, str]]
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PACKAGES = ("sentence_transformers", "datasets", "accelerate", "sklearn", "scipy", "numpy", "torch", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the texts come from."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--pairs", type=Path, default=None, help="a parquet file whose first two columns are text")
    group.add_argument("--wordnet", type=Path, default=None, help="folder of WordNet's data.noun and its siblings")
    group.add_argument("--synthetic", action="store_true", help="random words, for a run that shows nothing")


def load_pairs(arguments: argparse.Namespace, count: int, seed: int = 0) -> tuple[Pairs, Pairs]:
    """The first ``count`` distinct pairs after shuffling, and all of them, for a vocabulary."""
    if arguments.pairs is not None:
        pairs = list(parquet_pairs(arguments.pairs))
    elif arguments.wordnet is not None:
        pairs = list(wordnet_pairs(arguments.wordnet))
    elif arguments.synthetic:
        pairs = list(synthetic_pairs(2 * count))
    else:
        found = docstring_pairs(PACKAGES, show_progress_bar=True)
        pairs = list(islice(found, max(2 * count, 10_000)))  # parsing every package takes minutes
    pairs = list(dict.fromkeys(pairs))
    if len(pairs) < count:
        raise ValueError(f"Found {len(pairs)} pairs of text, and the benchmark needs {count}: use a smaller batch.")
    random.Random(seed).shuffle(pairs)
    return pairs[:count], pairs


def parquet_pairs(file: Path) -> Iterator[tuple[str, str]]:
    """The first two columns of a parquet file."""
    from datasets import Dataset

    rows = Dataset.from_parquet(str(file))
    first, second = rows.column_names[:2]
    yield from zip(rows[first], rows[second], strict=True)


def wordnet_pairs(folder: Path) -> Iterator[tuple[str, str]]:
    """(first term, definition) of every synset in WordNet's ``data.*`` files."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):
                continue  # the licence
            entry, _, gloss = line.partition(" | ")
            term = entry.split()[4].replace("_", " ").removesuffix("(a)").removesuffix("(p)").removesuffix("(ip)")
            definition = gloss.split('; "')[0].strip()
            if definition:
                yield term, definition


def synthetic_pairs(count: int) -> Iterator[tuple[str, str]]:
    """Random words: one to three of them, and a few to thirty."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(2000)]
    for _ in range(count):
        lengths = generator.randint(1, 3), 3 + int(27 * generator.random() ** 2)
        yield tuple(" ".join(generator.choices(words, k=length)) for length in lengths)


def minilm(
    vocabulary: Pairs,
    layers: int = 6,
    hidden: int = 384,
    dropout: float = 0.0,
    max_length: int = 128,
    vocabulary_size: int = 30522,
) -> SentenceTransformer:
    """all-MiniLM-L6's architecture with random weights and a WordPiece vocabulary of these texts.

    Of many texts, not of the batch alone: rare words must fall into pieces, as in practice. The model has room for
    ``vocabulary_size`` words, whatever the texts fill of it; multilingual models have several times MiniLM's.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=30522, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator((text for pair in vocabulary for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=max_length,
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        fast.save_pretrained(folder)
        save_file(BertModel(config).state_dict(), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(hidden, "mean")], device="cpu").train()


def columns_of(model: SentenceTransformer, pairs: Pairs) -> list[dict[str, Tensor]]:
    """The two columns, preprocessed as the Trainer's collator does."""
    return [model.preprocess([pair[column] for pair in pairs]) for column in (0, 1)]
