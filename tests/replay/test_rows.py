"""Any rows are taken, padding trimmed; what is not known for sure is refused, and no axis guessed by its size."""

import numpy as np
import pytest
import torch

from st_cached_extras.replay.axes import LayoutError
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
    assert rows.count == 3 and rows.lengths.tolist() == [3, 1, 4]
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
    assert rows.lengths.tolist() == [3, 3]
    assert rows.take(torch.tensor([0]))["input_ids"].tolist() == [[0, 0, 1]]


def test_a_row_without_active_tokens_keeps_its_width():
    features = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[0, 0, 0], [1, 1, 0]])}
    rows = FeatureRows(features)
    assert rows.take(torch.tensor([0]))["input_ids"].shape == (1, 3)
    assert rows.take(torch.tensor([0, 1]))["input_ids"].shape == (2, 2)


def test_a_row_without_active_tokens_counts_as_the_whole_width():
    features = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[0, 0, 0], [1, 1, 0]])}
    assert FeatureRows(features).lengths.tolist() == [3, 2]
    assert FeatureRows(features, trim_left_padding=True).lengths.tolist() == [3, 2]


def test_clips_are_taken_in_any_order():
    features = tiny_video_model().preprocess(random_clips(5))
    rows = FeatureRows(features)
    assert rows.count == 5 and rows.lengths is None
    for taken in ([2, 3], [3, 1], [4]):
        assert torch.equal(rows.take(torch.tensor(taken))["pixel_values"], features["pixel_values"][taken])


def test_masked_positions_of_a_query_expansion_are_kept():
    features = {
        "input_ids": torch.ones(2, 4),
        "attention_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]),
        "query_expansion_positions": torch.tensor([[False, True, True, False], [False] * 4]),
    }
    rows = FeatureRows(features)
    assert rows.lengths.tolist() == [3, 2]
    assert rows.take(torch.tensor([1, 0]))["input_ids"].shape == (2, 3)


def test_settings_of_the_batch_are_handed_on_whole():
    settings = {"modality": ("image", "text"), "task": "query", "flag": True, "nothing": None, "scale": 2.0}
    settings["per_batch"] = torch.tensor(1.0)
    settings["prompt_length"] = torch.full((3,), 2)
    features = {"input_ids": torch.ones(3, 4), "attention_mask": torch.ones(3, 4), **settings}
    taken = FeatureRows(features).take(torch.tensor([2]))
    assert all(taken[key] is value for key, value in settings.items())


def test_an_unknown_entry_of_text_is_over_rows_and_forbids_to_trim_if_it_may_be_over_tokens():
    features = {
        "input_ids": torch.ones(3, 4),
        "attention_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]),
        "weight": torch.arange(3.0),
        "profile": torch.randn(3, 5),
    }
    taken = FeatureRows(features).take(torch.tensor([2, 0]))
    assert taken["weight"].tolist() == [2, 0] and torch.equal(taken["profile"], features["profile"][[2, 0]])
    assert taken["input_ids"].shape == (2, 1)
    features["profile"] = torch.randn(3, 4)
    rows = FeatureRows(features)
    taken = rows.take(torch.tensor([2, 0]))
    assert torch.equal(taken["profile"], features["profile"][[2, 0]])
    assert taken["input_ids"].shape == (2, 4) and rows.lengths.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        # Patches, not rows, even if their count is that of the rows.
        ({"pixel_values": torch.zeros(3, 2)}, r"images beside text \(pixel_values: a tensor \[3, 2\]\)"),
        ({"image_grid_thw": torch.ones(3, 3, dtype=torch.long)}, "num_images_per_sample"),
        ({"video_grid_thw": torch.ones(3, 3, dtype=torch.long)}, "num_videos_per_sample"),
        ({"offsets": torch.tensor([0, 1, 2])}, r"an entry 'offsets' \(a tensor \[3\]\) that is not known"),
        ({"stray": torch.zeros(2, 4)}, r"'stray' \(a tensor \[2, 4\]\) that is not known, and there are 3 rows"),
        ({"position_ids": torch.zeros(3, 3, 4)}, r"position_ids must begin with the axes \[3, 4\]"),
        ({"input_ids": torch.zeros(3)}, "input_ids must be padded to rows x tokens"),
    ],
)
def test_whatever_may_not_hold_rows_is_refused(extra, match):
    features = {"input_ids": torch.ones(3, 4), "attention_mask": torch.ones(3, 4), **extra}
    with pytest.raises(LayoutError, match=match):
        FeatureRows(features)


@pytest.mark.parametrize("value", [[1, 2, 3], np.zeros(3)])
def test_lists_and_arrays_are_refused(value):
    features = {"input_ids": torch.ones(3, 4), "attention_mask": torch.ones(3, 4), "spans": value}
    with pytest.raises(TypeError, match=f"an entry 'spans' of type {type(value).__name__}"):
        FeatureRows(features)


def test_images_alone_must_all_be_over_rows():
    with pytest.raises(LayoutError, match=r"Without input_ids every entry .* 3 rows, but image_grid_thw"):
        FeatureRows({"pixel_values": torch.zeros(3, 5), "image_grid_thw": torch.ones(3, 3)})
    with pytest.raises(LayoutError, match=r"image_sizes is a tensor \[2, 2\]"):
        FeatureRows({"pixel_values": torch.zeros(3, 5), "image_sizes": torch.ones(2, 2)})
    with pytest.raises(LayoutError, match="no tensor with rows, only 'modality'"):
        FeatureRows({"modality": "text"})


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
