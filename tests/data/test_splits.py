"""What is held out is unknown to training, and a batch holds no text twice."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from datasets import Dataset

from st_cached_extras.data import DataError, decode_videos, distinct, first_of_each, hold_out


def captions(values: int, each: int) -> Dataset:
    rows = [f"caption {i % values}" for i in range(values * each)]
    return Dataset.from_dict({"caption": rows, "row": range(len(rows))})


@pytest.mark.parametrize("values, each, count", [(40, 1, None), (20, 3, None), (20, 3, 7), (5, 4, 100)])
def test_whole_captions_are_held_out_and_no_row_is_lost(values, each, count):
    rows = captions(values, each)
    train, held_out = hold_out(rows, "caption", seed=0, count=count)
    assert sorted([*train["row"], *held_out["row"]]) == list(range(len(rows)))
    assert not set(train["caption"]) & set(held_out["caption"])
    expected = min(values - 1, count or max(2, len(rows) // 10))
    assert len(set(held_out["caption"])) == expected
    assert set(Counter(held_out["caption"]).values()) == {each}


def test_another_seed_holds_out_others():
    draws = {tuple(hold_out(captions(40, 1), "caption", seed)[1]["row"]) for seed in range(5)}
    assert len(draws) == 5
    assert hold_out(captions(40, 1), "caption", 1)[1]["row"][:] == hold_out(captions(40, 1), "caption", 1)[1]["row"][:]


def test_one_caption_cannot_be_split():
    with pytest.raises(DataError, match=r"4 row\(s\) with 1 different values of 'caption' are too few"):
        hold_out(captions(1, 4), "caption", 0)


def test_the_first_row_of_each_value_is_kept():
    assert first_of_each(captions(3, 4), "caption")["row"][:] == [0, 1, 2]


def test_batches_hold_no_caption_twice_and_decode_no_clip():
    rows = Dataset.from_dict({"caption": captions(8, 4)["caption"], "video": [f"missing-{i}.mp4" for i in range(32)]})
    sampler = pickle.loads(pickle.dumps(distinct("caption")))(
        decode_videos(rows), batch_size=8, drop_last=False, seed=0
    )
    batches = list(sampler)
    assert sorted(row for batch in batches for row in batch) == list(range(32))
    assert all(len({rows["caption"][row] for row in batch}) == len(batch) for batch in batches)
