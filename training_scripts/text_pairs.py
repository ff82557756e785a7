"""Pairs of texts to train a retriever on: anybody's, or names and docstrings of the Python packages installed here."""

from __future__ import annotations

from datasets import Dataset

from st_cached_extras.data import DataError, check_text, first_of_each, load_rows, take_columns
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
        pairs = docstrings()
    else:
        pairs = load_rows(source)
        found = pairs.column_names
        columns = found[:2] if columns is None else columns
        if len(columns) != 2 or not set(columns) <= set(found):
            raise DataError(f"--columns is {columns}; expected two of {found}.")
        pairs = take_columns(pairs, dict(zip(("query", "answer"), columns, strict=True)))
        for column, name in zip(("query", "answer"), columns, strict=True):
            check_text(pairs, column, f"--columns {name}")
    pairs = first_of_each(pairs, "query").shuffle(seed=seed)
    return pairs.select(range(min(count, len(pairs))))


def docstrings() -> Dataset:
    """Columns "query", what a class or function of the installed packages is called, and "answer", what it does."""
    queries, answers = zip(*docstring_pairs(PACKAGES), strict=True)
    return Dataset.from_dict({"query": queries, "answer": answers})
