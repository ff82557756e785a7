"""Files that cannot be read are an error, or passed over and counted up to a limit, as asked."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image as Picture

from st_cached_extras.data import DataError, decode_videos, drop_broken, drop_broken_from_stream, drop_empty, write_mp4
from st_cached_extras.recipes.splits import decode_images

GOOD = write_mp4(np.zeros((2, 16, 16, 3), np.uint8))


def clips(good: int, corrupt: int = 0, missing: int = 0, empty: int = 0) -> Dataset:
    """Clips, of which the last ones cannot be read."""
    values = [{"bytes": GOOD, "path": None}] * good
    values += [{"bytes": b"not a video", "path": "corrupt.mp4"}] * corrupt
    values += [{"bytes": None, "path": "missing.mp4"}] * missing + [None] * empty
    return decode_videos(Dataset.from_dict({"video": values, "row": range(len(values))}), num_frames=1)


def test_whole_rows_are_left_as_they_are():
    rows = clips(5)
    assert drop_broken(rows, "video") is rows


@pytest.mark.parametrize("kind, name", [("corrupt", "corrupt.mp4"), ("missing", "missing.mp4"), ("empty", "empty")])
def test_one_broken_file_is_an_error_that_names_row_and_file_unless_asked_otherwise(kind, name, caplog):
    rows = clips(5, **{kind: 1})
    with pytest.raises(DataError, match=rf"Row 5 of the column 'video' cannot be read: .*{name}.*--broken skip"):
        drop_broken(rows, "video")
    with caplog.at_level(logging.WARNING):
        kept = drop_broken(rows, "video", broken="skip", max_broken=1)
    assert kept["row"][:] == [0, 1, 2, 3, 4]
    assert "1 of 6 rows are passed over" in caplog.text and name in caplog.text


@pytest.mark.parametrize("max_broken, passes", [(2, True), (1, False), (0.2, True), (0.19, False)])
def test_more_than_the_limit_is_an_error_all_the_same(max_broken, passes):
    rows = clips(8, corrupt=1, missing=1)
    if passes:
        assert len(drop_broken(rows, "video", broken="skip", max_broken=max_broken)) == 8
    else:
        with pytest.raises(DataError, match=rf"2 of the 10 files .* --max_broken is {max_broken:g}"):
            drop_broken(rows, "video", broken="skip", max_broken=max_broken)


def test_no_file_that_can_be_read_is_an_error_whatever_the_limit():
    with pytest.raises(DataError, match="None of the 3 files in the column 'video' can be read"):
        drop_broken(clips(0, corrupt=3), "video", broken="skip", max_broken=100)


def test_a_stream_passes_over_broken_files_as_it_goes(caplog):
    rows = clips(5, corrupt=1, missing=1, empty=1).to_iterable_dataset()
    with caplog.at_level(logging.WARNING):
        kept = list(drop_broken_from_stream(rows, "video", broken="skip", max_broken=3))
    assert [row["row"] for row in kept] == [0, 1, 2, 3, 4]
    assert all(row["video"].shape == (1, 16, 16, 3) for row in kept)
    assert "3 of 8 files" in caplog.text
    with pytest.raises(DataError, match=r"3 of 8 .* --max_broken is 2"):
        list(drop_broken_from_stream(rows, "video", broken="skip", max_broken=2))
    with pytest.raises(DataError, match=r"corrupt\.mp4"):
        list(drop_broken_from_stream(rows, "video", broken="error"))


def test_images_are_checked_as_clips_are():
    file = io.BytesIO()
    Picture.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(file, "PNG")
    values = [file.getvalue(), file.getvalue()[:500], b"no image"]
    rows = decode_images(Dataset.from_dict({"image": values}), "image")
    with pytest.raises(DataError, match="Row 1 of the column 'image' cannot be read"):
        drop_broken(rows, "image")
    assert len(drop_broken(rows, "image", broken="skip", max_broken=2)) == 1


def test_rows_without_text_are_an_error_or_passed_over():
    rows = Dataset.from_dict({"caption": ["one", None, "  ", "two"]})
    with pytest.raises(DataError, match="2 of 4 rows have no text in the column 'caption', the first is row 1"):
        drop_empty(rows, "caption")
    assert drop_empty(rows, "caption", broken="skip")["caption"][:] == ["one", "two"]
    with pytest.raises(DataError, match="2 of 2 rows"):
        drop_empty(rows.select([1, 2]), "caption", broken="skip")
