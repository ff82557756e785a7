"""The script leaves a generator that draws, a card with its scores and figures, and resumes bit for bit."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPImageProcessor, Dinov2Config, Dinov2Model

from st_cached_extras.data import read_video

SCRIPTS = Path(__file__).parents[2] / "training_scripts"
SMALL = [
    *("--clips", "48", "--held_out_clips", "32", "--steps", "4", "--batch_size", "16", "--differentiated", "8"),
    *("--mini_batch_size", "4", "--landmarks", "32", "--tower_steps", "1", "--judge_steps", "2"),
    *("--eval_steps", "2", "--save_steps", "2", "--warmup_steps", "1"),
]


def run_here(monkeypatch, script: str, *arguments: str) -> dict:
    """Runs a script in this process, which spares the imports; returns its globals."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / script), run_name="__main__")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of one small run."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, "train_video_generator.py", *SMALL, "--output_dir", str(folder))
    return folder


def test_the_card_has_scores_figures_and_the_command(finished):
    final = finished / "final"
    text = (final / "README.md").read_text()
    for encoder in ("tower", "convolution", "glimpse", "motion", "colours", "pixels"):
        assert re.search(rf"\| MMD² x 1000, {encoder} (\| \d+\.\d{{3}} ){{3}}\|", text)
    assert re.search(r"\| sliced Wasserstein, held-out encoder \| \d\.\d{3} \|", text)
    assert re.search(r"\| shape and colour as asked for \| [01]\.\d{3} \|", text)
    assert "--batch_size 16 --differentiated 8" in text
    assert "## Known limits" in text
    assert "pipeline_tag: text-to-video" in text
    for figure in ("clips.png", "curves.png"):
        assert f"({figure})" in text
        with Image.open(final / figure) as picture:
            assert picture.width >= 1000
            assert picture.height >= 400
    found = json.loads((final / "scores.json").read_text())
    assert found["steps"] == 4
    assert found["seconds"] > 0


def test_training_moved_the_generator_and_the_judge_saw_none_of_it(finished):
    checkpoint = torch.load(finished / "checkpoint.pt", weights_only=True)
    trained, averaged = checkpoint["generator"], load_file(finished / "final" / "model.safetensors")
    assert set(trained) == set(averaged)
    assert any(not torch.equal(trained[name], averaged[name]) for name in trained)
    assert [len(checkpoint["progress"][name]) for name in ("raw", "scores", "sheets")] == [4, 2, 2]
    assert all(parameter.isfinite().all() for parameter in trained.values())


def test_killed_and_resumed_it_ends_with_the_same_bits(finished, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import generator_progress

    class Killed(Exception):
        pass

    add = generator_progress.Progress.add

    def add_until_killed(progress, raw):
        if progress.step == 3:
            raise Killed
        add(progress, raw)

    with monkeypatch.context() as patched:
        patched.setattr(generator_progress.Progress, "add", add_until_killed)
        with pytest.raises(Killed):
            run_here(patched, "train_video_generator.py", *SMALL, "--output_dir", str(tmp_path))
    assert not (tmp_path / "final").exists()
    run_here(monkeypatch, "train_video_generator.py", *SMALL, "--output_dir", str(tmp_path), "--resume")
    expected = load_file(finished / "final" / "model.safetensors")
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    scores = [json.loads((folder / "final" / "scores.json").read_text())["scores"] for folder in (finished, tmp_path)]
    assert scores[0] == scores[1]


def test_the_sampler_writes_clips_of_captions(finished, tmp_path, monkeypatch):
    captions = ["a large red circle moving left slowly", "a small cyan cross moving up quickly"]
    arguments = ["--generator", str(finished / "final"), "--captions", *captions, "--output_dir", str(tmp_path)]
    run_here(monkeypatch, "sample_video_generator.py", *arguments, "--samples", "2", "--enlarge", "2")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["00-0.mp4", "00-1.mp4", "01-0.mp4", "01-1.mp4", "clips.png"]
    clip = read_video(tmp_path / "00-0.mp4")
    assert clip.shape == (8, 112, 112, 3)
    with pytest.raises(ValueError, match=r"no word of 'nothing' is known. Use some of: .*circle"):
        run_here(monkeypatch, "sample_video_generator.py", *arguments[:2], "--captions", "nothing")


def test_encoders_by_path_take_the_place_of_the_default_ones(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(tmp_path / "dinov2")
    size = {"height": 28, "width": 28}
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size).save_pretrained(tmp_path / "dinov2")
    encoders = [str(tmp_path / "dinov2"), "glimpse"]
    arguments = [*SMALL, "--output_dir", str(tmp_path / "out"), "--encoders", *encoders, "--dtype", "bfloat16"]
    run_here(monkeypatch, "train_video_generator.py", *arguments)
    text = (tmp_path / "out" / "final" / "README.md").read_text()
    for encoder in encoders:
        assert re.search(rf"\| MMD² x 1000, {re.escape(encoder)} \| \d+\.\d{{3}}", text)
    assert not (tmp_path / "out" / "tower").exists()


def test_a_tower_that_exists_is_used_and_none_is_trained(finished, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import generator_encoders

    def train_tower(*args, **kwargs):
        pytest.fail("a tower was trained")

    monkeypatch.setattr(generator_encoders, "train_tower", train_tower)
    tower = ["--tower", str(finished / "tower"), "--output_dir", str(tmp_path)]
    run_here(monkeypatch, "train_video_generator.py", *SMALL, *tower)
    assert not (tmp_path / "tower").exists()
    expected = load_file(finished / "final" / "model.safetensors")
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_two_ranks_under_accelerate_train_one_generator(tmp_path):
    command = [
        # With --cpu in place of --multi_gpu, the launcher starts one process.
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
        *(str(Path(__file__).with_name("weights_of_ranks.py")), str(tmp_path)),
        str(SCRIPTS / "train_video_generator.py"),
        *SMALL,
        *("--output_dir", str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     4") == 1
    assert (tmp_path / "final" / "README.md").is_file()

    starts, ends = (
        [load_file(tmp_path / f"{time}-{rank}.safetensors") for rank in (0, 1)] for time in ("start", "end")
    )
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["generator"]
    for name, trained in ends[0].items():
        assert trained.isfinite().all()
        assert torch.equal(trained, ends[1][name])
        assert torch.equal(trained, saved[name])
    assert all(torch.equal(x, starts[1][name]) for name, x in starts[0].items())
    moved = [name for name, x in starts[0].items() if not torch.equal(x, ends[0][name])]
    assert moved == list(starts[0])
    averaged = load_file(tmp_path / "final" / "model.safetensors")
    assert all(x.isfinite().all() for x in averaged.values())


def test_motion_is_as_asked_in_real_clips_and_not_in_reversed_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from generator_data import load_clips
    from generator_evaluation import moves_as_asked

    clips, captions = load_clips("test", 96, seed=0)
    clips = clips.float() / 255
    assert moves_as_asked(clips, captions).float().mean() > 0.97
    assert not moves_as_asked(clips.flip(1), captions).any()
    slowed = clips[:, [0, 0, 0, 1, 1, 1, 2, 2]]
    quick = torch.tensor(["quickly" in caption for caption in captions])
    assert not moves_as_asked(slowed, captions)[quick].any()


def test_the_renderer_moves_the_sprite_along_its_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from tiny_video_generator import render

    path = torch.tensor([[[-0.5, 0.0], [0.5, 0.25]]])
    scene = {
        "sprite": torch.ones(1, 1, 8, 8),
        "path": path,
        "colour": torch.tensor([[1.0, 0.0, 0.5]]),
        "background": torch.zeros(1, 3),
    }
    clip = render(scene, 40)  # [1, 2, 3, 40, 40]
    for frame, (x, y) in zip(clip[0], path[0], strict=True):
        rows, columns = np.nonzero(frame[0].numpy() > 0.5)
        centre = np.array([columns.mean(), rows.mean()])
        np.testing.assert_allclose((centre + 0.5) / 20 - 1, [x, y], atol=1e-6)
        assert len(rows) == 64
        assert torch.equal(frame[2], 0.5 * frame[0])
