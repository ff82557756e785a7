"""The image recipe trains on the embedded data and on others, goes on where it was killed, and refuses in one line."""

from __future__ import annotations

import re

import datasets
import numpy as np
import pytest
from datasets import Dataset, Image
from sentence_transformers import SentenceTransformer

from st_cached_extras.data.still_shapes import still_shapes
from st_cached_extras.testing.tiny_vlms import tiny_clip, tiny_idefics3, tiny_qwen2_vl, tiny_siglip
from tests.training_scripts.recipe_runs import (
    assert_a_run_that_was_killed_ends_as_one_that_was_not,
    refused,
    run_recipe,
)

SCRIPT = "train_image_text_embedder"
BATCHES = ("--per_device_train_batch_size", "8", "--mini_batch_size", "4")
SMALL = (*BATCHES, "--max_steps", "2", "--train_rows", "24", "--eval_rows", "6")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def two_images() -> list:
    return [row["image"] for row in still_shapes("test", 2)]


def test_a_killed_run_goes_on_and_plain_sentence_transformers_loads_what_it_ends_with(tmp_path, monkeypatch, capsys):
    model = assert_a_run_that_was_killed_ends_as_one_that_was_not(
        monkeypatch,
        capsys,
        tmp_path,
        SCRIPT,
        *(*BATCHES, "--train_rows", "24", "--eval_rows", "6"),
        encode=lambda model: model.encode_document(two_images()),
    )
    assert model.encode_query("a small red circle at the top left").shape == (96,)
    card = (tmp_path / "whole" / "final" / "README.md").read_text()
    assert re.search(r"\| novel \| caption to image \| R@5 \| 0\.833 \|", card)
    assert "24 images" in card and "(retrieval.png)" in card


@pytest.mark.parametrize("make", [tiny_clip, tiny_siglip, tiny_qwen2_vl, tiny_idefics3])
def test_two_towers_and_single_models_of_text_and_images_train(make, tmp_path, monkeypatch):
    make().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    out = tmp_path / "out"
    run_recipe(
        monkeypatch,
        SCRIPT,
        *("--model", str(tmp_path / "model"), "--learning_rate", "1e-2", "--loss", "symmetric"),
        *(*SMALL, "--warmup_steps", "0", "--output_dir", str(out)),
    )
    before, after = (
        SentenceTransformer(str(path), device="cpu").encode(two_images())
        for path in (tmp_path / "model", out / "final")
    )
    assert np.isfinite(after).all() and not np.allclose(before, after)


def test_a_folder_of_images_with_a_captions_file_trains(tmp_path, monkeypatch, capsys):
    lines = ["picture,sentence"]
    (tmp_path / "pictures").mkdir()
    for index, row in enumerate(still_shapes("train", 30)):
        row["image"].save(tmp_path / "pictures" / f"{index}.png")
        lines.append(f"pictures/{index}.png,{row['caption']}")
    (tmp_path / "pictures" / "3.png").write_bytes(b"no picture")
    (tmp_path / "captions.csv").write_text("\n".join([*lines, "pictures/missing.png,a small red circle"]))
    data = ("--dataset", str(tmp_path / "captions.csv"), "--text_column", "sentence", "--image_column", "picture")
    out = tmp_path / "out"
    run_recipe(monkeypatch, SCRIPT, *data, *SMALL, "--broken", "skip", "--max_broken", "2", "--output_dir", str(out))
    assert re.search(r"held out +caption to image", capsys.readouterr().out)
    line = refused(monkeypatch, capsys, tmp_path, SCRIPT, *data, *SMALL)
    assert re.search(r"Row \d+ of the column 'image' cannot be read: .*--broken skip", line)


def test_what_cannot_train_is_refused_in_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    images = still_shapes("test", 8)
    images.add_column("number", range(8)).to_parquet(str(tmp_path / "images.parquet"))
    corrupt = Dataset.from_dict({"image": [b"no image"] * 8, "caption": images["caption"]})
    corrupt.cast_column("image", Image(decode=False)).to_parquet(str(tmp_path / "corrupt.parquet"))

    def line(file: str, *arguments: str) -> str:
        return refused(monkeypatch, capsys, tmp_path, SCRIPT, "--dataset", str(tmp_path / file), *arguments)

    assert "--text_column number must name a column of text" in line("images.parquet", "--text_column", "number")
    assert "--image_column caption --" not in line("images.parquet", "--image_column", "caption")
    assert "the columns are ['image', 'caption', 'number']" in line("images.parquet", "--image_column", "picture")
    assert re.search(r"None of the \d files in the column 'image'", line("corrupt.parquet", "--broken", "skip"))
    assert "--lora_rank needs --model" in refused(monkeypatch, capsys, tmp_path, SCRIPT, "--lora_rank", "4")
