"""The recipe distils teachers, goes on after a kill to the same end, and says what is wrong in one line."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from st_cached_extras.objectives.mmd import NystromReference
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model

SCRIPTS = Path(__file__).parents[2] / "training_scripts"
SCRIPT = SCRIPTS / "distil_embedder.py"


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, list[str]]:
    """A student, two teachers of other widths, pairs of texts, and the arguments that name them."""
    folder = tmp_path_factory.mktemp("material")
    for name, hidden, seed in (("student", 16, 0), ("wide", 24, 1), ("narrow", 16, 2)):
        tiny_text_model(hidden=hidden, seed=seed).save_pretrained(str(folder / name), create_model_card=False)
    queries = list(dict.fromkeys(random_sentences(150, 1)))
    pairs = {"term": queries, "gloss": random_sentences(len(queries), 2)}
    Dataset.from_dict(pairs).to_parquet(str(folder / "pairs.parquet"))
    return folder, [
        *("--model", str(folder / "student"), "--dataset", str(folder / "pairs.parquet"), "--eval_pairs", "20"),
        *("--teachers", str(folder / "wide"), str(folder / "narrow"), "--landmarks", "16", "--use_cpu", "true"),
        *("--per_device_train_batch_size", "32", "--mini_batch_size", "8", "--learning_rate", "0.003"),
        *("--disable_tqdm", "true", "--save_strategy", "steps", "--save_steps", "2", "--logging_steps", "2"),
    ]


def run_here(monkeypatch, *arguments: str) -> None:
    """Runs the script in this process, which spares the imports."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def uninterrupted(material, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, *material[1], "--max_steps", "12", "--output_dir", str(folder))
    return folder


def test_the_student_moves_to_its_teachers_side_by_side(material, uninterrupted):
    folder, _ = material
    student = SentenceTransformer(str(uninterrupted / "final"), device="cpu")
    teachers = [SentenceTransformer(str(folder / name), device="cpu") for name in ("wide", "narrow")]
    texts = random_sentences(40, 9)
    targets = np.concatenate([t.encode(texts, normalize_embeddings=True) for t in teachers], axis=1)
    found = student.encode(texts)
    assert found.shape == targets.shape == (40, 40)
    error = np.square(found - targets).sum(1).mean()  # of texts that it never saw
    logs = json.loads((uninterrupted / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    paired = [entry["paired"] for entry in logs if "paired" in entry]
    assert paired[-1] < 0.4 * paired[0]
    assert error == pytest.approx(
        paired[-1], rel=0.3
    )  # what is logged is the squared distance, summed over dimensions
    assert all(np.isfinite(entry["law"]) for entry in logs if "law" in entry)


def test_the_card_names_both_losses_what_the_teachers_score_and_what_was_not_tested(uninterrupted):
    text = (uninterrupted / "final" / "README.md").read_text()
    assert "Embeds texts where wide and narrow put them." in text
    for teacher in ("wide", "narrow"):
        assert re.search(rf"\*\*Teacher {teacher}:\*\* R@1 [01]\.\d+, R@10 [01]\.\d+, MRR [01]\.\d+", text)
    for tag in ("loss:CachedCompositeLoss", "loss:MSELoss", "loss:CachedMultiEncoderMMDLoss"):
        assert f"- {tag}" in text
    assert "A Kernel Two-Sample Test" in text
    assert re.search(r"^python \S*distil_embedder.py --model ", text, re.MULTILINE)
    assert "## Not tested" in text and "Other seeds" in text
    assert "| held out | query to answer | R@1 |" in text
    assert (uninterrupted / "final" / "retrieval.png").stat().st_size > 1000


def test_a_killed_run_goes_on_to_the_same_end(material, uninterrupted, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), *material[1], "--max_steps", "12", "--output_dir", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not (out / "checkpoint-4" / "trainer_state.json").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "final").exists()
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(
            monkeypatch,
            *material[1],
            *("--max_steps", "12", "--output_dir", str(out), "--resume_from_checkpoint", str(out / "checkpoint-4")),
        )
    states = [SentenceTransformer(str(run / "final"), device="cpu").state_dict() for run in (uninterrupted, out)]
    for name, weight in states[0].items():
        assert torch.allclose(weight, states[1][name], atol=1e-6, rtol=0), name
    cards = [(run / "final" / "README.md").read_text() for run in (uninterrupted, out)]
    tables = [re.findall(r"^\| held out \|.*$", card, re.MULTILINE) for card in cards]
    assert len(tables[0]) == 10
    assert tables[0] == tables[1]  # before training, too
    assert "went on from a checkpoint" in cards[1] and "went on from a checkpoint" not in cards[0]


def test_references_of_files_are_taken(material, tmp_path, monkeypatch):
    for index, width in enumerate((24, 16)):
        rows = torch.nn.functional.normalize(torch.randn(64, width))
        NystromReference.fit(rows, landmarks=8).save(tmp_path / f"{index}.safetensors")
    files = [str(tmp_path / f"{index}.safetensors") for index in range(2)]
    out = ("--max_steps", "2", "--output_dir", str(tmp_path / "out"))
    run_here(monkeypatch, *material[1], *out, "--references", *files)
    assert "landmarks" in (tmp_path / "out" / "final" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--columns", "term", "meaning"], r"--columns is \['term', 'meaning'\]; expected two of \['term', 'gloss'\]"),
        (["--references", "a.safetensors"], r"--references has 1 files for 2 teacher\(s\)"),
        (
            ["--references", "a.safetensors", "b"],
            r"The reference of the teacher .*wide' cannot be had: .*a.safetensors",
        ),
        (["--teachers", "/not/there"], r"--model '/not/there' cannot be loaded"),
        (["--learning_rate", "fast"], r"learning_rate"),
        (["--resume_from_checkpoint", "last"], r"there is no checkpoint in"),
    ],
)
def test_mistakes_end_with_one_line_and_nothing_written(arguments, message, material, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        run_here(monkeypatch, *material[1], "--output_dir", str(out), "--max_steps", "2", *arguments)
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distil_embedder.py: ")]
    assert len(lines) == 1 and re.search(message, lines[0]), lines
    assert not out.exists()
