"""What data a model was trained on, so that somebody else can check that they have the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

ROWS = 256  # that are looked at: enough to tell datasets apart, few enough to read their files


def describe_dataset(dataset: Dataset | IterableDataset | Mapping[str, Any], unit: str = "rows") -> str:
    """Size and fingerprint of a dataset, or of several by name, for the card.

    The fingerprint is a hash of the contents of up to 256 rows, evenly spaced from the first to the last, as they are
    stored: of the bytes of clips and images, not of where they lie or how they are decoded. The same data have the
    same fingerprint on every machine; nothing is decoded. Of streamed data nothing is read ahead.
    """
    if isinstance(dataset, Mapping):
        return "; ".join(f"{name}: {describe_dataset(part, unit)}" for name, part in dataset.items())
    if isinstance(dataset, IterableDataset):
        return f"streamed {unit}, not counted and without a fingerprint"
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(ROWS, len(dataset))).round().astype(int))
    looked_at = "" if len(chosen) == len(dataset) else f" of {len(chosen)} of them"
    return f"{len(dataset):,} {unit}, fingerprint{looked_at} `{fingerprint(dataset, chosen)}`"


def fingerprint(dataset: Dataset, rows: np.ndarray) -> str:
    """Hash of the column names, the number of rows, and the chosen rows' contents; 16 hexadecimal digits."""
    digest = hashlib.sha256(repr((dataset.column_names, len(dataset))).encode())
    stored = dataset.with_format("arrow")
    for row in rows:
        for value in stored[int(row)].to_pydict().values():
            _add(digest, value[0])
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, dict) and {"path", "bytes"} <= value.keys():  # how datasets store media
        _add(digest, value["bytes"] if value["bytes"] is not None else Path(value["path"] or ""))
    elif isinstance(value, bytes):
        digest.update(b"bytes" + hashlib.sha256(value).digest())
    elif isinstance(value, Path):
        is_file = os.path.isfile(value)
        _add(digest, value.read_bytes() if is_file else value.name)
    else:
        digest.update(repr(value).encode() + b"\0")
