"""A card says what was done, asks no one for it, and leaks nothing; a figure is whole or absent."""

from __future__ import annotations

import builtins
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base import model_card as st_model_card
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

from st_cached_extras.cards import ReplayModelCardData, Retrieved, command_line, retrieval_figure
from st_cached_extras.cards.model_card import is_local, markdown_table


def tiny_model(folder: Path, **kwargs) -> SentenceTransformer:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "a", "red", "circle"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    config = DistilBertConfig(vocab_size=5, dim=8, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=16)
    DistilBertModel(config).save_pretrained(folder)
    transformer = Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, Pooling(8, "mean")], device="cpu", **kwargs)


@pytest.fixture
def no_hub(monkeypatch):
    """Fails the test at any question to the Hub that a card might ask, even one whose failure would be swallowed."""
    asked = []
    monkeypatch.setattr(st_model_card, "get_model_info", lambda *a, **k: asked.append(a))
    monkeypatch.setattr(st_model_card, "get_dataset_info", lambda *a, **k: asked.append(a))
    yield
    assert asked == []


@pytest.fixture
def card(tmp_path) -> ReplayModelCardData:
    picture = tmp_path / "curve.png"
    Image.new("RGB", (4, 4)).save(picture)
    return ReplayModelCardData(
        model_name="Finder of circles",
        summary="Finds circles.",
        data={"train": "448 clips, fingerprint `abc`"},
        run={"Batch": 128, "Seed": 3},
        scores=[{"Split": "novel", "R@5": 0.96875, "Chance": 0.078}],
        figures=[(str(picture), "Recall over k.")],
        command="python train.py --seed 3",
        limits=["Knows three words."],
    )


def test_a_saved_card_says_what_was_done(tmp_path, card, no_hub):
    tiny_model(tmp_path / "base", model_card_data=card).save_pretrained(str(tmp_path / "final"))
    text = (tmp_path / "final" / "README.md").read_text()
    for expected in (
        "# Finder of circles",
        "Finds circles.",
        "| Split | R@5 | Chance |",
        "| novel | 0.969 | 0.078 |",
        "![Recall over k.](curve.png)",
        "pip install st-cached-extras",
        "- Knows three words.",
        "python train.py --seed 3",
        "- **Batch:** 128",
        "- **Seed:** 3",
        "- **train:** 448 clips, fingerprint `abc`",
    ):
        assert expected in text
    assert re.search(r"^- st_cached_extras: \d", text, re.MULTILINE)
    assert re.search(r"^- sentence_transformers: 6", text, re.MULTILINE)
    assert "{{" not in text
    assert "{%" not in text


def test_its_metadata_is_valid_and_tagged(tmp_path, card, no_hub):
    tiny_model(tmp_path / "base", model_card_data=card).save_pretrained(str(tmp_path / "final"))
    metadata = yaml.safe_load((tmp_path / "final" / "README.md").read_text().split("---")[1])
    assert "st-cached-extras" in metadata["tags"]
    assert metadata["library_name"] == "sentence-transformers"


def test_every_save_gets_its_own_copy_of_the_figures(tmp_path, card, no_hub):
    model = tiny_model(tmp_path / "base", model_card_data=card)
    for name in ("one", "two"):
        model.save_pretrained(str(tmp_path / name))
        assert (tmp_path / name / "curve.png").read_bytes() == (tmp_path / "curve.png").read_bytes()


def test_an_empty_card_renders_and_claims_no_lack_of_limits(tmp_path, no_hub):
    model = tiny_model(tmp_path / "base", model_card_data=ReplayModelCardData())
    model.save_pretrained(str(tmp_path / "final"))
    text = (tmp_path / "final" / "README.md").read_text()
    assert "does not mean that it has none" in text
    assert "## Results" not in text


def test_a_model_from_a_folder_names_no_base_model_and_asks_for_none(tmp_path, card, no_hub):
    # Such a name makes the plain guess ask the Hub for "my/model_base", "my_model/base" and more.
    model = tiny_model(tmp_path / "my_model_base", model_card_data=card)
    model.save_pretrained(str(tmp_path / "final"))
    assert model.model_card_data.base_model is None


@pytest.mark.parametrize(
    "name, local",
    [
        ("owner/name", False),
        ("name", False),
        ("", True),
        ("/tmp/x/y", True),
        ("./name", True),
        ("~/name", True),
        ("output/video/final", True),
    ],
)
def test_local_names_are_told_from_ids(name, local):
    assert is_local(name) == local


def test_clips_among_the_examples_are_saved_and_read_in_the_snippet(tmp_path, card, no_hub):
    model = tiny_model(tmp_path / "base", model_card_data=card)
    clip = np.full((4, 16, 16, 3), 90, np.uint8)
    card.usage_examples = ["a red circle", clip]
    card.train_datasets = [
        {"columns": ["video"], "examples": {"video": [clip]}, "_example_columns": ["video"], "loss": {"fullname": "L"}}
    ]
    model.save_pretrained(str(tmp_path / "final"))
    text = (tmp_path / "final" / "README.md").read_text()
    assert (tmp_path / "final" / "assets" / "video_0.mp4").stat().st_size > 0
    assert 'read_video(f"{folder}/{file}", num_frames=4)' in text
    assert 'pip install "st-cached-extras[video]"' in text
    assert "video of 4 frames, 16x16" in text
    assert "[[[" not in text  # no array is printed


def test_the_command_line_hides_secrets_and_folders():
    argv = [
        "/home/me/private/train.py",
        "--seed",
        "3",
        "--hub_token",
        "hf_secret",
        "--push_to_hub_token=hf_more",
        "a b",
    ]
    assert command_line(argv) == "python train.py --seed 3 --hub_token '***' '--push_to_hub_token=***' 'a b'"


def test_rows_of_other_columns_are_refused():
    with pytest.raises(ValueError, match=r"\['Split', 'R@5'\].*\['Split'\]"):
        markdown_table([{"Split": "test", "R@5": 0.5}, {"Split": "novel"}])


def clips(*levels: int) -> list[np.ndarray]:
    return [np.full((8, 56, 56, 3), level, np.uint8) for level in levels]


def retrieved(rows: int = 8) -> list[Retrieved]:
    return [
        Retrieved(f"caption number {row}", clips(40, 120, 200), [row % 2 == 0, row % 2 == 1, False])
        for row in range(rows)
    ]


CHANCE = np.arange(1, 21) / 64


def ranks(best: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(64), np.arange(64) % best


def test_the_figure_frames_right_clips_in_green_and_only_those(tmp_path):
    path = retrieval_figure(tmp_path / "sub" / "figure.png", retrieved(), {"novel": ranks(8)}, {"novel": CHANCE})
    picture = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert 1300 <= picture.shape[1] <= 1500
    green = np.abs(picture - (44, 162, 95)).sum(axis=-1) < 12
    columns = np.flatnonzero(green.any(axis=0))
    # Right clips stand in the first and second column of clips, four each: nothing green to their right.
    assert green.sum() > 8 * 300
    assert columns.max() < 0.56 * picture.shape[1]
    wrong = retrieval_figure(
        tmp_path / "wrong.png",
        [row._replace(right=[False] * 3) for row in retrieved()],
        {"novel": ranks(8)},
        {"novel": CHANCE},
    )
    picture = np.asarray(Image.open(wrong).convert("RGB")).astype(int)
    assert (np.abs(picture - (44, 162, 95)).sum(axis=-1) < 12).sum() == 0


def test_one_caption_one_clip_and_two_set_sizes_draw(tmp_path):
    one = [Retrieved("a", clips(10)[:1], [True])]
    path = retrieval_figure(tmp_path / "f.png", one, {"a": ranks(3), "b": ranks(9)}, {"a": CHANCE[:5], "b": CHANCE})
    assert path.stat().st_size > 5000


def test_a_failed_save_leaves_the_old_figure_and_no_remains(tmp_path, monkeypatch):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def fails(self, file, **kwargs):
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        retrieval_figure(path, retrieved(2), {"novel": ranks(8)}, {"novel": CHANCE})
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


def test_pyplot_is_never_imported(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    imported = builtins.__import__

    def no_pyplot(name, *args, **kwargs):
        assert name != "matplotlib.pyplot"
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pyplot)
    retrieval_figure(tmp_path / "f.png", retrieved(1), {"novel": ranks(8)}, {"novel": CHANCE})
