"""Models are loaded, checked for what they take, cut and adapted, or refused with the way out."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer

from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.models import keep_layers, knows_time, load_model, router_mapping
from st_cached_extras.testing.tiny_models import tiny_text_model, tiny_two_tower_model, tiny_video_model
from st_cached_extras.testing.tiny_vlms import tiny_clip, tiny_qwen3_vl


@pytest.fixture
def folder(tmp_path) -> str:
    tiny_text_model().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    return str(tmp_path / "model")


def test_a_model_that_is_not_there_or_not_whole_is_named(folder, tmp_path):
    with pytest.raises(UsageError, match="--model 'nobody/nothing' cannot be loaded"):
        load_model("nobody/nothing")
    (tmp_path / "model" / "config.json").write_text("{ this is no JSON")
    with pytest.raises(UsageError, match=r"--model '.*model' cannot be loaded: .*JSON"):
        load_model(folder)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "bertt"}))
    with pytest.raises(UsageError, match=r"cannot be loaded: .*bertt"):
        load_model(folder)


def test_a_model_that_does_not_take_videos_is_refused(folder):
    assert load_model(folder).encode("w1").shape == (16,)
    with pytest.raises(UsageError, match="does not take video, but text"):
        load_model(folder, takes="video")
    with pytest.raises(UsageError, match="does not take image, but text"):
        load_model(folder, takes="image")


def test_layers_are_cut_and_stay_cut(folder, tmp_path):
    model = load_model(folder)
    keep_layers(model, 1)
    model.save_pretrained(str(tmp_path / "cut"), create_model_card=False)
    cut = SentenceTransformer(str(tmp_path / "cut"), device="cpu")
    assert torch.equal(cut.encode("w1 w2", convert_to_tensor=True), model.encode("w1 w2", convert_to_tensor=True))
    assert len(cut[0].auto_model.encoder.layer) == 1
    for count in (0, 2):
        with pytest.raises(UsageError, match=f"--num_layers must be 1 to 1, the layers of the model, got {count}"):
            keep_layers(model, count)
    with pytest.raises(UsageError, match=r"--num_layers 1: .*2 such lists"):
        keep_layers(tiny_two_tower_model(), 1)


def test_only_vision_language_models_are_told_the_time():
    assert knows_time(tiny_qwen3_vl())
    assert not any(map(knows_time, (tiny_video_model(), tiny_two_tower_model(), tiny_clip())))


def test_a_router_is_told_which_column_goes_where():
    rows = Dataset.from_dict({"caption": ["a"], "video": ["b"], "negative_1": ["c"], "label": [1]})
    mapping = {"caption": "query", "video": "document", "negative_1": "document"}
    assert router_mapping(tiny_two_tower_model(), "caption", rows) == mapping
    assert router_mapping(tiny_two_tower_model(), "caption", DatasetDict(one=rows)) == mapping
    assert router_mapping(tiny_text_model(), "caption", rows) == {}
