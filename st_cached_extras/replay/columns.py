"""The input columns of one training step: what each is called, its rows, its plan, and what its first pass leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor

from st_cached_extras.replay.rows import FeatureRows


@dataclass
class Column:
    """One input column of one training step: its rows, its plan, and what its first pass left behind.

    Attributes:
        name: what the objective calls it.
        rows: its inputs.
        plan: int64 row indices [n], one tensor per mini-batch.
        differentiated: how many of the mini-batches, the first ones, are replayed.
        random_states: per mini-batch, the random state before its first pass; None where that drew no numbers.
        kept: embeddings of the first pass that still have their graphs, by mini-batch.
        embeddings: [B, D] in row order, in the model's dtype, fp16 in fp32.
        trainable: a mini-batch in which a trainable parameter is known to have a part; None if there is none.
    """

    name: str
    rows: FeatureRows
    plan: list[Tensor]
    differentiated: int
    random_states: list[RandContext | None] = field(default_factory=list)
    kept: dict[int, Tensor] = field(default_factory=dict)
    embeddings: Tensor = field(default_factory=lambda: torch.empty(0))
    trainable: int | None = None


def column_names(count: int) -> list[str]:
    """anchor, positive, negative_1, negative_2, ..."""
    return ["anchor", "positive", *(f"negative_{index}" for index in range(1, count - 1))][:count]


def read_columns(sentence_features: Iterable[Mapping[str, Any]], **options: Any) -> dict[str, FeatureRows]:
    """The rows of every column by its name.

    Args:
        sentence_features: one feature dict per column.
        options: of :class:`FeatureRows`.

    Raises:
        ValueError: no columns, or columns that do not hold the same positive number of rows.
    """
    columns = list(sentence_features)
    if not columns:
        raise ValueError("There are no input columns: the dataset has no column to embed.")
    names = column_names(len(columns))
    rows = {name: FeatureRows(features, **options) for name, features in zip(names, columns, strict=True)}
    counts = {name: column.count for name, column in rows.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"Every input column must hold the same positive number of rows, got {listed}.")
    return rows
