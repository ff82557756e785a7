"""What an objective asks of its features before any mathematics, with errors that say the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_NAMES = (
    "expected 'anchor', 'positive' and optionally 'negative_1', 'negative_2', .... "
    "Name the columns so, in the order query, its document, its hard negatives."
)


def check_embeddings(features: Mapping[str, Tensor]) -> None:
    """Features are floating point, [B, D] each, with one B; if not, a TypeError or ValueError."""
    if not features:
        raise ValueError("features: none, expected at least one column. Give every input column its embeddings.")
    first, anchor = next(iter(features.items()))
    for name, column in features.items():
        if not column.is_floating_point():
            raise TypeError(
                f"features[{name!r}]: dtype {column.dtype}, expected a floating-point dtype. Give embeddings, not ids."
            )
        if column.ndim != 2 or 0 in column.shape:
            raise ValueError(
                f"features[{name!r}]: shape {tuple(column.shape)}, expected [B, D] with at least one row and one "
                "dimension. Give one embedding vector per row: pool token embeddings first, skip an empty batch."
            )
        if len(column) != len(anchor):
            raise ValueError(
                f"features[{name!r}]: rows differ, shape {tuple(column.shape)}, expected {len(anchor)} rows as "
                f"{first!r} of shape {tuple(anchor.shape)}. Row i of every column belongs to row i of the dataset: "
                "give every row one text, image or clip per column."
            )


def check_columns(features: Mapping[str, Tensor]) -> list[str]:
    """The names of input columns in their order in the dataset.

    Args:
        features: "anchor", and optionally "positive", "negative_1", "negative_2", ..., each [B, D], floating point.

    Returns:
        "anchor", "positive", the negatives by their number, whatever the order in ``features``.

    Raises:
        TypeError: a column that is not floating point.
        ValueError: an unknown or missing name, an empty column or one that is not [B, D], B that differ.
    """
    negatives = {name: re.fullmatch(r"negative_([1-9]\d*)", name) for name in features}
    unknown = [name for name in features if name not in ("anchor", "positive") and not negatives[name]]
    if unknown or "anchor" not in features:
        problem = f"unknown {unknown}" if unknown else "missing ['anchor']"
        raise ValueError(f"features: {problem} among {list(features)}, {_NAMES}")
    check_embeddings(features)
    in_order = sorted(filter(negatives.get, features), key=lambda name: int(name[9:]))
    return ["anchor", *(["positive"] if "positive" in features else []), *in_order]


def check_ranking_features(features: Mapping[str, Tensor]) -> list[str]:
    """The names of a batch of queries and documents, documents first.

    Args:
        features: "anchor", "positive", any number of "negative_1", "negative_2", ..., each [B, D], floating point.

    Returns:
        "positive", the negatives by their number, "anchor", whatever the order in ``features``.

    Raises:
        TypeError: a column that is not floating point.
        ValueError: an unknown or missing name, an empty column or one that is not [B, D], B or D that differ.
    """
    if missing := [name for name in ("anchor", "positive") if name not in features]:
        raise ValueError(f"features: missing {missing} among {list(features)}, {_NAMES}")
    anchor, *documents = check_columns(features)
    check_widths(features)
    return [*documents, anchor]


def check_widths(features: Mapping[str, Tensor]) -> None:
    """All columns have one width D, as whatever is scored against each other must; if not, a ValueError."""
    first, *others = features
    width = features[first].shape[1]
    for name in others:
        if features[name].shape[1] != width:
            raise ValueError(
                f"features[{name!r}]: dimensions differ, shape {tuple(features[name].shape)}, expected [B, {width}] "
                f"as {first!r}. All columns are scored against each other: give embeddings from encoders of one width."
            )


def check_labels(labels: Tensor | None, count: int, *, what: str) -> None:
    """Labels are a tensor with one entry for each of ``count`` rows; if not, a TypeError or ValueError."""
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"labels: found {'None' if labels is None else type(labels).__name__}, expected {what}. Give the dataset "
            "a column 'label'."
        )
    if not labels.ndim or len(labels) != count:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)}, expected {what} for each of {count} rows. Give every row a label."
        )


def read_groups(labels: Tensor | None, count: int) -> Tensor:
    """Group ids [B] of any dtype, from labels [B] or [B, 1]; an error if they are none."""
    check_labels(labels, count, what="a group id")
    if labels.numel() != count:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)}, expected one group id for each of {count} rows. Give a column "
            "'label' of integers, the same for rows that belong together."
        )
    labels = labels.flatten()
    return labels.to(torch.uint8) if labels.dtype == torch.bool else labels


def check_rows(rows: Tensor | None, count: int) -> None:
    """``rows`` are None or int64 [b], each from 0 to count − 1; if not, a TypeError or ValueError."""
    if rows is None:
        return
    if rows.dtype != torch.int64 or rows.ndim != 1:
        raise TypeError(
            f"rows: {rows.dtype} of shape {tuple(rows.shape)}, expected int64 [b]. Give row indices; a mask becomes "
            "one with mask.nonzero().flatten()."
        )
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= count):
        raise ValueError(
            f"rows: indices from {int(rows.min())} to {int(rows.max())}, expected 0 to {count - 1}. Give indices of "
            "this rank's own rows, without the offset of other ranks."
        )
