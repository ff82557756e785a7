"""Pairs of texts to train a retriever on: anybody's, or names and docstrings of the Python packages installed here."""

from __future__ import annotations

from pathlib import Path

import datasets
from datasets import Dataset

from st_cached_extras.data.docstrings import docstring_pairs

PACKAGES = ("sentence_transformers", "datasets", "accelerate", "transformers", "torch")


def text_pairs(source: str | None, columns: list[str] | None, count: int, seed: int) -> Dataset:
    """Columns "query" and "answer", no query twice, shuffled.

    Args:
        source: Hub id, folder or file (parquet, csv, json) of a dataset; None for docstrings.
        columns: its two columns; None for the first two.
        count: pairs at most.
        seed: of the order.
    """
    if source is None:
        queries, answers = zip(*docstring_pairs(PACKAGES), strict=True)
        pairs = Dataset.from_dict({"query": queries, "answer": answers})
    else:
        pairs = load(source)
        columns = pairs.column_names[:2] if columns is None else columns
        if len(columns) != 2 or not set(columns) <= set(pairs.column_names):
            raise ValueError(f"--columns is {columns}; expected two of {pairs.column_names}.")
        pairs = pairs.select_columns(columns).rename_columns(dict(zip(columns, ("query", "answer"), strict=True)))
    first = {query: row for row, query in reversed(list(enumerate(pairs["query"])))}
    pairs = pairs.select(sorted(first.values())).shuffle(seed=seed)
    return pairs.select(range(min(count, len(pairs))))


def load(source: str) -> Dataset:
    """The training split of a dataset from the Hub or from this machine."""
    file = Path(source)
    if file.is_file():
        kind = {".jsonl": "json"}.get(file.suffix, file.suffix.removeprefix("."))
        return datasets.load_dataset(kind, data_files=source, split="train")
    return datasets.load_dataset(source, split="train")
