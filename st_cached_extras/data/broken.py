"""Files that cannot be read: found before the training, and an error or passed over, as asked.

Passing over them while training would need no pass of its own, but change from step to step what a batch holds; only
where a dataset is streamed there is no other way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import datasets
from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from st_cached_extras.data.errors import DataError

logger = logging.getLogger(__name__)

UNREADABLE = (OSError, ValueError, SyntaxError)  # SyntaxError: what Pillow makes of a broken PNG


def drop_broken(
    rows: Dataset,
    column: str,
    *,
    broken: Literal["error", "skip"] = "error",
    max_broken: float = 0.1,
    threads: int = 8,
    show_progress_bar: bool = True,
) -> Dataset:
    """The rows whose file can be decoded; every file is, once.

    Args:
        rows: A dataset whose column decodes on access (`decode_videos`, or a `datasets.Image`).
        column: The column of files.
        broken: "error" refuses a dataset with any broken file; "skip" passes over them, says how many, and why.
        max_broken: With "skip", more than so many (below 1: a share of the rows) are an error all the same.
        threads: How many files are decoded at once.
        show_progress_bar: Whether to show the files being decoded.

    Raises:
        DataError: Broken files, with "error"; more than `max_broken`; or none that can be read.
    """
    limit = max_broken if max_broken >= 1 else max_broken * len(rows)
    found: dict[int, str] = {}
    only = rows.select_columns([column])
    with ThreadPoolExecutor(threads) as pool:
        reasons = pool.map(_reason(only, column), range(len(only)))
        bar = tqdm(reasons, total=len(only), desc="Checking files", disable=not show_progress_bar, leave=False)
        for row, reason in enumerate(bar):
            if reason is None:
                continue
            found[row] = reason
            if broken == "error":
                raise DataError(
                    f"Row {row} of the column {column!r} cannot be read: {reason} Repair it, or pass over such rows "
                    "with --broken skip."
                )
    if len(found) == len(rows):
        first = next(iter(found.values()))
        raise DataError(f"None of the {len(rows)} files in the column {column!r} can be read. The first: {first}")
    if len(found) > limit:
        raise DataError(
            f"{len(found)} of the {len(rows)} files in the column {column!r} cannot be read, and --max_broken is "
            f"{max_broken:g}. The first: {next(iter(found.values()))}"
        )
    if found:
        logger.warning(
            f"{len(found)} of {len(rows)} rows are passed over, because their file in the column {column!r} cannot be "
            f"read. The first: {next(iter(found.values()))}"
        )
    return rows.select([row for row in range(len(rows)) if row not in found]) if found else rows


def drop_empty(rows: Dataset, column: str, *, broken: Literal["error", "skip"] = "error") -> Dataset:
    """The rows with a text in a column.

    Args:
        rows: The dataset.
        column: A column of text.
        broken: "error" refuses a dataset with an empty text; "skip" passes over such rows, and says how many.

    Raises:
        DataError: Empty texts, with "error", or nothing else.
    """
    empty = [row for row, text in enumerate(rows[column]) if text is None or not text.strip()]
    if not empty:
        return rows
    if broken == "error" or len(empty) == len(rows):
        raise DataError(
            f"{len(empty)} of {len(rows)} rows have no text in the column {column!r}, the first is row {empty[0]}: "
            "fill them, or leave them out."
        )
    logger.warning(f"{len(empty)} of {len(rows)} rows are passed over, because they have no text in {column!r}.")
    return rows.select(sorted(set(range(len(rows))) - set(empty)))


def drop_broken_from_stream(
    rows: IterableDataset, column: str, *, broken: Literal["error", "skip"] = "error", max_broken: float = 0.1
) -> IterableDataset:
    """The same for a stream, as it goes: with "skip", every file is decoded once more, to see whether it can be.

    Args:
        rows: A stream whose column decodes on access.
        column: The column of files.
        broken: "error" leaves the stream as it is, so that the first broken file ends the training.
        max_broken: More than so many (below 1: a share of the rows so far, from the twentieth on) are an error; each
            worker of a DataLoader counts its own.
    """
    if broken == "error":
        return rows
    feature = rows.features[column]
    stored = datasets.Video(decode=False) if isinstance(feature, datasets.Video) else datasets.Image(decode=False)
    return IterableDataset.from_generator(
        _readable,
        features=rows.features,
        gen_kwargs={
            "rows": rows.cast_column(column, stored),
            "column": column,
            "passes": _Passes(feature, column, max_broken),
            "shards": list(range(rows.num_shards)),  # a list is what the workers of a DataLoader divide
        },
    )


def _readable(rows: IterableDataset, column: str, passes: _Passes, shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from (row for row in rows.shard(rows.num_shards, shard) if passes(row[column]))


class _Passes:
    """Whether a file can be decoded; counts those that cannot."""

    def __init__(self, feature: Any, column: str, max_broken: float) -> None:
        self.feature, self.column, self.max_broken = feature, column, max_broken
        self.seen = self.found = 0

    def __call__(self, value: Any) -> bool:
        self.seen += 1
        reason = "The row is empty." if value is None else None
        if value is not None:
            try:
                self.feature.decode_example(value)
            except UNREADABLE as error:
                reason = " ".join(str(error).split())
        if reason is None:
            return True
        self.found += 1
        limit = self.max_broken if self.max_broken >= 1 else self.max_broken * max(self.seen, 20)
        message = f"{self.found} of {self.seen} files in the column {self.column!r} cannot be read so far. {reason}"
        if self.found > limit:
            raise DataError(f"{message} --max_broken is {self.max_broken:g}.")
        logger.warning(message)
        return False


def _reason(rows: Dataset, column: str) -> Callable[[int], str | None]:
    def reason(row: int) -> str | None:
        try:
            value = rows[row][column]
        except UNREADABLE as error:
            return " ".join(str(error).split())
        return "The row is empty." if value is None else None

    return reason
