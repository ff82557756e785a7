"""Every form of input that sentence-transformers makes can be taken in any order, and trains as without a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import _create_minibatch as create_mini_batch
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening

from st_cached_extras.losses import CachedInfoNCELoss
from st_cached_extras.replay.axes import LayoutError
from st_cached_extras.replay.media import media_tokens_of
from st_cached_extras.replay.rows import FeatureRows
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    random_clips,
    relative_error,
    text_columns,
    tiny_text_model,
    tiny_two_tower_model,
    tiny_video_model,
    to_float64,
)
from st_cached_extras.testing.tiny_vlms import (
    clip,
    image,
    message,
    tiny_clip,
    tiny_idefics3,
    tiny_llava_onevision,
    tiny_qwen2_5_vl,
    tiny_qwen2_vl,
    tiny_qwen3_vl,
    tiny_rotary_model,
    tiny_siglip,
    tiny_vjepa2,
)

ROWS = 7
TEXTS = ["w1", "w2 w3 w4 w5 w6", "w7 w8", "w9 w10 w11 w12 w13 w14 w15", "w16 w17", "w18 w19 w20", "w21"]


# ------------------------------------------------------------------------------------------ the forms of input


def rows_of_images() -> list:
    """Rows with 0, 1 and 2 images of different sizes."""
    return [
        message("w1 w2", image(0)),
        message("w3"),
        message(image(1), "w4", image(2, 28, 84)),
        message(image(3, 28, 112)),
        message("w5 w6 w7"),
        message(image(4, 84, 28), image(5), "w8"),
        message("w9", image(6)),
    ]


def rows_of_images_and_clips() -> list:
    """Rows with 0, 1 and 2 clips of different lengths, with and without images and text."""
    return [
        message("w1 w2", clip(0)),
        message("w3"),
        message(clip(1, 6), "w4", clip(2, 2)),
        message(image(3, 28, 112), "w5"),
        message(image(4), clip(5, 4), "w6"),
        message(clip(6, 8)),
        message("w7 w8 w9 w10"),
    ]


def flattened(texts: list[str]) -> dict:
    """What ST makes of texts for models with variable-length attention."""
    tokens = [[int(word[1:]) for word in text.split()] for text in texts]
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True, return_position_ids=True)
    features = collate([{"input_ids": row} for row in tokens], return_tensors="pt")
    features.pop("labels")
    return {**features, "modality": "text"}


class VariableLengthEmbedder(nn.Module):
    """Stands for a model with variable-length attention: every token meets the mean of its own sequence alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions, self.mix = nn.Embedding(64, 8), nn.Embedding(64, 8), nn.Linear(16, 8)

    def forward(self, features: dict) -> dict:
        boundaries = features["cu_seq_lens_q"].tolist()
        assert features["cu_seq_lens_k"].tolist() == boundaries
        lengths = torch.tensor(boundaries).diff()
        assert features["max_length_q"] == features["max_length_k"] == int(lengths.max())
        assert torch.equal(features["seq_idx"][0].long(), torch.arange(len(lengths)).repeat_interleave(lengths))
        x = (self.words(features["input_ids"]) + self.positions(features["position_ids"]))[0]  # [tokens, 8]
        pooled = []
        for sequence in x.split(lengths.tolist()):
            mean = sequence.mean(dim=0, keepdim=True).expand_as(sequence)
            pooled.append(self.mix(torch.cat([sequence, mean], dim=1)).tanh().mean(dim=0))
        return {**features, "sentence_embedding": torch.stack(pooled)}


@dataclass
class Form:
    """One form of input: the model that takes it, and its columns, the first of text."""

    make_model: Callable[[], SentenceTransformer]
    make_columns: Callable[[SentenceTransformer], list[dict]]
    tolerance: float = 1e-5  # of models that compute parts in float32 whatever their dtype


def texts_and(rows: list) -> Callable[[SentenceTransformer], list[dict]]:
    return lambda model: [model.preprocess(TEXTS), model.preprocess(rows)]


def with_unequal_rates(model: SentenceTransformer) -> list[dict]:
    columns = texts_and(rows_of_images_and_clips())(model)
    videos = len(columns[1]["second_per_grid_ts"])
    columns[1]["second_per_grid_ts"] = torch.linspace(0.5, 3, videos)
    return columns


EXACT = 1e-10
FORMS = {
    "text": Form(tiny_text_model, lambda model: text_columns(model, ROWS), EXACT),
    "text, left padding": Form(
        lambda: tiny_text_model(padding_side="left"), lambda model: text_columns(model, ROWS), EXACT
    ),
    "text, prompt": Form(
        lambda: tiny_text_model(include_prompt=False),
        lambda model: text_columns(model, ROWS, prompt="w1 w2 w3 "),
        EXACT,
    ),
    "text, rotary, left padding": Form(tiny_rotary_model, lambda model: [model.preprocess(TEXTS)] * 2),
    "flattened text": Form(
        lambda: SentenceTransformer(modules=[VariableLengthEmbedder()], device="cpu").train(),
        lambda model: [flattened(TEXTS), flattened(TEXTS[::-1])],
        EXACT,
    ),
    "router of text and clips": Form(
        tiny_two_tower_model,
        lambda model: [model.preprocess(TEXTS, task="query"), model.preprocess(random_clips(ROWS))],
        EXACT,
    ),
    "VideoMAE": Form(
        tiny_video_model, lambda model: [model.preprocess(random_clips(ROWS, seed)) for seed in (0, 1)], EXACT
    ),
    "V-JEPA 2": Form(
        tiny_vjepa2, lambda model: [model.preprocess([clip(s + i) for i in range(ROWS)]) for s in (0, 9)], EXACT
    ),
    "CLIP": Form(tiny_clip, texts_and([image(seed) for seed in range(ROWS)]), EXACT),
    "SigLIP": Form(tiny_siglip, texts_and([image(seed) for seed in range(ROWS)]), EXACT),
    "Qwen2-VL, images": Form(tiny_qwen2_vl, texts_and(rows_of_images())),
    "Qwen2-VL, images and clips": Form(tiny_qwen2_vl, texts_and(rows_of_images_and_clips())),
    "Qwen2-VL, left padding": Form(lambda: tiny_qwen2_vl("left"), texts_and(rows_of_images_and_clips())),
    "Qwen2.5-VL, images": Form(tiny_qwen2_5_vl, texts_and(rows_of_images())),
    "Qwen2.5-VL, images and clips": Form(tiny_qwen2_5_vl, with_unequal_rates),
    "Qwen3-VL, images": Form(tiny_qwen3_vl, texts_and(rows_of_images())),
    "Qwen3-VL, images and clips": Form(tiny_qwen3_vl, texts_and(rows_of_images_and_clips())),
    "LLaVA-OneVision, images": Form(tiny_llava_onevision, texts_and(rows_of_images())),
    "LLaVA-OneVision, an image a row": Form(tiny_llava_onevision, texts_and([image(seed) for seed in range(ROWS)])),
    "Idefics3, images": Form(tiny_idefics3, texts_and(rows_of_images())),
}


@cache
def made(name: str) -> tuple[SentenceTransformer, list[dict]]:
    """Model and columns of a form in float64."""
    model = FORMS[name].make_model()
    return to_float64(model, FORMS[name].make_columns(model))


def embed(model: SentenceTransformer, features: dict) -> Tensor:
    with torch.no_grad():
        return model(copy_columns([features])[0])["sentence_embedding"]


# -------------------------------------------------------------------------------------------------- the claims


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sizes", [[3, 4], [1] * ROWS])
def test_rows_taken_in_any_order_have_the_embeddings_of_the_whole_batch(name, sizes):
    model, columns = made(name)
    for index, features in enumerate(columns):
        expected = embed(model, features)
        rows = FeatureRows(features)
        assert rows.count == ROWS
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(len(sizes) + index))
        for taken in order.split(sizes):
            found = embed(model, rows.take(taken))
            assert (found - expected[taken]).norm() <= FORMS[name].tolerance * expected[taken].norm()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kwargs", [{"mini_batch_size": 3}, {"mini_batch_size": 2, "sort_by_length": False}])
def test_gradients_are_those_without_a_cache(name, kwargs):
    model, columns = made(name)
    found = {}
    for make in (MultipleNegativesRankingLoss, lambda model: CachedInfoNCELoss(model, **kwargs)):
        model.zero_grad()
        value = make(model)(copy_columns(columns), None)
        value.backward()
        found[make] = value.detach(), gradients(model)
    (expected, expected_gradients), (value, value_gradients) = found.values()
    assert abs(value - expected) <= FORMS[name].tolerance * abs(expected)
    assert any(gradient.any() for gradient in expected_gradients.values())
    assert relative_error(value_gradients, expected_gradients) <= FORMS[name].tolerance


@pytest.mark.parametrize("name", [name for name in FORMS if "2.5-VL, images and clips" not in name])
def test_runs_of_rows_are_what_sentence_transformers_slices(name):
    for features in made(name)[1]:
        rows = FeatureRows(features)
        for begin, end in [(0, 1), (0, 3), (2, 5), (3, 4), (4, ROWS), (0, ROWS)]:
            expected = create_mini_batch(features, begin, end)
            found = rows.take(torch.arange(begin, end))
            # One per row with images, which ST takes for one per row.
            for features_of_run in (expected, found):
                features_of_run.pop("batch_num_images", None)
            # Rows that Idefics3's processor filled up with images have none.
            if "pixel_attention_mask" in expected and not expected["pixel_attention_mask"].any():
                del expected["pixel_attention_mask"], expected["pixel_values"]
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
                else:
                    assert found[key] == value, key


# ----------------------------------------------------------------------------------- seconds per temporal patch


def test_stock_slicing_loses_the_rates_of_clips_unless_every_row_has_one():
    model = tiny_qwen2_5_vl().eval()
    columns = [model.preprocess([message("w1"), message("w2", clip(0)), message(clip(1), clip(2)), message("w3")])] * 2
    features = columns[0]
    features["second_per_grid_ts"] = torch.tensor([0.5, 1.5, 2.5])
    expected = embed(model, features)
    # Row 1 is given the rate of the second clip, and the third row one of two.
    assert not torch.allclose(embed(model, create_mini_batch(features, 1, 2)), expected[1:2], atol=1e-3)
    with pytest.raises(StopIteration):
        embed(model, create_mini_batch(features, 2, 3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        CachedMultipleNegativesRankingLoss(model, mini_batch_size=1)(copy_columns(columns), None)
    rows = FeatureRows(features)
    for row in range(4):
        assert torch.allclose(embed(model, rows.take(torch.tensor([row]))), expected[row : row + 1], atol=1e-5)
    assert rows.take(torch.tensor([2, 1]))["second_per_grid_ts"].tolist() == [1.5, 2.5, 0.5]
    assert "second_per_grid_ts" not in rows.take(torch.tensor([3, 0]))


def test_rates_in_a_plain_list_are_cut_too():
    features = dict(made("Qwen2.5-VL, images and clips")[1][1])
    features["second_per_grid_ts"] = features["second_per_grid_ts"].tolist()
    taken = FeatureRows(features).take(torch.tensor([4, 2]))
    assert taken["second_per_grid_ts"] == [features["second_per_grid_ts"][index] for index in (3, 1, 2)]


# ----------------------------------------------------------------------------------------------------- lengths


def test_lengths_of_vision_language_inputs_count_visual_tokens_and_patches_come_beside():
    _, (texts, mixed) = made("Qwen2-VL, images and clips")
    assert FeatureRows(texts).patches is None
    rows = FeatureRows(mixed)
    assert rows.lengths.tolist() == mixed["attention_mask"].sum(dim=1).tolist()
    counts = {"image": mixed["num_images_per_sample"].tolist(), "video": mixed["num_videos_per_sample"].tolist()}
    expected = [0] * ROWS
    for kind, of_rows in counts.items():
        grids = iter(mixed[f"{kind}_grid_thw"].prod(dim=1).tolist())
        expected = [
            sum((next(grids) for _ in range(count)), own) for own, count in zip(expected, of_rows, strict=True)
        ]
    assert rows.patches.tolist() == expected and 0 in expected
    assert sum(expected) == len(mixed["pixel_values"]) + len(mixed["pixel_values_videos"])


def test_lengths_of_flattened_inputs_are_their_tokens():
    rows = FeatureRows(flattened(TEXTS))
    assert rows.lengths.tolist() == [len(text.split()) for text in TEXTS] and not rows.is_padded


def test_images_and_clips_alone_have_no_lengths():
    for name in ("VideoMAE", "V-JEPA 2", "CLIP", "SigLIP"):
        assert FeatureRows(made(name)[1][1]).lengths is None


# ---------------------------------------------------------------------------------------------- leading padding


def test_leading_padding_is_trimmed_on_request_and_rotary_embeddings_stay():
    model, (features, _) = made("text, rotary, left padding")
    expected = embed(model, features)
    trimmed, kept = FeatureRows(features, trim_left_padding=True), FeatureRows(features)
    width = features["input_ids"].shape[1]
    assert kept.lengths.tolist() == [width] * ROWS
    assert trimmed.lengths.tolist() == features["attention_mask"].sum(dim=1).tolist()
    for rows in trimmed.lengths.argsort().split(3):
        assert kept.take(rows)["input_ids"].shape == (len(rows), width)
        taken = trimmed.take(rows)
        assert taken["input_ids"].shape[1] == trimmed.lengths[rows].max()
        found = embed(model, taken)
        assert (found - expected[rows]).norm() <= 1e-5 * expected.norm()


def test_trimming_leading_padding_of_absolute_positions_changes_the_embeddings():
    model, (features, _) = made("text, left padding")
    shortest = features["attention_mask"].sum(dim=1).argmin(keepdim=True)
    found = embed(model, FeatureRows(features, trim_left_padding=True).take(shortest))
    assert not torch.allclose(found, embed(model, features)[shortest], atol=1e-3)


def test_leading_padding_of_vision_language_inputs_is_trimmed_too():
    model, (_, features) = made("Qwen2-VL, left padding")
    expected = embed(model, features)
    rows = FeatureRows(features, trim_left_padding=True)
    for taken in rows.lengths.argsort().split(2):
        found = embed(model, rows.take(taken))
        assert (found - expected[taken]).norm() <= 1e-5 * expected.norm()


# ------------------------------------------------------------------------------------- how many items a row has


def test_items_that_are_not_counted_are_refused_unless_every_row_surely_has_one():
    model = tiny_llava_onevision().eval()
    features = model.preprocess([clip(seed) for seed in range(3)])
    assert "num_videos_per_sample" not in features
    with pytest.raises(LayoutError, match=r"Add to the features the int64 tensor num_videos_per_sample \[3\]"):
        FeatureRows(features)
    expected, rows = embed(model, features), torch.tensor([2, 0])
    for informed in (
        FeatureRows(features, media_tokens=media_tokens_of(model)),
        FeatureRows({**features, "num_videos_per_sample": torch.ones(3, dtype=torch.long)}),
        FeatureRows({**features, "modality": ("text", "video")}),
    ):
        taken = {**informed.take(rows), "modality": "message"}
        assert torch.allclose(embed(model, taken), expected[rows], atol=1e-5)
    uneven = model.preprocess([message("w1", clip(0), clip(1)), message("w2"), message("w3", clip(2))])
    with pytest.raises(LayoutError, match="not how many each of the 3 rows has"):
        FeatureRows(uneven, media_tokens=media_tokens_of(model))
    counted = FeatureRows({**uneven, "num_videos_per_sample": torch.tensor([2, 0, 1])})
    expected = embed(model, uneven)
    assert torch.allclose(embed(model, counted.take(rows)), expected[rows], atol=1e-5)


def test_audio_clips_beside_text_are_taken_where_the_features_count_them():
    features = {
        "input_ids": torch.ones(3, 4, dtype=torch.long),
        "attention_mask": torch.ones(3, 4, dtype=torch.long),
        "input_features": torch.randn(3, 8, 20),
        "feature_attention_mask": torch.ones(3, 20),
    }
    with pytest.raises(LayoutError, match=r"The inputs hold audios beside text .* num_audios_per_sample"):
        FeatureRows(features)
    taken = FeatureRows({**features, "num_audios_per_sample": torch.tensor([2, 0, 1])}).take(torch.tensor([2, 0]))
    assert torch.equal(taken["input_features"], features["input_features"][[2, 0, 1]])
    assert "num_audios_per_sample" not in taken  # ST would hand it to the model


def test_counts_that_do_not_fit_the_media_are_refused():
    features = made("Qwen2-VL, images and clips")[1][1]
    wrong = {
        "num_images_per_sample": (
            torch.ones(ROWS, dtype=torch.long),
            "image_grid_thw holds 2 entries, but the 7 rows",
        ),
        "num_videos_per_sample": (torch.ones(3), r"number of videos of each of the 7 rows \[7\], got a tensor \[3\]"),
        "pixel_values": (features["pixel_values"][1:], "pixel_values must hold the 32 patches that image_grid_thw"),
        "video_grid_thw": (features["video_grid_thw"][:, :2], r"video_grid_thw must be \[items, 3\]"),
        "second_per_grid_ts": (torch.ones(3), "second_per_grid_ts holds 3 entries, but the 7 rows have 5 videos"),
        "mystery": (torch.ones(ROWS), r"an entry 'mystery' \(a tensor \[7\]\) that is not known"),
        "image_mystery": (torch.ones(2), "an entry 'image_mystery'"),
        "mm_token_type_ids": (torch.ones(2, 3), r"mm_token_type_ids must begin with the axes \[7, "),
    }
    for key, (value, match) in wrong.items():
        with pytest.raises(LayoutError, match=match):
            FeatureRows({**features, key: value})


def test_images_split_into_tiles_are_refused_and_one_a_row_leaves_one_reading():
    features = {
        "input_ids": torch.ones(2, 9, dtype=torch.long),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
        "pixel_values": torch.randn(3, 3, 4, 4),
        "num_images_per_sample": torch.tensor([1, 1]),
    }
    with pytest.raises(LayoutError, match="pixel_values holds 3 entries, but the 2 rows have 2 images"):
        FeatureRows(features)
    whole = {**features, "pixel_values": torch.randn(2, 1, 3, 4, 4), "image_mystery": torch.randn(2, 5)}
    taken = FeatureRows(whole).take(torch.tensor([1]))
    assert torch.equal(taken["pixel_values"], whole["pixel_values"][1:])
    assert torch.equal(taken["image_mystery"], whole["image_mystery"][1:])
    either = {**features, "pixel_values": torch.randn(2, 2, 3, 4, 4), "num_images_per_sample": torch.tensor([2, 0])}
    with pytest.raises(LayoutError, match="its first axis may be rows or images"):
        FeatureRows(either)


def test_a_channel_axis_as_wide_as_the_text_is_not_trimmed():
    features = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 0, 0], [1, 1, 0]]),
        "pixel_values": torch.randn(2, 3, 4, 4),
        "modality": ("image", "text"),
    }
    assert create_mini_batch(features, 0, 2)["pixel_values"].shape == (2, 2, 4, 4)  # as ST does
    taken = FeatureRows(features).take(torch.tensor([1, 0]))
    assert taken["input_ids"].shape == (2, 2) and taken["pixel_values"].shape == (2, 3, 4, 4)


# -------------------------------------------------------------------------------------------- flattened inputs


def test_flattened_inputs_with_what_is_not_known_are_refused():
    features = flattened(TEXTS)
    total = features["input_ids"].shape[1]
    wrong = {
        "mystery": (torch.ones(1, total), r"an entry 'mystery' \(a tensor \[1, 21\]\) that their collator"),
        "input_ids": (torch.ones(1, 5), "input_ids of flattened inputs must hold the 21 tokens"),
        "cu_seq_lens_k": (torch.tensor([0, total]), "cu_seq_lens_k differs from cu_seq_lens_q"),
        "cu_seq_lens_q": (torch.tensor([0]), "cu_seq_lens_k differs"),
    }
    assert total == 21
    for key, (value, match) in wrong.items():
        with pytest.raises(LayoutError, match=match):
            FeatureRows({**features, key: value})
