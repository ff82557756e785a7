"""Columns under the names and in the order in which a loss takes them, checked for what they hold.

The Trainer of sentence-transformers tells the columns of a batch apart by their prefix: "video" and "video_caption"
collide, and the one's inputs end up in the other. So the recipes never pass on somebody's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import datasets
from datasets import Dataset, IterableDataset

from st_cached_extras.data.errors import DataError
from st_cached_extras.data.video import holds_clips

Rows = TypeVar("Rows", Dataset, IterableDataset)
STRINGS = ("string", "large_string")
LOOKS_LIKE_A_PATH = re.compile(r"\.\w{2,5}$")
LABELS = ("label", "labels", "score", "scores")
"""Columns that sentence-transformers takes for labels."""


def take_columns(rows: Rows, names: Mapping[str, str], argument: str = "--columns") -> Rows:
    """Some columns, renamed, in the order given, and as plain Python objects whatever their format was.

    Args:
        rows: The dataset.
        names: The column to take, by its new name.
        argument: What error messages call the choice of columns.

    Raises:
        DataError: A column that is not there, or is taken twice.
    """
    for column in names.values():
        if column not in rows.column_names:
            raise DataError(f"{argument} names the column {column!r}, but the columns are {list(rows.column_names)}.")
    taken = list(names.values())
    if len(set(taken)) < len(taken):
        raise DataError(f"{argument} takes a column twice: {taken}.")
    # In two steps, because a new name may be an old one of another column.
    if isinstance(rows, Dataset):
        rows = rows.with_format(None)  # a format of numpy makes scalars of the texts, which no tokenizer takes
    rows = rows.select_columns(taken)
    rows = rows.rename_columns({old: f"{new} " for new, old in names.items()})
    return rows.rename_columns({f"{new} ": new for new in names})


def check_text(rows: Rows, column: str, argument: str) -> None:
    """Raise a DataError unless a column holds text."""
    feature = rows.features[column]
    if getattr(feature, "dtype", None) not in STRINGS:
        raise DataError(f"{argument} must name a column of text, but it holds {_kind(feature)}.")


def check_clips(rows: Rows, column: str, argument: str) -> None:
    """Raise a DataError unless a column may hold videos; strings must look like paths."""
    feature = rows.features[column]
    if is_list_of_images(feature):
        raise DataError(
            f"{argument} names a column of lists of images, which would be taken for pairs where there are two. Make "
            "a video of each, st_cached_extras.data.write_mp4(frames), and store its bytes."
        )
    if not holds_clips(feature):
        raise DataError(f"{argument} must name a column of videos, but it holds {_kind(feature)}.")
    _check_paths(rows, column, argument, "videos")


def check_images(rows: Rows, column: str, argument: str) -> None:
    """Raise a DataError unless a column may hold images; strings must look like paths."""
    feature = rows.features[column]
    if not isinstance(feature, datasets.Image) and (isinstance(feature, datasets.Video) or not holds_clips(feature)):
        raise DataError(f"{argument} must name a column of images, but it holds {_kind(feature)}.")
    _check_paths(rows, column, argument, "images")


def is_list_of_images(feature: Any) -> bool:
    """Whether a feature is a list of images, such as the frames of a clip."""
    inner = getattr(feature, "feature", None) if not isinstance(feature, list) else feature[0]
    return isinstance(inner, datasets.Image)


def _check_paths(rows: Rows, column: str, argument: str, kind: str) -> None:
    if getattr(rows.features[column], "dtype", None) not in STRINGS:
        return
    sample = [row[column] for row in rows.select_columns([column]).take(8)]
    if sample and not any(value and (LOOKS_LIKE_A_PATH.search(value) or "://" in value) for value in sample):
        raise DataError(f"{argument} must name a column of {kind}, but it holds text such as {str(sample[0])[:60]!r}.")


def _kind(feature: Any) -> str:
    return f"{feature.dtype} values" if isinstance(feature, datasets.Value) else repr(feature)
