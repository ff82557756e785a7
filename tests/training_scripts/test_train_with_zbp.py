"""The script trains every arm through the simulated hardware, and leaves a report, a figure, a card and a model."""

import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Normalize

from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model

SCRIPTS = Path(__file__).parents[2] / "training_scripts"
SCRIPT = SCRIPTS / "train_with_zbp.py"


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> list[str]:
    """A tiny model and pairs of texts on this disk, as arguments."""
    folder = tmp_path_factory.mktemp("material")
    tiny_text_model(layers=3).save_pretrained(str(folder / "model"), create_model_card=False)
    texts = list(dict.fromkeys(random_sentences(160, 1)))
    pairs = Dataset.from_dict({"id": range(len(texts)), "term": texts, "gloss": random_sentences(len(texts), 2)})
    pairs.to_parquet(str(folder / "pairs.parquet"))
    return [
        *("--model", str(folder / "model"), "--dataset", str(folder / "pairs.parquet"), "--columns", "term", "gloss"),
        *("--max_steps", "2", "--per_device_train_batch_size", "8", "--mini_batch_size", "4", "--use_cpu", "true"),
        *("--disable_tqdm", "true", "--seed", "0"),
    ]


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (
            "optical",
            [
                "nothing trained",
                "head ignored",
                "linear surrogate",
                "ZBP, 2 probes",
                "ZBP, 3 probes",
                "ZBP, 2 probes beside surrogate",
                "ZBP, 3 probes beside surrogate",
                "exact",
            ],
        ),
        (
            "int8",
            [
                "nothing trained",
                "autograd as it is",
                "straight-through",
                "ZBP, 2 probes",
                "ZBP, 3 probes",
                "ZBP, 2 probes beside identity",
                "ZBP, 3 probes beside identity",
                "exact",
            ],
        ),
    ],
)
def test_every_arm_is_trained_reported_and_drawn(scenario, expected, material, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["--scenario", scenario, "--probes", "2", "3", "--output_dir", str(out)]
    run(monkeypatch, *material, *arguments, "--record_every", "1")
    rows = json.loads((out / "report.json").read_text())
    assert [row["Arm"] for row in rows] == expected
    assert all(0 <= row["R@1"] <= 1 and 0 <= row["MRR@10"] <= 1 for row in rows)
    queries = {row["Arm"]: row["Queries"] for row in rows}
    # Two steps of two columns of two mini-batches of 4; in the int8 scenario, in each of two layers.
    each = 2 * 2 * 2 * (2 if scenario == "int8" else 1)
    assert queries["ZBP, 2 probes"] == each * 4 and queries["ZBP, 3 probes"] == each * 6 and queries["exact"] == 0
    with Image.open(out / "arms.png") as picture:
        assert picture.width >= 800
    assert (out / "gradients-ZBP,-2-probes.png").exists()
    card = (out / "final" / "README.md").read_text()
    assert "| exact |" in card and "(arms.png)" in card and "train_with_zbp.py --model" in card
    assert re.search(r"\*\*Arm:\*\* \w+", card) and "The hardware is a simulation" in card
    printed = capsys.readouterr().out
    assert str(out / "final") in printed and "| ZBP, 3 probes |" in printed
    loaded = SentenceTransformer(str(out / "final"), device="cpu", trust_remote_code=scenario == "optical")
    assert loaded.encode(["w1 w2"]).shape == (1, 128 if scenario == "optical" else 16)


@pytest.mark.parametrize(("scenario", "mode"), [("optical", "dfa"), ("optical", "opzo"), ("int8", "score_k")])
def test_every_mode_is_an_arm_by_its_name_or_its_configuration(scenario, mode, material, tmp_path, monkeypatch):
    modes = (mode, '{"mode": "fd", "n_probes": 3, "eps": 0.1, "surrogate": true}')
    names = (f"mode {mode}", "mode fd")
    out = ("--scenario", scenario, "--output_dir", str(tmp_path / "out"))
    run(monkeypatch, *material, *out, "--modes", *modes, "--arms", *names)
    rows = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["Arm"] for row in rows] == list(names)
    # Two steps of two columns of two mini-batches; the int8 scenario has two layers.
    assert rows[1]["Queries"] == 2 * 2 * 2 * 4 * (2 if scenario == "int8" else 1)
    assert (rows[0]["Queries"] > 0) == (mode != "dfa")


@pytest.mark.parametrize(
    ("scenario", "arms", "kept"),
    [
        ("optical", ("head ignored", "exact"), "head ignored"),
        ("optical", ("exact",), "exact"),
        ("int8", ("autograd as it is", "exact"), "exact"),
    ],
)
def test_the_exact_arm_is_kept_where_it_is_no_privilege(scenario, arms, kept, material, tmp_path, monkeypatch):
    evaluate, scores = InformationRetrievalEvaluator.__call__, iter([0.1, 0.2])

    def better_every_time(evaluator, *args, **kwargs):
        return evaluate(evaluator, *args, **kwargs) | {"held_out_cosine_accuracy@1": next(scores)}

    monkeypatch.setattr(InformationRetrievalEvaluator, "__call__", better_every_time)
    out = ("--scenario", scenario, "--output_dir", str(tmp_path))
    run(monkeypatch, *material, *out, "--arms", *arms)
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [(row["Arm"], row["R@1"]) for row in rows] == list(zip(arms, (0.1, 0.2), strict=False))
    assert f"**Arm:** {kept}\n" in (tmp_path / "final" / "README.md").read_text()
    loaded = SentenceTransformer(str(tmp_path / "final"), device="cpu", trust_remote_code=scenario == "optical")
    assert loaded.encode(["w1 w2"]).shape == (1, 128 if scenario == "optical" else 16)


@pytest.mark.parametrize(("normalised", "similarity"), [(False, "dot"), (True, "cosine")])
def test_scores_are_by_the_similarity_of_the_model(normalised, similarity, material, tmp_path, monkeypatch):
    model = tiny_text_model(layers=3)
    if normalised:
        model.append(Normalize())
    model.similarity_fn_name = "dot"
    model.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    evaluate, found = InformationRetrievalEvaluator.__call__, []

    def noting(evaluator, *args, **kwargs):
        found.append(evaluate(evaluator, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(InformationRetrievalEvaluator, "__call__", noting)
    out = ("--scenario", "int8", "--output_dir", str(tmp_path / "out"), "--model", str(tmp_path / "model"))
    run(monkeypatch, *material, *out, "--arms", "nothing trained", "straight-through")
    rows = json.loads((tmp_path / "out" / "report.json").read_text())
    for row, scores in zip(rows, found, strict=True):
        assert row["R@1"] == scores[f"held_out_{similarity}_accuracy@1"]
        assert row["MRR@10"] == scores[f"held_out_{similarity}_mrr@10"]
    loaded = SentenceTransformer(str(tmp_path / "out" / "final"), device="cpu")
    assert loaded.similarity_fn_name == similarity


def test_a_mode_that_needs_labels_says_so(material, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="mode='drtp' needs a labelled loss"):
        run(monkeypatch, *material, "--output_dir", str(tmp_path), "--modes", "drtp", "--arms", "mode drtp")


def test_wrong_arms_and_columns_are_refused_by_name_in_one_line(material, tmp_path, monkeypatch, capsys):
    def line(*arguments: str) -> str:
        with pytest.raises(SystemExit) as done:
            run(monkeypatch, *material, "--output_dir", str(tmp_path / "out"), *arguments)
        assert done.value.code == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1]

    assert "--arms has ['magic']; the arms are ['nothing trained'" in line("--arms", "magic")
    assert "--columns is ['term']; expected two of ['id', 'term', 'gloss']" in line("--columns", "term")


def test_installed_docstrings_are_pairs(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import text_pairs

    monkeypatch.setattr(text_pairs, "PACKAGES", ("accelerate",))
    pairs = text_pairs.text_pairs(None, None, 50, seed=0)
    assert pairs.column_names == ["query", "answer"] and len(set(pairs["query"])) == len(pairs) == 50
    assert "prepare model" in set(text_pairs.text_pairs(None, None, 10_000, seed=0)["query"])
