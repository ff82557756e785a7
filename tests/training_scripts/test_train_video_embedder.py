"""The video recipe leaves a model that anybody can load, a card with its scores, and a figure; it goes on where it was
killed, trains single vision-language models as well as two towers, and refuses what it cannot use in one line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer

from st_cached_extras.data import decode_videos, moving_shapes
from st_cached_extras.testing.tiny_vlms import tiny_qwen2_5_vl, tiny_qwen2_vl, tiny_qwen3_vl, tiny_smolvlm
from tests.training_scripts.recipe_runs import (
    SCRIPTS,
    assert_a_run_that_was_killed_ends_as_one_that_was_not,
    refused,
    run_recipe,
)

SCRIPT = "train_video_embedder"
BATCHES = ["--per_device_train_batch_size", "16", "--mini_batch_size", "8"]
SMALL = [*BATCHES, "--max_steps", "3", "--logging_steps", "1"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str, list]:
    """The folder, the output and the questions to the Hub of one small run, started from another folder."""
    folder = tmp_path_factory.mktemp("run")
    arguments = [
        *SMALL,
        "--train_clips",
        "48",
        "--eval_clips",
        "12",
        "--output_dir",
        "out",
        "--hub_token",
        "hf_secret",
    ]
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as hub:
        threading.Thread(target=count_connections, args=(hub, asked), daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / f"{SCRIPT}.py"), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "out" / "final", done.stdout + done.stderr, asked


def count_connections(hub: socket.socket, asked: list) -> None:
    """Notes who calls, and hangs up."""
    while True:
        try:
            connection, address = hub.accept()
        except OSError:  # closed: the run is over
            return
        asked.append(address)
        connection.close()


def test_the_run_prints_scores_before_and_after_beside_chance_and_where_things_are(finished):
    final, output, _ = finished
    assert re.search(r"Split +Retrieval +Metric +Chance +Before +After", output)
    score = r"[01]\.\d{3} \([01]\.\d{3} to [01]\.\d{3}\)"
    for split in ("test", "novel"):
        for direction in ("caption to video", "video to caption"):
            assert re.search(rf"{split} +{direction} +R@5 +0\.417 +{score} +{score}", output)
    for file in ("README.md", "retrieval.png"):
        assert str(Path("out") / "final" / file) in output
        assert (final / file).stat().st_size > 1000


def test_nothing_asks_the_hub(finished):
    assert finished[2] == []


def test_the_card_has_the_scores_the_figure_and_the_command_but_no_secret(finished):
    text = (finished[0] / "README.md").read_text()
    assert re.search(r"\| novel \| caption to video \| R@5 \| 0\.417 \| [01]\.\d{3} \(", text)
    assert "(retrieval.png)" in text
    assert "train_video_embedder.py --per_device_train_batch_size 16" in text
    assert not any(b"hf_secret" in file.read_bytes() for file in finished[0].rglob("*") if file.is_file())
    assert "CachedInfoNCELoss" in text
    assert "## Known limits" in text
    assert re.search(r"48 clips, fingerprint `\w+`", text)


def test_the_figure_is_a_picture_of_readable_size(finished):
    with Image.open(finished[0] / "retrieval.png") as picture:
        assert picture.width >= 1300
        assert picture.height >= 500


def test_plain_sentence_transformers_loads_the_model_and_embeds_captions_and_clips(finished):
    model = SentenceTransformer(str(finished[0]), device="cpu")
    clips = moving_shapes("novel", 2, show_progress_bar=False)
    captions = model.encode_query(list(clips["caption"]))
    videos = model.encode_document([row["video"] for row in clips])
    assert captions.shape == videos.shape == (2, 96)
    assert np.isfinite(model.similarity(captions, videos).numpy()).all()
    assert not np.allclose(videos[0], videos[1])


def raw_clips(n: int) -> datasets.Dataset:
    """Clips as somebody else might keep them: bytes under "video", and a caption column of the same prefix."""
    clips = moving_shapes("train", n, show_progress_bar=False).cast_column("video", datasets.Video(decode=False))
    rows = {"video": [row["bytes"] for row in clips["video"]], "video_caption": clips["caption"], "id": range(n)}
    return datasets.Dataset.from_dict({column: list(values) for column, values in rows.items()})


def test_a_parquet_file_of_bytes_trains_under_other_column_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    raw_clips(60).to_parquet(str(tmp_path / "data" / "train.parquet"))
    out = tmp_path / "out"
    run_recipe(
        monkeypatch,
        SCRIPT,
        *("--dataset", str(tmp_path / "data"), "--text_column", "video_caption", "--output_dir", str(out)),
        *(*SMALL, "--eval_strategy", "steps", "--eval_steps", "2", "--dataloader_num_workers", "1"),
    )
    text = (out / "final" / "README.md").read_text()
    assert re.search(r"\| held out \| caption to video \| R@5 \|", text)
    assert "54 clips" in text  # a tenth is held out
    assert "held out" in capsys.readouterr().out


def folder_of_clips(folder: Path, broken: int = 0) -> Path:
    """Files of clips with captions, as `datasets` wants them, of which the first ones are no videos."""
    for split, n in (("train", 24), ("test", 8)):
        (folder / split).mkdir(parents=True)
        lines = ["file_name,sentence"]
        for row in raw_clips(n):
            bad = split == "train" and row["id"] < broken
            (folder / split / f"{row['id']}.mp4").write_bytes(b"no video" if bad else row["video"])
            lines.append(f"{row['id']}.mp4,{row['video_caption']}")
        (folder / split / "metadata.csv").write_text("\n".join(lines))
    return folder


def test_a_folder_of_mp4_files_trains_and_a_trained_model_trains_on(tmp_path, monkeypatch, finished):
    clips, out = folder_of_clips(tmp_path / "clips", broken=2), tmp_path / "out"
    run_recipe(
        monkeypatch,
        SCRIPT,
        *("--dataset", str(clips), "--text_column", "sentence", "--eval_split", "test"),
        *("--broken", "skip", "--model", str(finished[0]), "--output_dir", str(out), *SMALL),
    )
    text = (out / "final" / "README.md").read_text()
    assert re.search(r"\| test \| caption to video \| R@5 \| 0\.625 \|", text)
    assert "22 clips" in text and "`learning_rate`: 2e-05" in text


def test_a_killed_run_goes_on_and_ends_as_one_that_was_not(tmp_path, monkeypatch, capsys):
    clips = decode_videos(moving_shapes("test", 2, show_progress_bar=False), num_frames=4)
    assert_a_run_that_was_killed_ends_as_one_that_was_not(
        monkeypatch,
        capsys,
        tmp_path,
        SCRIPT,
        *(*BATCHES, "--train_clips", "48", "--eval_clips", "6", "--num_frames", "4"),
        encode=lambda model: model.encode_document([row["video"] for row in clips]),
    )


@pytest.mark.parametrize("make", [tiny_qwen2_vl, tiny_qwen2_5_vl, tiny_qwen3_vl, tiny_smolvlm])
def test_a_single_vision_language_model_trains_with_adapters(make, tmp_path, monkeypatch):
    make().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    out = tmp_path / "out"
    run_recipe(
        monkeypatch,
        SCRIPT,
        *("--model", str(tmp_path / "model"), "--lora_rank", "2", "--learning_rate", "1e-1", "--fps", "4"),
        *(
            "--num_frames",
            "4",
            "--train_clips",
            "16",
            "--eval_clips",
            "4",
            "--max_steps",
            "2",
            "--output_dir",
            str(out),
        ),
        *("--per_device_train_batch_size", "8", "--mini_batch_size", "4", "--frame_size", "28"),
    )
    clip = moving_shapes("test", 1, show_progress_bar=False)
    value = decode_videos(clip, num_frames=4, with_metadata=True)[0]["video"]
    before, after = (SentenceTransformer(str(path), device="cpu") for path in (tmp_path / "model", out / "final"))
    assert before.state_dict().keys() == after.state_dict().keys()
    before, after = before.encode(value), after.encode(value)
    assert np.isfinite(after).all() and not np.allclose(before, after, atol=1e-5)
    assert "num_frames 4" in (out / "final" / "README.md").read_text()


def test_several_datasets_of_clips_and_a_stream_train(tmp_path, monkeypatch, capsys):
    for name in ("one", "two"):
        raw_clips(20).to_parquet(str(tmp_path / f"{name}.parquet"))
    data = ("--text_column", "video_caption", *BATCHES, "--max_steps", "2", "--num_frames", "2")
    several = (
        "--dataset",
        str(tmp_path / "one.parquet"),
        str(tmp_path / "two.parquet"),
        "--loss",
        "infonce",
        "sigmoid",
    )
    run_recipe(monkeypatch, SCRIPT, *data, *several, "--output_dir", str(tmp_path / "several"))
    assert re.search(r"two held out +caption to video", capsys.readouterr().out)
    stream = (
        "--dataset",
        str(tmp_path / "one.parquet"),
        "--streaming",
        "true",
        "--eval_clips",
        "4",
        "--broken",
        "skip",
    )
    assert "--streaming needs --model" in refused(monkeypatch, capsys, tmp_path, SCRIPT, *data, *stream)
    run_recipe(
        monkeypatch,
        SCRIPT,
        *data,
        *stream,
        "--model",
        str(tmp_path / "several" / "final"),
        "--output_dir",
        str(tmp_path / "stream"),
    )
    assert re.search(r"first 4 +caption to video", capsys.readouterr().out)


def test_what_cannot_train_is_refused_in_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    raw_clips(6).save_to_disk(tmp_path / "saved")
    clips = folder_of_clips(tmp_path / "clips", broken=24)
    pairs = {"video": ["a sentence", "another one"] * 3, "caption": ["x", "y"] * 3}
    datasets.Dataset.from_dict(pairs).to_parquet(str(tmp_path / "text.parquet"))

    def line(source: str | Path, *arguments: str) -> str:
        arguments = ("--dataset", str(tmp_path / source), "--max_steps", "2", *arguments)
        return refused(monkeypatch, capsys, tmp_path, SCRIPT, *arguments)

    assert "names the column 'caption', but the columns are ['video', 'video_caption', 'id']" in line("saved")
    captioned = ("--text_column", "video_caption")
    assert "no split 'validation'; its splits are ['train']" in line("saved", *captioned, "--eval_split", "validation")
    assert "--video_column id must name a column of videos, but it holds int64" in line(
        "saved", *captioned, "--video_column", "id"
    )
    assert "it holds text such as 'a sentence'" in line("text.parquet")
    assert "Row 0 of the column 'video' cannot be read" in line(clips, "--text_column", "sentence")
    assert "None of the" in line(clips, "--text_column", "sentence", "--broken", "skip")
    assert "--num_frames must be at least 2" in line("saved", "--num_frames", "1")
    assert "an even number of frames" in line("saved", "--num_frames", "3")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert "cannot be loaded" in line("saved", *captioned, "--model", str(tmp_path / "model"))


def test_a_refusal_is_one_line_and_the_exit_code_2_for_the_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{SCRIPT}.py"), "--dataset", "nowhere.parquet", "--output_dir", "out"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "nowhere.parquet" in line] == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
