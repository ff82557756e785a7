"""What a recipe trains on and what it is scored on, from the arguments of its command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import datasets
from datasets import Dataset, DatasetDict, IterableDataset

from st_cached_extras.data import (
    absolute_paths,
    check_clips,
    check_images,
    check_text,
    drop_broken,
    drop_broken_from_stream,
    drop_empty,
    hold_out,
    load_rows,
    take_columns,
)
from st_cached_extras.recipes.arguments import DataArguments, MediaArguments, one_for_each
from st_cached_extras.recipes.errors import UsageError

Rows = TypeVar("Rows", Dataset, IterableDataset)
EVALUATED_OF_A_STREAM = 256  # rows, unless --eval_rows says otherwise


def load_splits(
    data: DataArguments,
    prepare: Callable[[Rows, str, int], Rows],
    seed: int,
    *,
    held_out: str,
) -> tuple[Dataset | DatasetDict | IterableDataset, dict[str, Dataset]]:
    """The datasets that somebody names.

    Args:
        data: which, and which splits of them.
        prepare: makes columns as the loss takes them, from the rows of a dataset, its name and its number.
        seed: draws what is held out.
        held_out: the column whose values are held out whole, where no split to evaluate on is named.

    Returns:
        The rows to train on (by name, where there are several datasets), and those to evaluate on by name.

    Raises:
        UsageError, DataError: what is named cannot be used.
    """
    sources = data.dataset or []
    if data.streaming:
        if len(sources) > 1:
            raise UsageError("--streaming reads one dataset: sentence-transformers does not mix streams.")
        return _stream(data, prepare, sources[0])
    train, evaluation = {}, {}
    for index, (name, source) in enumerate(zip(_names(sources), sources, strict=True)):
        rows = prepare(load_rows(source, data.train_split, config=data.dataset_config), source, index)
        if data.eval_split is None:
            rows, scored = hold_out(rows, held_out, seed, data.eval_rows)
            split = "held out"
        else:
            scored = prepare(load_rows(source, data.eval_split, config=data.dataset_config), source, index)
            scored, split = first_rows(scored, data.eval_rows), data.eval_split
        train[name] = first_rows(rows, data.train_rows)
        evaluation[split if len(sources) == 1 else f"{name} {split}"] = scored
    return (DatasetDict(train) if len(train) > 1 else next(iter(train.values()))), evaluation


def decoded(rows: Rows | DatasetDict, decode: Callable[[Rows], Rows]) -> Rows | DatasetDict:
    """Rows as ``decode`` makes them, of each dataset where there are several."""
    return (
        DatasetDict({k: decode(part) for k, part in rows.items()}) if isinstance(rows, DatasetDict) else decode(rows)
    )


def texts_of(rows: Dataset | DatasetDict | IterableDataset, column: str) -> list[str]:
    """All texts in a column, of all datasets, such as the captions that the default model's vocabulary is made of."""
    if isinstance(rows, IterableDataset):
        raise UsageError("--streaming needs --model: the default model is made of all captions, which a stream hides.")
    parts = rows.values() if isinstance(rows, DatasetDict) else [rows]
    return [text for part in parts for text in part[column]]


def first_rows(rows: Dataset, count: int | None) -> Dataset:
    """The first rows, or all."""
    return rows if count is None or count >= len(rows) else rows.select(range(count))


def with_media(
    rows: Rows,
    source: str,
    kind: str,
    *,
    text_column: str,
    media_column: str,
) -> Rows:
    """Columns "caption" and, by kind, "video" or "image", checked for what they hold, paths made absolute."""
    columns = {"caption": text_column, kind: media_column}
    rows = take_columns(rows, columns, f"--text_column {text_column} --{kind}_column {media_column}")
    check_text(rows, "caption", f"--text_column {text_column}")
    (check_clips if kind == "video" else check_images)(rows, kind, f"--{kind}_column {media_column}")
    return absolute_paths(rows, kind, source) if isinstance(rows, Dataset) else rows


def decode_images(rows: Rows, column: str = "image") -> Rows:
    """Rows whose images decode to RGB on access."""
    return rows.cast_column(column, datasets.Image(mode="RGB"))


def without_broken(rows: Rows, kind: str, media: MediaArguments) -> Rows:
    """Rows whose captions are there and whose files, in the column ``kind``, can be decoded."""
    if isinstance(rows, IterableDataset):
        return drop_broken_from_stream(rows, kind, broken=media.broken, max_broken=media.max_broken)
    rows = drop_empty(rows, "caption", broken=media.broken)
    if not media.check_files:
        return rows
    return drop_broken(rows, kind, broken=media.broken, max_broken=media.max_broken)


def columns_of(values: list[str], data: DataArguments, argument: str) -> list[str]:
    """A column's name for each dataset."""
    return one_for_each(values, len(data.dataset or [None]), argument)


def _stream(
    data: DataArguments, prepare: Callable[[Rows, str, int], Rows], source: str
) -> tuple[IterableDataset, dict[str, Dataset]]:
    count = data.eval_rows or EVALUATED_OF_A_STREAM
    rows = load_rows(source, data.train_split, config=data.dataset_config, streaming=True)
    if data.eval_split is None:
        name, scored, rows = f"first {count}", _kept(rows, count), rows.skip(count)
    else:
        scored = load_rows(source, data.eval_split, config=data.dataset_config, streaming=True)
        name, scored = data.eval_split, _kept(scored, count)
    if data.train_rows is not None:
        rows = rows.take(data.train_rows)
    return prepare(rows, source, 0), {name: prepare(scored, source, 0)}


def _kept(rows: IterableDataset, count: int) -> Dataset:
    """The first rows of a stream, files as they are stored."""
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Video | datasets.Image):
            rows = rows.cast_column(column, type(feature)(decode=False))
    return Dataset.from_list(list(rows.take(count)), features=rows.features)


def _names(sources: list[str]) -> list[str]:
    """A short name for each dataset, none twice."""
    names: list[str] = []
    for source in sources:
        name = Path(source).stem or source
        names.append(name if name not in names else f"{name} {len(names) + 1}")
    return names
