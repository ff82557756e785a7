"""Rows from wherever somebody keeps them: the Hub, a folder, a file, or what ``save_to_disk`` left."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetsError

from st_cached_extras.data.errors import DataError

FILES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Files of rows by their ending, and the builder of `datasets` that reads them."""


def load_rows(
    source: str, split: str = "train", *, config: str | None = None, streaming: bool = False
) -> Dataset | IterableDataset:
    """One split of a dataset.

    Args:
        source: One of
            - the id of a dataset on the Hub;
            - a folder of clips or images with a `metadata.csv`, `metadata.jsonl` or `metadata.parquet`, whose column
              `file_name` names them, or of parquet, csv or json files: whatever `datasets.load_dataset` makes of it;
            - a folder that `save_to_disk` wrote;
            - a parquet, csv, json or jsonl file, such as captions beside the paths of clips (see `absolute_paths`).
        split: The split's name. A single file, and a saved `Dataset`, have the split "train" alone.
        config: The configuration's name, of a dataset on the Hub.
        streaming: Read while iterating, instead of first: nothing is downloaded or converted before.

    Raises:
        DataError: There is no such dataset or split, it cannot be read, or it has no rows.
    """
    path = Path(source)
    try:
        if path.is_file():
            rows = _of_file(path, split, streaming)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            rows = _saved(path, split, streaming)
        else:
            rows = datasets.load_dataset(source, config, split=split, streaming=streaming)
    except DataError:
        raise
    except (DatasetsError, ValueError, OSError) as error:
        if "corresponds to no data" in str(error):
            raise DataError(f"The split {split!r} of the dataset {source!r} is empty: it has no rows.") from error
        raise DataError(f"The dataset {source!r} cannot be loaded: {_root(error)}") from error
    if isinstance(rows, IterableDataset):
        return _with_features(rows, source)
    if len(rows) == 0:
        raise DataError(f"The split {split!r} of the dataset {source!r} is empty: it has no rows.")
    return rows


def absolute_paths(rows: Dataset, column: str, source: str) -> Dataset:
    """Rows of a file whose paths in a column start from the file's own folder, with absolute paths in their place.

    Paths that are absolute already, addresses (`https://...`) and columns that hold no paths stay as they are.
    """
    feature = rows.features[column]
    if not Path(source).is_file() or getattr(feature, "dtype", None) not in ("string", "large_string"):
        return rows
    folder = str(Path(source).resolve().parent)
    return rows.map(_absolute, input_columns=column, fn_kwargs={"column": column, "folder": folder})


def _absolute(path: str | None, column: str, folder: str) -> dict[str, str | None]:
    return {column: path if path is None or "://" in path else os.path.join(folder, path)}


def _of_file(path: Path, split: str, streaming: bool) -> Dataset | IterableDataset:
    if path.suffix not in FILES:
        raise DataError(f"{str(path)!r} is no file of rows: expected one that ends in {', '.join(FILES)}.")
    if split != "train":
        raise DataError(f"{str(path)!r} has no split {split!r}; its splits are ['train'].")
    return datasets.load_dataset(FILES[path.suffix], data_files=str(path), split="train", streaming=streaming)


def _saved(path: Path, split: str, streaming: bool) -> Dataset | IterableDataset:
    splits = datasets.load_from_disk(str(path))
    if isinstance(splits, Dataset):
        splits = {"train": splits}
    if split not in splits:
        raise DataError(f"{str(path)!r} has no split {split!r}; its splits are {list(splits)}.")
    return splits[split].to_iterable_dataset() if streaming else splits[split]


def _with_features(rows: IterableDataset, source: str) -> IterableDataset:
    """A stream that knows its columns, which are read off its first row where the builder does not say."""
    if rows.features is not None:
        return rows
    first = next(iter(rows), None)
    if first is None:
        raise DataError(f"The dataset {source!r} is empty: it has no rows.")
    return rows.cast(Dataset.from_list([first]).features)


def _root(error: BaseException) -> str:
    """What went wrong at first, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
