"""The script leaves a reference per encoder, and an interrupted run ends with the same file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model

SCRIPT = Path(__file__).parents[2] / "training_scripts" / "fit_reference.py"
FILE = "encoder.safetensors"


@pytest.fixture
def encoder(tmp_path) -> str:
    path = tmp_path / "encoders" / "encoder"
    tiny_text_model().save_pretrained(str(path), create_model_card=False)
    return str(path)


@pytest.fixture
def texts(tmp_path) -> str:
    Dataset.from_dict({"text": random_sentences(150, seed=1)}).save_to_disk(str(tmp_path / "texts"))
    return str(tmp_path / "texts")


def run(monkeypatch, encoder: str, output_dir: Path, *arguments: str) -> None:
    command = ["--encoders", encoder, "--output_dir", str(output_dir), "--landmarks", "20", "--part_rows", "40"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command, *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def the_file(output_dir: Path) -> Path:
    (path,) = output_dir.glob("*.safetensors")
    return path


def test_a_reference_is_that_of_the_encoders_features_and_says_where_they_are_from(
    monkeypatch, tmp_path, encoder, texts
):
    run(monkeypatch, encoder, tmp_path / "out", "--dataset", texts, "--column", "text", "--scales", "0.5", "2")
    reference = NystromReference.load(the_file(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*.features"))
    model = SentenceTransformer(encoder, device="cpu")
    features = model.encode(random_sentences(150, seed=1), convert_to_tensor=True)
    expected = NystromReference.fit(features, landmarks=20, scales=(0.5, 2.0))
    assert torch.allclose(reference.alpha, expected.alpha, atol=1e-3)
    about = reference.describe()
    assert about["encoder"] == encoder and about["encoder_revision"] == "local" and about["rows"] == "150"
    assert about["dataset"] == texts and "150 rows, fingerprint" in about["data"] and about["scales"] == [0.5, 2.0]
    assert MultiEncoderMMD({"x": reference}).value_and_cotangents({"x": features}).loss.isfinite()


def test_an_interrupted_run_goes_on_and_ends_with_the_same_file(monkeypatch, tmp_path, encoder, texts):
    arguments = ("--dataset", texts, "--column", "text")
    run(monkeypatch, encoder, tmp_path / "whole", *arguments)
    calls, encode = [], SentenceTransformer.encode

    def failing(self, inputs, **kwargs):
        calls.append(len(inputs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, inputs, **kwargs)

    monkeypatch.setattr(SentenceTransformer, "encode", failing)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, encoder, tmp_path / "parts", *arguments)
    assert not list((tmp_path / "parts").glob("*.safetensors"))
    run(monkeypatch, encoder, tmp_path / "parts", *arguments)
    assert calls == [40, 40, 40, 40, 30]  # the third part again, and nothing that was there
    assert the_file(tmp_path / "parts").read_bytes() == the_file(tmp_path / "whole").read_bytes()


def test_a_fit_that_is_interrupted_goes_on_without_the_encoder(monkeypatch, tmp_path, encoder, texts):
    arguments = ("--dataset", texts, "--column", "text")
    run(monkeypatch, encoder, tmp_path / "whole", *arguments)
    with monkeypatch.context() as context:
        context.setattr("st_cached_extras.objectives.mmd.fit.solve", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(monkeypatch, encoder, tmp_path / "parts", *arguments)
    with monkeypatch.context() as context:
        context.setattr(SentenceTransformer, "encode", lambda *_, **__: 1 / 0)
        run(monkeypatch, encoder, tmp_path / "parts", *arguments)
    assert the_file(tmp_path / "parts").read_bytes() == the_file(tmp_path / "whole").read_bytes()


def test_what_is_there_is_left_and_what_differs_is_refused(monkeypatch, tmp_path, encoder, texts, capsys):
    arguments = ("--dataset", texts, "--column", "text")
    run(monkeypatch, encoder, tmp_path / "out", *arguments)
    before = the_file(tmp_path / "out").stat().st_mtime_ns
    run(monkeypatch, encoder, tmp_path / "out", *arguments)
    assert "there already" in capsys.readouterr().out and the_file(tmp_path / "out").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="made with other arguments or of other data"):
        run(monkeypatch, encoder, tmp_path / "out", *arguments, "--seed", "1")
    with pytest.raises(ValueError, match=r"--column is 'caption', but the columns are \['text'\]"):
        run(monkeypatch, encoder, tmp_path / "out", "--dataset", texts)


def test_tokens_are_summed_up_in_parts(monkeypatch, tmp_path, encoder, texts):
    options = (
        "--dataset",
        texts,
        "--column",
        "text",
        "--max_rows",
        "60",
        "--token_segments",
        "3",
        "--layout",
        "per_token",
        "--keep_features",
    )
    run(monkeypatch, encoder, tmp_path / "out", *options)
    reference = NystromReference.load(the_file(tmp_path / "out"))
    assert reference.sample_shape == (3, 16) and reference.landmarks.shape[:2] == (3, 20)
    assert len(list((tmp_path / "out").glob("*.features/*.safetensors"))) == 2


def test_clips_are_summed_up_by_a_video_model(monkeypatch, tmp_path):
    from transformers import VideoMAEConfig, VideoMAEModel, VideoMAEVideoProcessor

    path = tmp_path / "encoders" / "videomae"
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = VideoMAEConfig(image_size=28, patch_size=14, num_frames=4, tubelet_size=2, **sizes)
    VideoMAEModel(config).save_pretrained(path)
    size = {"height": 28, "width": 28}
    VideoMAEVideoProcessor(size={"shortest_edge": 28}, crop_size=size, do_sample_frames=False).save_pretrained(path)
    run(monkeypatch, str(path), tmp_path / "out", "--column", "video", "--max_rows", "60", "--num_frames", "4")
    reference = NystromReference.load(the_file(tmp_path / "out"))
    assert reference.sample_shape == (2, 16) and reference.describe()["rows"] == "60"
