"""The text recipe trains on the embedded data and on others, goes on where it was killed, and refuses in one line."""

from __future__ import annotations

import re

import datasets
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model
from tests.training_scripts.recipe_runs import (
    assert_a_run_that_was_killed_ends_as_one_that_was_not,
    refused,
    run_recipe,
)

SCRIPT = "train_text_embedder"
SMALL = ("--max_steps", "2", "--per_device_train_batch_size", "16", "--mini_batch_size", "8")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> dict[str, str]:
    """A tiny model and files of pairs."""
    folder = tmp_path_factory.mktemp("material")
    tiny_text_model(layers=3).save_pretrained(str(folder / "model"), create_model_card=False)
    terms = list(dict.fromkeys(random_sentences(120, 1)))
    rows = {
        "id": range(len(terms)),
        "term": terms,
        "gloss": random_sentences(len(terms), 2),
        "wrong": random_sentences(len(terms), 3),
        "score": [0.1 * (i % 10) for i in range(len(terms))],
    }
    Dataset.from_dict({k: list(v) for k, v in rows.items()}).to_parquet(str(folder / "pairs.parquet"))
    return {"model": str(folder / "model"), "pairs": str(folder / "pairs.parquet"), "folder": str(folder)}


def own(material: dict[str, str], *columns: str) -> tuple[str, ...]:
    return ("--model", material["model"], "--dataset", material["pairs"], "--columns", *columns)


def test_the_embedded_data_train_the_default_model_on_its_first_layers(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend("training_scripts")
    import text_pairs

    monkeypatch.setattr(text_pairs, "PACKAGES", ("accelerate",))
    out = tmp_path / "out"
    run_recipe(monkeypatch, SCRIPT, *SMALL, "--train_rows", "64", "--eval_rows", "20", "--output_dir", str(out))
    assert re.search(r"held out +query to answer +R@1 +0\.050 +[01]\.\d{3} .* +[01]\.\d{3}", capsys.readouterr().out)
    model = SentenceTransformer(str(out / "final"), device="cpu")
    assert len(model[0].auto_model.encoder.layer) == 2
    card = (out / "final" / "README.md").read_text()
    assert "64 pairs" in card and "train_text_embedder.py" in card and "CachedInfoNCELoss" in card


def test_without_installed_weights_a_tiny_encoder_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("training_scripts")
    import text_pairs
    import train_text_embedder

    monkeypatch.setattr(text_pairs, "PACKAGES", ("accelerate",))
    monkeypatch.setattr(train_text_embedder, "is_installed", lambda: False)
    out = tmp_path / "out"
    run_recipe(monkeypatch, SCRIPT, *SMALL, "--train_rows", "64", "--eval_rows", "20", "--output_dir", str(out))
    assert SentenceTransformer(str(out / "final"), device="cpu").encode("prepare the model").shape == (96,)


def test_a_killed_run_goes_on_and_ends_as_one_that_was_not(material, tmp_path, monkeypatch, capsys):
    assert_a_run_that_was_killed_ends_as_one_that_was_not(
        monkeypatch,
        capsys,
        tmp_path,
        SCRIPT,
        *own(material, "term,gloss"),
        *(
            "--per_device_train_batch_size",
            "16",
            "--learning_rate",
            "1e-2",
            "--loss",
            "sigmoid",
        ),  # which has parameters
        encode=lambda model: model.encode(["w1 w2", "w3"]),
    )


def test_adapters_go_on_where_they_were_killed(material, tmp_path, monkeypatch, capsys):
    model = assert_a_run_that_was_killed_ends_as_one_that_was_not(
        monkeypatch,
        capsys,
        tmp_path,
        SCRIPT,
        *own(material, "term,gloss"),
        *("--per_device_train_batch_size", "16", "--learning_rate", "1e-2", "--lora_rank", "2", "--num_layers", "1"),
        encode=lambda model: model.encode(["w1 w2", "w3"]),
    )
    assert len(model[0].auto_model.encoder.layer) == 1
    assert not any("lora" in name for name in model.state_dict())


def test_several_datasets_train_with_a_loss_each_and_the_best_model_is_kept(material, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    (tmp_path / "run.yaml").write_text(
        f"model: {material['model']}\n"
        f"dataset: [{material['pairs']}, {material['pairs']}]\n"
        "columns: ['term,gloss,wrong', 'term,gloss,score']\n"
        "loss: [infonce, CoSENTLoss]\n"
        "num_layers: 2\nmatryoshka_dims: [16, 8]\neval_strategy: steps\neval_steps: 1\nearly_stopping_patience: 3\n"
    )
    run_recipe(monkeypatch, SCRIPT, "--config", str(tmp_path / "run.yaml"), *SMALL, "--output_dir", str(out))
    printed = capsys.readouterr().out
    assert re.search(r"pairs held out +query to answer", printed)
    assert re.search(r"pairs 2 held out +query to answer", printed)
    card = (out / "final" / "README.md").read_text()
    assert "MatryoshkaLoss" in card and "load_best_model_at_end" in card
    assert (out / "checkpoint-1").is_dir()


def test_a_stream_trains_after_its_first_rows_are_kept_to_evaluate(material, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    stream = ("--streaming", "true", "--eval_rows", "10")
    run_recipe(monkeypatch, SCRIPT, *own(material, "term,gloss"), *stream, *SMALL, "--output_dir", str(out))
    assert re.search(r"first 10 +query to answer +R@1 +0\.100", capsys.readouterr().out)


def test_what_cannot_train_is_refused_in_one_line_and_nothing_is_written(material, tmp_path, monkeypatch, capsys):
    def line(*arguments: str) -> str:
        return refused(monkeypatch, capsys, tmp_path, SCRIPT, *arguments)

    def without(*columns: str) -> str:
        return line(*own(material, *columns))

    assert "--columns names the column 'meaning', but the columns are ['id', 'term', 'gloss'" in without(
        "term,meaning"
    )
    assert "--columns id must name a column of text, but it holds int64 values" in without("id,term")
    assert "names fewer than two columns of text" in without("term")
    assert "takes a column twice" in without("term,term")
    assert "cannot be loaded" in line("--dataset", "nobody/nothing")
    (tmp_path / "empty.csv").write_text("term,gloss\n")
    assert "it has no rows" in line("--dataset", str(tmp_path / "empty.csv"))
    assert "--model 'nobody/nothing' cannot be loaded" in line(
        "--model", "nobody/nothing", "--dataset", material["pairs"], "--columns", "term,gloss"
    )
    (tmp_path / "broken.yaml").write_text("learning_rate: [")
    assert "broken.yaml' cannot be read" in line("--config", str(tmp_path / "broken.yaml"))
    assert "There is no loss 'magic'" in line(*own(material, "term,gloss"), "--loss", "magic")
    assert "Did you mean --learning_rate?" in line("--learn_rate", "1")
    assert "--num_layers must be 1 to 3" in line(*own(material, "term,gloss"), "--num_layers", "9")
    assert "there is no checkpoint in" in line("--resume_from_checkpoint", "last")
    assert "--early_stopping_patience needs --eval_strategy" in line("--early_stopping_patience", "1")
    assert "--streaming needs --max_steps" in line(*own(material, "term,gloss"), "--streaming", "true")
