"""Rows come from every kind of place, or with an error that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from st_cached_extras.data import (
    DataError,
    absolute_paths,
    decode_videos,
    drop_broken,
    load_rows,
    take_columns,
    write_mp4,
)

ROWS = {"term": ["cat", "dog", "owl"], "meaning": ["it purrs", "it barks", "it hoots"]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def place(kind: str, folder) -> str:
    """The rows above, kept in some way, and where."""
    rows = Dataset.from_dict(ROWS)
    path = folder / "rows" if kind.startswith(("saved", "folder")) else folder / f"rows.{kind}"
    if kind == "parquet":
        rows.to_parquet(str(path))
    elif kind == "csv":
        rows.to_csv(str(path))
    elif kind == "jsonl":
        rows.to_json(str(path))
    elif kind == "json":
        rows.to_json(str(path), lines=False)
    elif kind == "saved dataset":
        rows.save_to_disk(str(path))
    elif kind == "saved splits":
        DatasetDict(train=rows).save_to_disk(str(path))
    else:
        path.mkdir()
        rows.to_parquet(str(path / "train.parquet"))
    return str(path)


KINDS = ["parquet", "csv", "jsonl", "json", "saved dataset", "saved splits", "folder of parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_read_from_every_kind_of_place(kind, streaming, tmp_path):
    rows = load_rows(place(kind, tmp_path), streaming=streaming)
    assert isinstance(rows, IterableDataset if streaming else Dataset)
    assert list(rows) == [{"term": t, "meaning": m} for t, m in zip(*ROWS.values(), strict=True)]
    assert rows.features["term"].dtype in ("string", "large_string")  # streams know their columns, too


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_that_is_not_there_is_named_beside_those_that_are(kind, tmp_path):
    with pytest.raises(DataError, match=r"validation.*train"):
        load_rows(place(kind, tmp_path), "validation")


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path):
    with pytest.raises(DataError, match=r"'nobody/nothing' cannot be loaded"):
        load_rows("nobody/nothing")
    (tmp_path / "rows.txt").write_text("cat")
    with pytest.raises(DataError, match=r"no file of rows: expected one that ends in \.parquet, \.csv"):
        load_rows(str(tmp_path / "rows.txt"))
    (tmp_path / "rows.parquet").write_text("this is no parquet")
    with pytest.raises(DataError, match=r"rows\.parquet' cannot be loaded: .*[Pp]arquet"):
        load_rows(str(tmp_path / "rows.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty' cannot be loaded"):
        load_rows(str(tmp_path / "empty"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_without_rows_is_refused(streaming, tmp_path):
    (tmp_path / "rows.csv").write_text("term,meaning\n")
    with pytest.raises(DataError, match="no rows"):
        load_rows(str(tmp_path / "rows.csv"), streaming=streaming)


def test_paths_start_from_the_folder_of_the_file_that_lists_them(tmp_path):
    lines = ["clip,caption", "a.mp4,one", f"{tmp_path}/elsewhere/b.mp4,two", "https://x.org/c.mp4,three"]
    (tmp_path / "captions.csv").write_text("\n".join(lines))
    rows = absolute_paths(load_rows(str(tmp_path / "captions.csv")), "clip", str(tmp_path / "captions.csv"))
    assert rows["clip"][:] == [f"{tmp_path}/a.mp4", f"{tmp_path}/elsewhere/b.mp4", "https://x.org/c.mp4"]
    assert rows["caption"][:] == ["one", "two", "three"]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_paths_of_a_streamed_file_decode(kind, tmp_path):
    paths = [str(tmp_path / f"{index}.mp4") for index in range(3)]
    for index, path in enumerate(paths):
        Path(path).write_bytes(write_mp4(np.full((4, 16, 16, 3), 80 * index, np.uint8)))
    rows = Dataset.from_dict({"clip": paths, "caption": ["a", "b", "c"]})
    rows.to_csv(str(tmp_path / "rows.csv")) if kind == "csv" else rows.to_json(str(tmp_path / "rows.jsonl"))
    stream = load_rows(str(tmp_path / f"rows.{kind}"), streaming=True)
    stream = decode_videos(take_columns(stream, {"caption": "caption", "video": "clip"}), num_frames=2)
    assert [(row["caption"], row["video"].shape, round(row["video"].mean() / 80)) for row in stream.skip(1)] == [
        ("b", (2, 16, 16, 3), 1),
        ("c", (2, 16, 16, 3), 2),
    ]


def test_files_that_a_folder_lists_but_does_not_hold_are_broken_rows(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "0.mp4").write_bytes(write_mp4(np.zeros((4, 16, 16, 3), np.uint8)))
    (tmp_path / "clips" / "metadata.csv").write_text("file_name,caption\n0.mp4,there\n1.mp4,gone\n")
    rows = decode_videos(load_rows(str(tmp_path / "clips")), num_frames=2)
    assert drop_broken(rows, "video", broken="skip", max_broken=1)["caption"][:] == ["there"]
