"""Moving shapes show what their captions say, and the splits hold what they promise."""

from __future__ import annotations

import builtins
import pickle
from collections import Counter
from itertools import combinations

import datasets
import numpy as np
import pytest
from torch.utils.data import DataLoader

from st_cached_extras.data import decode_videos, moving_shapes

# Written out again, not imported: what a reader of a caption expects to see.
RGB = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 60, 190),
    "orange": (240, 140, 30),
    "cyan": (50, 200, 210),
    "white": (240, 240, 240),
}
STEP = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def words(caption: str) -> tuple[str, ...]:
    """(size, colour, shape, direction, speed) of "a small red circle moving left slowly"."""
    _, size, colour, shape, _, direction, speed = caption.split()
    return size, colour, shape, direction, speed


def foreground(video: np.ndarray) -> np.ndarray:
    """Where the shape is: pixels far from the corner pixels' median, [frames, height, width]."""
    background = np.median(video.reshape(-1, 3), axis=0)
    return np.abs(video.astype(float) - background).max(axis=-1) > 60


def centroids(mask: np.ndarray) -> np.ndarray:
    """Mean (x, y) of a mask per frame, [frames, 2]."""
    return np.array([np.argwhere(frame)[:, ::-1].mean(axis=0) for frame in mask])


@pytest.fixture(scope="module")
def train() -> datasets.Dataset:
    return moving_shapes("train", 448, show_progress_bar=False)


@pytest.fixture(scope="module")
def novel() -> datasets.Dataset:
    return moving_shapes("novel", show_progress_bar=False)


def test_a_clip_shows_the_colour_motion_speed_and_size_of_its_caption(novel):
    areas = {"small": [], "large": []}
    for row in novel:
        size, colour, shape, direction, speed = words(row["caption"])
        mask = foreground(row["video"])
        seen = np.median(row["video"][mask], axis=0)
        nearest = min(RGB, key=lambda name: np.abs(seen - RGB[name]).sum())
        assert nearest == colour, row["caption"]

        shift = np.diff(centroids(mask), axis=0).mean(axis=0)  # pixels per frame, (x, y)
        expected = np.array(STEP[direction]) * (3 if speed == "quickly" else 1)
        np.testing.assert_allclose(shift, expected, atol=0.35, err_msg=row["caption"])
        areas[size].append((shape, mask.sum(axis=(1, 2)).mean()))
    for shape in ("circle", "square", "triangle", "cross"):
        small = np.mean([area for name, area in areas["small"] if name == shape])
        large = np.mean([area for name, area in areas["large"] if name == shape])
        assert large > 2.5 * small


def test_shapes_fill_different_shares_of_the_square_around_them(novel):
    filled = {}
    for row in novel:
        size, _, shape, *_ = words(row["caption"])
        if size == "large":
            ys, xs = np.where(foreground(row["video"])[0])
            box = (np.ptp(ys) + 1) * (np.ptp(xs) + 1)
            filled.setdefault(shape, []).append(len(ys) / box)
    filled = {shape: np.mean(shares) for shape, shares in filled.items()}
    assert filled["square"] > 0.95
    assert filled["square"] - 0.1 > filled["circle"] > 0.7
    assert 0.4 < filled["triangle"] < 0.65
    assert 0.45 < filled["cross"] < 0.65


def test_novel_captions_are_never_trained_on_but_each_pair_of_their_words_is(train, novel):
    seen, held_out = set(train["caption"]), set(novel["caption"])
    assert len(seen) == 448
    assert len(held_out) == 64
    assert not seen & held_out
    trained_pairs = {pair for caption in seen for pair in combinations(words(caption), 2)}
    assert {pair for caption in held_out for pair in combinations(words(caption), 2)} <= trained_pairs


def test_novel_captions_are_the_same_for_every_seed(novel):
    assert set(moving_shapes("novel", seed=7, show_progress_bar=False)["caption"]) == set(novel["caption"])


def test_test_captions_are_distinct_and_trained_on(train):
    captions = moving_shapes("test", show_progress_bar=False)["caption"]
    assert len(set(captions)) == len(captions) == 64
    assert set(captions) <= set(train["caption"])


def test_train_covers_its_captions_evenly():
    counts = Counter(moving_shapes("train", 1000, show_progress_bar=False)["caption"])
    assert len(counts) == 448
    assert set(counts.values()) == {2, 3}


def test_the_same_split_and_seed_give_the_same_bytes_and_any_other_does_not():
    def stored(split, seed):
        clips = moving_shapes(split, 8, seed=seed, show_progress_bar=False)
        return [video["bytes"] for video in clips.cast_column("video", datasets.Video(decode=False))["video"]]

    drawn = {(split, seed): stored(split, seed) for split in ("train", "test", "novel") for seed in (0, 1)}
    assert stored("test", 0) == drawn["test", 0]
    for one, other in combinations(drawn.values(), 2):
        assert not set(one) & set(other)


@pytest.mark.parametrize("split, n, message", [("test", 449, "448"), ("novel", 65, "64"), ("train", 0, "at least 1")])
def test_more_clips_than_captions_are_refused_with_how_many_there_are(split, n, message):
    with pytest.raises(ValueError, match=message):
        moving_shapes(split, n)


def test_an_unknown_split_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'train', 'test', 'novel'.*'validation'"):
        moving_shapes("validation")


def test_without_pyav_the_error_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def no_av(name, *args, **kwargs):
        if name.split(".")[0] in ("av", "torchcodec"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_av)
    with pytest.raises(ImportError, match=r'pip install "st-cached-extras\[video\]"'):
        moving_shapes("test", 1, show_progress_bar=False)


TRANSFORMED = {
    "select": lambda clips: clips.select([5, 3, 1]),
    "shuffle": lambda clips: clips.shuffle(seed=1),
    "flatten_indices": lambda clips: clips.shuffle(seed=1).flatten_indices(),
    "filter": lambda clips: clips.filter(lambda row: "moving" in row["caption"]),
    "map": lambda clips: clips.map(lambda row: {"length": len(row["caption"])}),
    "train_test_split": lambda clips: clips.train_test_split(0.5)["train"],
    "concatenate": lambda clips: datasets.concatenate_datasets([clips, clips]),
    "pickle": lambda clips: pickle.loads(pickle.dumps(clips)),
    "set_transform": lambda clips: clips.with_transform(lambda batch: batch),
    "rename": lambda clips: clips.rename_column("caption", "text"),
    "stream": lambda clips: clips.to_iterable_dataset(),
}


@pytest.mark.parametrize("change", TRANSFORMED)
def test_clips_still_decode_after(change):
    clips = TRANSFORMED[change](moving_shapes("test", 8, show_progress_bar=False))
    video = next(iter(clips))["video"]
    assert video.dtype == np.uint8
    assert video.shape == (8, 56, 56, 3)


def test_indexing_slicing_and_columns_decode_the_same_frames(novel):
    one = novel[2]["video"]
    np.testing.assert_array_equal(novel[:4]["video"][2], one)
    np.testing.assert_array_equal(novel["video"][2], one)
    np.testing.assert_array_equal(next(iter(novel.select([2])))["video"], one)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffling_data_loader_gives_each_clip_once_with_its_caption(novel, workers):
    loader = DataLoader(novel, batch_size=16, shuffle=True, num_workers=workers, collate_fn=list)
    frames = {row["caption"]: row["video"] for batch in loader for row in batch}
    assert len(frames) == 64
    for row in novel.select(range(0, 64, 9)):
        np.testing.assert_array_equal(frames[row["caption"]], row["video"])


def test_saved_clips_are_ordinary_video_columns_that_decode_again(tmp_path):
    clips = moving_shapes("test", 4, show_progress_bar=False)
    clips.save_to_disk(tmp_path / "clips")
    loaded = datasets.load_from_disk(tmp_path / "clips")
    assert type(loaded.features["video"]) is datasets.Video
    np.testing.assert_array_equal(decode_videos(loaded)[3]["video"], clips[3]["video"])
