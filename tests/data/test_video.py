"""Clips of any origin become arrays of frames, or an error that names the clip."""

from __future__ import annotations

import sys
import types

import datasets
import numpy as np
import pytest
import torch

from st_cached_extras.data import VideoFrames, decode_videos, read_clip, read_video, write_mp4
from st_cached_extras.data.video import Sampling


def ramp(frames: int = 12, height: int = 32, width: int = 48) -> np.ndarray:
    """Grey frames, each brighter than the last, so that a decoded frame tells its index: [T, H, W, 3]."""
    levels = 20 * np.arange(frames) + 10
    return np.broadcast_to(levels[:, None, None, None], (frames, height, width, 3)).astype(np.uint8)


def indices(video: np.ndarray) -> list[int]:
    """Which frames of `ramp` these are."""
    return ((video.mean(axis=(1, 2, 3)) - 10) / 20).round().astype(int).tolist()


@pytest.fixture
def clip() -> bytes:
    return write_mp4(ramp())


@pytest.fixture
def file(tmp_path, clip):
    path = tmp_path / "ramp.mp4"
    path.write_bytes(clip)
    return path


def test_frames_come_back_within_the_loss_of_the_codec(clip):
    video = read_video(clip)
    assert video.dtype == np.uint8
    assert video.shape == (12, 32, 48, 3)
    assert np.abs(video.astype(int) - ramp()).max() <= 6


def test_bytes_strings_and_paths_read_the_same(clip, file):
    np.testing.assert_array_equal(read_video(clip), read_video(file))
    np.testing.assert_array_equal(read_video(clip), read_video(str(file)))


def test_colours_keep_their_channels():
    colours = np.zeros((4, 16, 16, 3), np.uint8)
    colours[..., 0], colours[..., 2] = 200, 40  # red with a little blue
    seen = read_video(write_mp4(colours)).mean(axis=(0, 1, 2))
    np.testing.assert_allclose(seen, (200, 0, 40), atol=8)


@pytest.mark.parametrize(
    "num_frames, expected",
    [(1, [6]), (3, [2, 6, 10]), (4, [1, 4, 7, 10]), (12, list(range(12))), (24, [i // 2 for i in range(24)])],
)
def test_sampled_frames_are_the_middles_of_equal_stretches(clip, num_frames, expected):
    assert indices(read_video(clip, num_frames)) == expected


def test_the_same_frames_give_the_same_bytes():
    assert write_mp4(ramp()) == write_mp4(ramp())


@pytest.mark.parametrize(
    "frames, message",
    [
        (np.zeros((2, 16, 16, 3), np.float32), "float32"),
        (np.zeros((16, 16, 3), np.uint8), r"\[16, 16, 3\]"),
        (np.zeros((2, 15, 16, 3), np.uint8), "even"),
    ],
)
def test_frames_that_cannot_be_written_are_refused(frames, message):
    with pytest.raises(ValueError, match=message):
        write_mp4(frames)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.mp4"):
        read_video(tmp_path / "gone.mp4")


def test_corrupt_bytes_are_named_with_the_cause(clip, tmp_path):
    with pytest.raises(ValueError, match=r"of 400 bytes \(sha256 .*Invalid"):
        read_video(clip[:400])
    (tmp_path / "half.mp4").write_bytes(clip[: len(clip) // 2])
    with pytest.raises(ValueError, match=r"half\.mp4"):
        read_video(tmp_path / "half.mp4")
    (tmp_path / "text.webm").write_text("not a video")
    with pytest.raises(ValueError, match=r"text\.webm"):
        read_video(tmp_path / "text.webm")


def test_zero_frames_are_refused(clip):
    with pytest.raises(ValueError, match="num_frames must be at least 1"):
        read_video(clip, 0)


def test_torchcodec_reads_where_it_is_installed(clip, monkeypatch):
    class VideoDecoder:
        """The calls of torchcodec's decoder that are documented, over a ramp."""

        def __init__(self, source, dimension_order):
            assert source == clip
            assert dimension_order == "NHWC"

        metadata = types.SimpleNamespace(average_fps=8.0)

        def __len__(self):
            return 12

        def get_frames_at(self, indices):
            return types.SimpleNamespace(data=torch.from_numpy(ramp()[indices]))

    decoders = types.ModuleType("torchcodec.decoders")
    decoders.VideoDecoder = VideoDecoder
    package = types.ModuleType("torchcodec")
    package.decoders = decoders
    monkeypatch.setitem(sys.modules, "torchcodec", package)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    monkeypatch.setitem(sys.modules, "av", None)  # not needed then
    assert indices(read_video(clip, 3)) == [2, 6, 10]
    assert indices(read_video(clip, fps=2)) == [2, 6, 10]
    assert read_video(clip, 3, size=16).shape == (3, 16, 24, 3)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"fps": 2}, [2, 6, 10]),  # 12 frames at 8 a second are 1.5 seconds
        ({"fps": 100}, [int((i + 0.5) * 12 / 150) for i in range(150)]),
        ({"fps": 0.1}, [3, 9]),  # never fewer than two
        ({"fps": 4, "num_frames": 3}, [2, 6, 10]),  # too long for 3 frames: sampled more sparsely, to its end
        ({"fps": 2, "num_frames": 8}, [2, 6, 10]),
    ],
)
def test_frames_a_second_are_kept_and_long_clips_sampled(clip, options, expected):
    assert indices(read_video(clip, **options)) == expected


def test_larger_frames_are_scaled_down_and_smaller_ones_are_not_scaled_up(clip):
    assert read_video(clip, size=16).shape == (12, 16, 24, 3)
    assert read_video(clip, size=64).shape == (12, 32, 48, 3)
    assert indices(read_video(clip, 3, size=16)) == [2, 6, 10]


def test_a_clip_says_how_long_it_is_and_how_many_frames_of_it_are_there(clip):
    frames, metadata = read_clip(clip, Sampling(num_frames=3))
    assert len(frames) == 3
    assert metadata == {"fps": 2.0, "total_num_frames": 3, "duration": 1.5, "frames_indices": [0, 1, 2]}
    rows = decode_videos(datasets.Dataset.from_dict({"video": [clip]}), num_frames=3, with_metadata=True)
    assert rows[0]["video"]["video_metadata"] == metadata
    np.testing.assert_array_equal(rows[0]["video"]["array"], frames)


@pytest.mark.parametrize("options", [{"fps": 0}, {"fps": -1}, {"size": 0}, {"num_frames": 0}])
def test_sampling_out_of_range_is_refused_by_name(clip, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be"):
        read_video(clip, **options)
    with pytest.raises(ValueError, match=f"{name} must be"):
        decode_videos(datasets.Dataset.from_dict({"video": [clip]}), **options)


def stored(kind: str, clip: bytes, file) -> datasets.Dataset:
    """One clip in each way in which a dataset may hold it."""
    values = {
        "bytes": clip,
        "path": str(file),
        "Video of bytes": {"bytes": clip, "path": None},
        "Video of a path": {"bytes": None, "path": str(file)},
        "struct": {"bytes": clip, "path": "ramp.mp4"},
    }
    features = {"clip": datasets.Video()} if kind.startswith("Video") else None
    return datasets.Dataset.from_dict({"clip": [values[kind]]}, features=features and datasets.Features(features))


@pytest.mark.parametrize("kind", ["bytes", "path", "Video of bytes", "Video of a path", "struct"])
def test_any_column_of_clips_decodes_on_access(kind, clip, file):
    decoded = decode_videos(stored(kind, clip, file), "clip", num_frames=3)
    assert indices(decoded[0]["clip"]) == [2, 6, 10]
    assert indices(next(iter(decoded.to_iterable_dataset()))["clip"]) == [2, 6, 10]


def test_no_path_ever_comes_out_as_a_string(tmp_path):
    for name in ("gone.mp4", "x.webm", "no video at all"):
        paths = datasets.Dataset.from_dict({"video": [str(tmp_path / name)]})
        with pytest.raises(FileNotFoundError, match=name):
            decode_videos(paths)[0]


def test_a_corrupt_row_of_a_dataset_is_named(tmp_path):
    rows = datasets.Dataset.from_dict({"video": [{"bytes": b"broken", "path": "row-7.mp4"}]})
    with pytest.raises(ValueError, match=r"row-7\.mp4"):
        decode_videos(rows)[0]


def test_other_columns_are_refused_by_what_they_hold():
    rows = datasets.Dataset.from_dict({"video": [1, 2], "caption": ["a", "b"]})
    with pytest.raises(ValueError, match=r"'clip'.*\['video', 'caption'\]"):
        decode_videos(rows, "clip")
    with pytest.raises(TypeError, match="int64"):
        decode_videos(rows, "video")


def test_a_feature_with_another_frame_count_is_another_feature(clip, file):
    rows = stored("Video of bytes", clip, file)
    again = decode_videos(decode_videos(rows, "clip", num_frames=3), "clip", num_frames=5)
    assert again.features["clip"] == VideoFrames(num_frames=5)
    assert len(again[0]["clip"]) == 5


def test_every_split_of_a_dataset_dict_decodes(clip, file):
    splits = datasets.DatasetDict(train=stored("bytes", clip, file), test=stored("bytes", clip, file))
    decoded = decode_videos(splits, "clip", num_frames=1)
    assert indices(decoded["test"][0]["clip"]) == indices(decoded["train"][0]["clip"]) == [6]
