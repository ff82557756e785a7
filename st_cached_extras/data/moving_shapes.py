"""Moving shapes: a captioned video set that is drawn on the spot, for demonstrations and tests without downloads.

One coloured shape moves over a plain background; its caption names all five of its attributes, as in "a small red
circle moving left slowly". Clips are real mp4 files in memory, so they take the same path as anybody's videos.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import datasets
import numpy as np
from tqdm.auto import tqdm

from st_cached_extras.data.video import VideoFrames, write_mp4

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 60, 190),
    "orange": (240, 140, 30),
    "cyan": (50, 200, 210),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS = {"slowly": 1.0, "quickly": 3.0}  # pixels per frame
SIZES = {"small": 6.0, "large": 11.0}  # radius in pixels
FRAMES, SIDE = 8, 56

DEFAULT_CLIPS = {"train": 2048, "test": 64, "novel": 64}


class Scene(NamedTuple):
    """What a clip shows; five attributes that make one of 512 captions."""

    colour: str
    shape: str
    direction: str
    speed: str
    size: str

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} moving {self.direction} {self.speed}"


def scenes(split: str) -> list[Scene]:
    """The scenes whose captions occur in a split: 448 for "train" and "test", 64 others for "novel".

    The rule depends on nothing but the attributes. It holds out 8 captions of each colour, 16 of each shape and
    direction and 32 of each speed and size, and leaves every pair of attribute values in training.
    """
    chosen = []
    for indices in itertools.product(range(8), range(4), range(4), range(2), range(2)):
        held_out = int(np.dot(indices, (1, 3, 5, 2, 4))) % 8 == 0
        if held_out == (split == "novel"):
            values = (list(COLOURS), SHAPES, list(DIRECTIONS), list(SPEEDS), list(SIZES))
            chosen.append(Scene(*(names[i] for names, i in zip(values, indices, strict=True))))
    return chosen


def moving_shapes(
    split: str, n: int | None = None, seed: int = 0, *, show_progress_bar: bool = True
) -> datasets.Dataset:
    """Draws a split of captioned clips of moving shapes, in memory: nothing is downloaded, nothing kept on disk.

    Args:
        split: "train"; "test", new clips of captions that training has too; or "novel", clips of 64 captions that
            are in neither of the others, though each of their words is. Two splits never draw the same clip.
        n: How many clips. None: 2048, 64 and 64. "train" covers its 448 captions as evenly as n allows; in "test"
            and "novel" no caption comes twice (retrieval would have two right answers), so there can be at most 448
            and 64 clips.
        seed: Draws other clips, and for "test" other captions. The same (split, n, seed) gives the same bytes.
        show_progress_bar: Whether to show the clips being drawn.

    Returns:
        A `Dataset` with columns "video", a uint8 array of shape [8, 56, 56, 3] decoded on access, and "caption".
        The decoding survives indexing, slicing, iteration, select, shuffle, filter, map, sort, train_test_split,
        concatenate_datasets, renaming, set_transform, pickling and DataLoader workers. What `save_to_disk` and
        `push_to_hub` write is an ordinary `datasets.Video` column: call `decode_videos` after loading it again.

    Example:
        >>> from st_cached_extras.data import moving_shapes
        >>> clips = moving_shapes("test")
        >>> clips[0]["video"].shape
        (8, 56, 56, 3)
    """
    if split not in DEFAULT_CLIPS:
        raise ValueError(f"split must be one of {list(DEFAULT_CLIPS)}, got {split!r}.")
    n = DEFAULT_CLIPS[split] if n is None else n
    available = scenes(split)
    if n < 1 or (split != "train" and n > len(available)):
        most = "" if split == "train" else f", and at most {len(available)}: as many captions are in split {split!r}"
        raise ValueError(f"n must be at least 1{most}. Got n={n}.")

    rng = np.random.default_rng((list(DEFAULT_CLIPS).index(split), seed))
    rounds = [rng.permutation(len(available)) for _ in range(-(-n // len(available)))]
    shown = [available[i] for i in np.concatenate(rounds)[:n]]
    videos = [
        {"path": f"{split}-{row:05d}.mp4", "bytes": write_mp4(draw(scene, rng))}
        for row, scene in enumerate(tqdm(shown, desc=f"Drawing {split} clips", disable=not show_progress_bar))
    ]
    return datasets.Dataset.from_dict(
        {"video": videos, "caption": [scene.caption for scene in shown]},
        features=datasets.Features({"video": VideoFrames(), "caption": datasets.Value("string")}),
    )


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Frames of one clip, uint8 of shape [8, 56, 56, 3]: path and background are random, the rest is the scene's."""
    radius = SIZES[scene.size]
    velocity = np.array(DIRECTIONS[scene.direction]) * SPEEDS[scene.speed]  # [2]
    # The middle of the path is drawn, the same way for either direction, and the shape never leaves the picture.
    margin = radius + np.abs(velocity) * (FRAMES - 1) / 2
    middle = rng.uniform(margin, SIDE - margin)
    time = np.arange(FRAMES) - (FRAMES - 1) / 2
    return paint(scene.shape, scene.colour, radius, middle + time[:, None] * velocity, rng)


def paint(shape: str, colour: str, radius: float, centre: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Pictures of a shape with its centre at x, y [N, 2] in pixels, over a random grey: uint8 [N, 56, 56, 3]."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32) + 0.5
    x = x - centre[:, 0, None, None].astype(np.float32)  # [N, 56, 56]
    y = y - centre[:, 1, None, None].astype(np.float32)
    coverage = np.clip(0.5 - _distance(shape, x, y, radius), 0, 1)[..., None]  # soft edge, one pixel wide
    background = np.float32(rng.uniform(0, 40))
    contrast = np.array(COLOURS[colour], np.float32) - background
    return (background + coverage * contrast + 0.5).astype(np.uint8)  # [N, 56, 56, 3]


def _distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Signed distance to the shape's edge, negative inside (a bound on it at corners)."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.85 * radius
    if shape == "triangle":
        sides = (np.abs(x) - 0.6 * (y + radius)) / np.hypot(1, 0.6)
        return np.maximum(sides, y - 0.7 * radius)
    along, across = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    return np.maximum(along - radius, across - 0.33 * radius)
