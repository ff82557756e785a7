"""Drawn images show what their captions say, and splits share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from st_cached_extras.data.moving_shapes import COLOURS
from st_cached_extras.data.still_shapes import still_shapes, stills


def test_novel_captions_are_unknown_to_training_though_their_words_are_not():
    train, novel = ({s.caption for s in stills(split)} for split in ("train", "novel"))
    assert len(train) == 504 and len(novel) == 72 and not train & novel
    assert {w for c in novel for w in c.split()} <= {w for c in train for w in c.split()}


def test_every_pair_of_attribute_values_is_in_training():
    shown = np.array([[hash(v) for v in still] for still in stills("train")])
    everything = np.array([[hash(v) for v in still] for still in (*stills("train"), *stills("novel"))])
    for i in range(5):
        for j in range(i):
            assert {tuple(x) for x in shown[:, [i, j]]} == {tuple(x) for x in everything[:, [i, j]]}


def test_the_shape_is_where_and_of_the_colour_that_the_caption_says():
    for row in still_shapes("test", 40):
        pixels = np.asarray(row["image"]).astype(float)
        assert pixels.shape == (56, 56, 3)
        words = row["caption"].split()
        colour = np.array(COLOURS[words[2]], float)
        near = np.linalg.norm(pixels - colour, axis=-1) < 40
        y, x = np.argwhere(near).mean(axis=0) // (56 / 3)
        assert (words[6], words[7]) == (("top", "middle", "bottom")[int(y)], ("left", "centre", "right")[int(x)])


def test_the_same_seed_draws_the_same_and_another_draws_other_images():
    first, again, other = (still_shapes("test", 3, seed)[0]["image"].tobytes() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("split, n", [("test", 505), ("novel", 73), ("train", 0)])
def test_more_captions_than_there_are_and_none_are_refused(split, n):
    with pytest.raises(ValueError, match="n must be at least 1"):
        still_shapes(split, n)
    with pytest.raises(ValueError, match="split must be one of"):
        still_shapes("validation")
