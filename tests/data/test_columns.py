"""Columns come out under our names, checked for what they hold."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from st_cached_extras.data import DataError, check_clips, check_images, check_text, take_columns

ROWS = Dataset.from_dict({"video": ["a.mp4", "b.mp4"], "video_caption": ["one", "two"], "id": [1, 2]})


@pytest.mark.parametrize("stream", [False, True])
def test_columns_are_renamed_in_the_order_given_also_to_names_of_other_columns(stream):
    rows = ROWS.to_iterable_dataset() if stream else ROWS
    taken = take_columns(rows, {"caption": "video", "video": "video_caption"})
    assert list(taken) == [{"caption": "a.mp4", "video": "one"}, {"caption": "b.mp4", "video": "two"}]
    assert list(next(iter(taken))) == ["caption", "video"]


def test_columns_that_are_not_there_or_taken_twice_are_named():
    with pytest.raises(DataError, match=r"--columns names the column 'text', but the columns are \['video', "):
        take_columns(ROWS, {"caption": "text", "video": "video"})
    with pytest.raises(DataError, match="takes a column twice"):
        take_columns(ROWS, {"caption": "video", "video": "video"})


def test_text_is_told_from_numbers():
    check_text(ROWS, "video_caption", "--text_column")
    with pytest.raises(DataError, match="--text_column must name a column of text, but it holds int64 values"):
        check_text(ROWS, "id", "--text_column")


@pytest.mark.parametrize("check, kind", [(check_clips, "videos"), (check_images, "images")])
def test_text_is_no_medium(check, kind):
    with pytest.raises(DataError, match=f"must name a column of {kind}, but it holds text such as 'one'"):
        check(ROWS, "video_caption", "--x")
    with pytest.raises(DataError, match=f"must name a column of {kind}, but it holds int64 values"):
        check(ROWS, "id", "--x")
    sentences = Dataset.from_dict({"x": ["A dog runs.", "A cat sleeps, e.g. on a mat."]})
    with pytest.raises(DataError, match=r"it holds text such as 'A dog runs\.'"):
        check(sentences, "x", "--x")


@pytest.mark.parametrize("path", ["a b.mp4", "/x/y.webm", "https://x.org/watch?v=1", "c.jpeg"])
def test_paths_and_addresses_may_hold_media(path):
    rows = Dataset.from_dict({"x": [path]})
    check_clips(rows, "x", "--x")
    check_images(rows, "x", "--x")


def test_one_medium_is_told_from_the_other():
    image = Dataset.from_dict({"x": [Image.fromarray(np.zeros((8, 8, 3), np.uint8))]})
    check_images(image, "x", "--x")
    with pytest.raises(DataError, match="must name a column of videos, but it holds Image"):
        check_clips(image, "x", "--x")
    video = Dataset.from_dict({"x": [b"bytes"]}).cast_column("x", datasets.Video(decode=False))
    check_clips(video, "x", "--x")
    with pytest.raises(DataError, match="must name a column of images, but it holds Video"):
        check_images(video, "x", "--x")
