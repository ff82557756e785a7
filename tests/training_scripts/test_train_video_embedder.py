"""The training script leaves a model that anybody can load, a card with its scores, and a figure."""

from __future__ import annotations

import os
import re
import runpy
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

from st_cached_extras.data import moving_shapes

SCRIPTS = Path(__file__).parents[2] / "training_scripts"
SCRIPT = SCRIPTS / "train_video_embedder.py"
SMALL = ["--max_steps", "3", "--per_device_train_batch_size", "16", "--mini_batch_size", "8", "--logging_steps", "1"]


def run_here(monkeypatch, *arguments: str) -> None:
    """Runs the script in this process, which spares the imports."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runpy.run_path(str(SCRIPT), run_name="__main__")


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
            [sys.executable, str(SCRIPT), *arguments],
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
    assert re.search(r"Split +Text to video +Chance +Before +After +95 % interval", output)
    for split in ("test", "novel"):
        assert re.search(
            rf"{split} +R@5 +0\.417 +[01]\.\d{{3}} +[01]\.\d{{3}} +[01]\.\d{{3}} to [01]\.\d{{3}}", output
        )
    for file in ("README.md", "retrieval.png"):
        assert str(Path("out") / "final" / file) in output
        assert (final / file).stat().st_size > 1000


def test_nothing_asks_the_hub(finished):
    assert finished[2] == []


def test_the_card_has_the_scores_the_figure_and_the_command_but_no_secret(finished):
    text = (finished[0] / "README.md").read_text()
    assert re.search(r"\| novel \| R@5 \| 0\.417 \| [01]\.\d{3} \| [01]\.\d{3} \|", text)
    assert "(retrieval.png)" in text
    assert "python train_video_embedder.py --max_steps 3" in text
    assert not any(b"hf_secret" in file.read_bytes() for file in finished[0].rglob("*") if file.is_file())
    assert "CachedInfoNCELoss" in text
    assert "## Known limits" in text
    assert re.search(r"\*\*train:\*\* 48 clips, fingerprint `\w+`", text)


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
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    run_here(
        monkeypatch,
        *("--dataset", str(tmp_path / "data"), "--text_column", "video_caption", "--output_dir", str(out)),
        *("--eval_strategy", "steps", "--eval_steps", "2"),
    )
    text = (out / "final" / "README.md").read_text()
    assert re.search(r"\| held out \| R@5 \|", text)
    assert "54 clips" in text  # a tenth is held out
    assert "held out" in capsys.readouterr().out


def test_a_folder_of_mp4_files_trains_and_a_trained_model_trains_on(tmp_path, monkeypatch, finished):
    for split, n in (("train", 24), ("test", 8)):
        folder = tmp_path / "clips" / split
        folder.mkdir(parents=True)
        lines = ["file_name,sentence"]
        for row in raw_clips(n):
            (folder / f"{row['id']}.mp4").write_bytes(row["video"])
            lines.append(f"{row['id']}.mp4,{row['video_caption']}")
        (folder / "metadata.csv").write_text("\n".join(lines))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    run_here(
        monkeypatch,
        *("--dataset", str(tmp_path / "clips"), "--text_column", "sentence", "--eval_split", "test"),
        *("--model", str(finished[0]), "--output_dir", str(out)),
    )
    text = (out / "final" / "README.md").read_text()
    assert re.search(r"\| test \| R@5 \| 0\.625 \|", text)
    assert "`learning_rate`: 2e-05" in text


def test_a_saved_dataset_and_wrong_names_are_told_apart(tmp_path, monkeypatch):
    raw_clips(4).save_to_disk(tmp_path / "saved")
    common = ("--dataset", str(tmp_path / "saved"), "--output_dir", str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"--text_column is 'caption', but the columns are .*'video_caption'"):
        run_here(monkeypatch, *common)
    with pytest.raises(ValueError, match=r"no split 'validation'; its splits are \['train'\]"):
        run_here(monkeypatch, *common, "--eval_split", "validation")


def test_only_the_finished_model_is_pushed_and_privately(tmp_path, monkeypatch):
    pushed = []

    def push(model, repo_id, **options):
        pushed.append((repo_id, options, list(model.model_card_data.figures)))

    monkeypatch.setattr(SentenceTransformer, "push_to_hub", push)
    run_here(
        monkeypatch,
        *("--train_clips", "32", "--eval_clips", "8", "--output_dir", str(tmp_path / "out")),
        *("--push_to_hub", "--hub_model_id", "me/finder"),
    )
    [(repo_id, options, figures)] = pushed
    assert repo_id == "me/finder"
    assert options["private"] is True
    assert len(figures) == 1
    assert options["local_model_path"] == str(tmp_path / "out" / "final")
    assert 'snapshot_download("me/finder")' in (tmp_path / "out" / "final" / "README.md").read_text()
