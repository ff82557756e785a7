"""Runs of the recipes in this process, which spares the imports; whole, stopped in the middle, and gone on with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_cached_extras import ReplaySentenceTransformerTrainer
from st_cached_extras.recipes.run import run

SCRIPTS = Path(__file__).parents[2] / "training_scripts"
QUIET = ("--use_cpu", "true", "--disable_tqdm", "true", "--logging_steps", "1")


def run_recipe(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """As ``python training_scripts/SCRIPT.py ARGUMENTS`` does."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / f"{script}.py"), *QUIET, *arguments])
    run(importlib.import_module(script).main)


def refused(monkeypatch, capsys, folder: Path, script: str, *arguments: str) -> str:
    """The one line that a run ends with that cannot begin; it leaves nothing in ``folder``."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        run_recipe(monkeypatch, script, *arguments, "--output_dir", str(folder / "refused"))
    assert done.value.code == 2
    assert sorted(folder.rglob("*")) == before
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(f"{script}.py: ")
    assert not any("Traceback" in line for line in errors)
    return errors[-1]


def assert_a_run_that_was_killed_ends_as_one_that_was_not(
    monkeypatch, capsys, tmp_path: Path, script: str, *arguments: str, encode: Callable[[SentenceTransformer], object]
) -> SentenceTransformer:
    """Train 4 steps at once, and again with a kill in the third and a checkpoint of the second; return the model."""
    command = (*arguments, "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2")
    capsys.readouterr()
    run_recipe(monkeypatch, script, *command, "--output_dir", str(tmp_path / "whole"))
    whole = capsys.readouterr().out
    steps, training_step = [], ReplaySentenceTransformerTrainer.training_step

    def failing(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(ReplaySentenceTransformerTrainer, "training_step", failing)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(context, script, *command, "--output_dir", str(tmp_path / "parts"))
    assert not (tmp_path / "parts" / "final").exists()
    resume = ("--resume_from_checkpoint", "last")
    run_recipe(monkeypatch, script, *command, *resume, "--output_dir", str(tmp_path / "parts"))
    parts = capsys.readouterr().out
    table = [line for line in whole.splitlines() if " R@" in line or "MRR" in line]
    assert table and table == [line for line in parts.splitlines() if " R@" in line or "MRR" in line]
    models = [SentenceTransformer(str(tmp_path / name / "final"), device="cpu") for name in ("whole", "parts")]
    first, second = (torch.as_tensor(encode(model)) for model in models)
    assert first.isfinite().all() and not torch.allclose(first[0], first[1])
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    return models[0]
