"""What is held out, and what shares a batch: a text that is known from training tests nothing, and one that comes
twice in a batch is its own wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

from st_cached_extras.data.errors import DataError


def hold_out(rows: Dataset, column: str, seed: int, count: int | None = None) -> tuple[Dataset, Dataset]:
    """Splits rows so that no value of a column, such as a caption, is on both sides.

    Args:
        rows: The dataset.
        column: Whose values are held out whole.
        seed: Draws the values.
        count: How many values to hold out, each with all of its rows. None: a tenth of the rows, at least 2 and at
            most 1000.

    Returns:
        The rows to train on and those held out, each in its order.

    Raises:
        DataError: The column has fewer than two values, so that one side would be empty.
    """
    count = max(2, min(1000, len(rows) // 10)) if count is None else count
    values: dict[Any, list[int]] = {}
    for row, value in enumerate(rows[column]):
        values.setdefault(value, []).append(row)
    groups = list(values.values())
    chosen = np.random.default_rng(seed).permutation(len(groups))[: min(count, len(groups) - 1)]
    held = [row for index in chosen for row in groups[index]]
    if not held:
        raise DataError(
            f"{len(rows)} row(s) with {len(groups)} different values of {column!r} are too few to hold any out: give "
            "more, or another split to evaluate on (--eval_split)."
        )
    rest = np.setdiff1d(np.arange(len(rows)), held)
    return rows.select(rest), rows.select(sorted(held))


def first_of_each(rows: Dataset, column: str) -> Dataset:
    """The first row of each value of a column."""
    first: dict[Any, int] = {}
    for row, value in enumerate(rows[column]):
        first.setdefault(value, row)
    return rows if len(first) == len(rows) else rows.select(list(first.values()))


def distinct(*columns: str) -> Callable[..., NoDuplicatesBatchSampler]:
    """Batches in which no value of some columns comes twice, for the Trainer's argument ``batch_sampler``.

    The plain sampler compares all columns, and would decode every clip once more to do so.
    """
    return partial(_distinct, columns=columns)


def _distinct(dataset: Dataset, *, columns: tuple[str, ...], **kwargs: Any) -> NoDuplicatesBatchSampler:
    return NoDuplicatesBatchSampler(dataset.select_columns(list(columns)), **kwargs)
