"""The Trainer under torchrun: two ranks reach what one process does, a resumed run what an uninterrupted one does."""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from st_cached_extras.testing.tiny_models import relative_error, tiny_text_model

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("train_under_ddp.py"))


def train(folder, ranks, batch_size, resume=False):
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, SCRIPT, str(folder), str(batch_size), "resume" if resume else "anew"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(ranks)]


def test_two_ranks_equal_one_process_and_a_resumed_run_an_uninterrupted_one(tmp_path):
    (expected,) = train(tmp_path / "one", 1, 16)
    first, second = train(tmp_path / "two", 2, 8)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert relative_error(first, expected) <= 1e-5
    start = dict(tiny_text_model().named_parameters())
    assert relative_error({name: first[name] for name in start}, start) > 1e-2
    assert abs(first["log_scale"] - torch.tensor(20.0).log()) > 1e-3

    (tmp_path / "two" / "rank0.safetensors").unlink()
    resumed, _ = train(tmp_path / "two", 2, 8, resume=True)
    assert relative_error(resumed, first) <= 1e-6
