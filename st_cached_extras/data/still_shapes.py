"""Still shapes: a captioned image set that is drawn on the spot, as `moving_shapes` is for videos.

One coloured shape stands somewhere on a plain background; its caption says what and where, as in "a small red circle
at the top left".
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import datasets
import numpy as np
from PIL import Image

from st_cached_extras.data.moving_shapes import COLOURS, SHAPES, SIDE, SIZES, paint

ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
DEFAULT_IMAGES = {"train": 2048, "test": 64, "novel": 64}


class Still(NamedTuple):
    """What an image shows; five attributes that make one of 576 captions."""

    colour: str
    shape: str
    size: str
    row: str
    column: str

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} at the {self.row} {self.column}"


def stills(split: str) -> list[Still]:
    """What is shown in a split: 504 captions in "train" and "test", 72 others in "novel".

    The rule depends on nothing but the attributes, and leaves every pair of attribute values in training.
    """
    chosen = []
    for indices in itertools.product(range(8), range(4), range(2), range(3), range(3)):
        held_out = int(np.dot(indices, (1, 3, 4, 5, 2))) % 8 == 0
        if held_out == (split == "novel"):
            values = (list(COLOURS), SHAPES, list(SIZES), ROWS, COLUMNS)
            chosen.append(Still(*(names[i] for names, i in zip(values, indices, strict=True))))
    return chosen


def still_shapes(split: str, n: int | None = None, seed: int = 0) -> datasets.Dataset:
    """Draws a split of captioned images, in memory: nothing is downloaded, nothing kept on disk.

    Args:
        split: "train"; "test", new images of captions that training has too; or "novel", images of captions that are
            in neither of the others, though each of their words is.
        n: How many images. None: 2048, 64 and 64. In "test" and "novel" no caption comes twice, so there can be at
            most 504 and 72.
        seed: Draws other images. The same (split, n, seed) gives the same pixels.

    Returns:
        A `Dataset` with columns "image", a `datasets.Image` of 56 x 56 pixels, and "caption".
    """
    if split not in DEFAULT_IMAGES:
        raise ValueError(f"split must be one of {list(DEFAULT_IMAGES)}, got {split!r}.")
    n = DEFAULT_IMAGES[split] if n is None else n
    available = stills(split)
    if n < 1 or (split != "train" and n > len(available)):
        most = "" if split == "train" else f", and at most {len(available)}: as many captions are in split {split!r}"
        raise ValueError(f"n must be at least 1{most}. Got n={n}.")
    rng = np.random.default_rng((list(DEFAULT_IMAGES).index(split), seed, 1))
    rounds = [rng.permutation(len(available)) for _ in range(-(-n // len(available)))]
    shown = [available[i] for i in np.concatenate(rounds)[:n]]
    images = [Image.fromarray(draw(still, rng)) for still in shown]
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    return datasets.Dataset.from_dict({"image": images, "caption": [s.caption for s in shown]}, features=features)


def draw(still: Still, rng: np.random.Generator) -> np.ndarray:
    """One image, uint8 of shape [56, 56, 3]: the centre is random within its third, and so is the background."""
    third = SIDE / 3
    radius = SIZES[still.size] * 0.75
    corner = np.array([COLUMNS.index(still.column), ROWS.index(still.row)]) * third
    centre = np.clip(corner + rng.uniform(0.2, 0.8, 2) * third, radius, SIDE - radius)  # [2], x and y
    return paint(still.shape, still.colour, radius, centre[None], rng)[0]
