"""Rows are taken where that is plainly right; everything else keeps its order and goes through ST's slicing."""

import pytest
import torch

from st_cached_extras.replay.rows import FeatureRows
from st_cached_extras.testing.tiny_models import random_clips, text_columns, tiny_text_model, tiny_video_model


def test_any_rows_of_padded_text_are_taken_and_trimmed_to_their_longest():
    features = {
        "input_ids": torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]),
        "modality": "text",
        "prompt_length": torch.tensor([2]),
    }
    rows = FeatureRows(features)
    assert rows.count == 3 and rows.lengths == [3, 1, 4]
    taken = rows.take(torch.tensor([1, 0]))
    assert taken["input_ids"].tolist() == [[4, 0, 0], [1, 2, 3]]
    assert taken["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert taken["modality"] == "text" and taken["prompt_length"].tolist() == [2]


def test_left_padding_counts_as_length_because_it_is_computed():
    features = {
        "input_ids": torch.tensor([[0, 0, 1], [1, 2, 3]]),
        "attention_mask": torch.tensor([[0, 0, 1], [1] * 3]),
    }
    rows = FeatureRows(features)
    assert rows.lengths == [3, 3]
    assert rows.take(torch.tensor([0]))["input_ids"].tolist() == [[0, 0, 1]]


def test_a_row_without_active_tokens_keeps_its_width():
    features = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[0, 0, 0], [1, 1, 0]])}
    rows = FeatureRows(features)
    assert rows.take(torch.tensor([0]))["input_ids"].shape == (1, 3)
    assert rows.take(torch.tensor([0, 1]))["input_ids"].shape == (2, 2)


def test_clips_are_taken_in_order():
    features = tiny_video_model().preprocess(random_clips(5))
    rows = FeatureRows(features)
    assert rows.count == 5 and rows.lengths is None
    assert torch.equal(rows.take(torch.tensor([2, 3]))["pixel_values"], features["pixel_values"][2:4])
    with pytest.raises(ValueError, match="only be taken in order"):
        rows.take(torch.tensor([3, 1]))


@pytest.mark.parametrize(
    "extra",
    [
        {"pixel_values": torch.zeros(3, 2)},  # patches, not rows, even if their count is that of the rows
        {"image_grid_thw": torch.ones(3, 3, dtype=torch.long)},
        {"video_grid_thw": torch.ones(3, 3, dtype=torch.long)},
        {"offsets": torch.tensor([0, 1, 2])},
        {"stray": torch.zeros(2, 4)},
        {"per_batch": torch.tensor(1.0)},
    ],
)
def test_whatever_may_not_hold_rows_keeps_the_order(extra):
    features = {"input_ids": torch.ones(3, 4), "attention_mask": torch.ones(3, 4), **extra}
    assert FeatureRows(features).lengths is None


def test_a_taken_mini_batch_can_be_written_into():
    model = tiny_text_model()
    features = text_columns(model, 4, 1)[0]
    before = {key: value.clone() for key, value in features.items() if isinstance(value, torch.Tensor)}
    for rows in (torch.tensor([0, 2]), torch.arange(4)):
        taken = FeatureRows(features).take(rows)
        taken["attention_mask"].zero_()
        taken["token_embeddings"] = torch.zeros(1)
    assert all(torch.equal(features[key], value) for key, value in before.items())
    assert "token_embeddings" not in features
