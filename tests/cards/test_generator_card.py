"""The generator's card and pictures are written whole, and say what was given."""

from __future__ import annotations

import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image

from st_cached_extras.cards import (
    contact_sheet_figure,
    generator_curves_figure,
    generator_figures,
    save_generator_card,
)

CAPTIONS = ["a red circle", "a caption of many words that has to be broken into several lines and then cut off"]


def clips(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (2, 8, 16, 16, 3), dtype=np.uint8)


def test_a_contact_sheet_has_a_row_per_caption_and_a_column_per_heading(tmp_path):
    small = contact_sheet_figure(tmp_path / "new" / "a.png", CAPTIONS, {"step 0": clips(0)})
    wide = contact_sheet_figure(tmp_path / "b.png", CAPTIONS, {"step 0": clips(0), "real": clips(1)})
    with Image.open(small) as one, Image.open(wide) as two:
        assert two.width > 1.4 * one.width
        assert two.height == one.height
        assert len(set(two.convert("L").tobytes())) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.png", "new"]


def test_a_sheet_whose_clips_are_fewer_than_captions_is_not_half_written(tmp_path):
    with pytest.raises(IndexError):
        contact_sheet_figure(tmp_path / "a.png", [*CAPTIONS, "third"], {"step 0": clips(0)})
    assert not list(tmp_path.iterdir())


def test_curves_are_drawn(tmp_path):
    raw = [{"a": 1 / (step + 1), "b": 2 / (step + 1)} for step in range(20)]
    scores = {
        step: {"mmd/a": 0.1, "mmd/b": 0.1, "sliced_wasserstein": 1.0 / (step + 1), "read/shape": 0.5, "read/all": 0.4}
        for step in (0, 10, 20)
    }
    path = generator_curves_figure(tmp_path / "curves.png", raw, {"a": 0.01, "b": 0.02}, scores, 0.05)
    with Image.open(path) as picture:
        assert picture.width >= 1000


def test_every_encoder_has_its_curve_however_many_there_are(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(generator_figures, "save_png", lambda figure, path: drawn.append(figure))
    names = [f"encoder {i}" for i in range(9)]
    scores = {
        step: {f"mmd/{name}": 0.1 for name in names} | {"sliced_wasserstein": 1.0, "read/shape": 0.5}
        for step in (0, 5)
    }
    raw = [dict.fromkeys(names, 0.2)] * 5
    generator_curves_figure(tmp_path / "a.png", raw, dict.fromkeys(names, 0.01), scores, 0.05)
    labels = [line.get_label() for line in drawn[0].axes[0].lines]
    assert [label for label in labels if label.startswith("encoder")] == names


def card_of(folder, **changes):
    arguments = {
        "name": "A generator",
        "summary": "It draws.",
        "scores": [{"Measure": "MMD²", "After": 0.125}],
        "figures": [],
        "run": {"Seed": 3},
        "command": "python train.py --seed 3",
        "usage": "python sample.py",
        "limits": ["It knows little."],
    }
    return save_generator_card(folder, **{**arguments, **changes})


def test_the_card_is_one_that_the_hub_can_read_and_says_what_was_given(tmp_path):
    (tmp_path / "clips.png").write_bytes(b"")
    card = ModelCard.load(card_of(tmp_path, figures=[("clips.png", "Some clips.")], license="apache-2.0"))
    assert card.data.pipeline_tag == "text-to-video"
    assert card.data.library_name == "st-cached-extras"
    assert card.data.license == "apache-2.0"
    for text in (
        "# A generator",
        "It draws.",
        "| MMD² | 0.125 |",
        "![Some clips.](clips.png)",
        "- **Seed:** 3",
        "python train.py --seed 3",
        "python sample.py",
        "- It knows little.",
        "- torch: ",
    ):
        assert text in card.text
    assert not list(tmp_path.glob("*.tmp"))


def test_a_figure_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"figures names 'clips.png', which is not in"):
        card_of(tmp_path, figures=[("clips.png", "")])
    assert not list(tmp_path.iterdir())
