"""From a dataset on the Hub to a model on the Hub: trained by id, pushed privately, and loaded by id, equal."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset
from huggingface_hub import constants
from sentence_transformers import SentenceTransformer

from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model
from tests.hub.stand_in import HubStandIn

SCRIPTS = Path(__file__).parents[2] / "training_scripts"
SENTENCES = random_sentences(8, seed=5)
LOAD = f"""
import sys
import numpy as np
from sentence_transformers import SentenceTransformer
np.save(sys.argv[1], SentenceTransformer("me/finder", device="cpu").encode({SENTENCES!r}))
"""


def run(hub: HubStandIn, home: Path, *command: str, token: str = "") -> str:
    """A process of its own whose Hub is the stand-in, and which has cached nothing."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The Hub, the folder and the output of a run of the recipe for texts on a dataset that only the Hub has."""
    folder = tmp_path_factory.mktemp("hub")
    model = tiny_text_model()
    model.save_pretrained(str(folder / "base"), create_model_card=False)
    pairs = Dataset.from_dict({"question": random_sentences(80, 1), "reply": random_sentences(80, 2)})
    parquet = io.BytesIO()
    pairs.to_parquet(parquet)
    with HubStandIn() as hub:
        card = b"---\nlicense: cc-by-4.0\nlanguage: en\n---\n"
        hub.add("datasets", "you/pairs", {"data/train-00000-of-00001.parquet": parquet.getvalue(), "README.md": card})
        output = run(
            hub,
            folder / "home",
            str(SCRIPTS / "train_text_embedder.py"),
            *("--dataset", "you/pairs", "--columns", "question,reply", "--model", str(folder / "base")),
            *(
                "--max_steps",
                "3",
                "--per_device_train_batch_size",
                "16",
                "--mini_batch_size",
                "8",
                "--use_cpu",
                "true",
            ),
            *("--output_dir", "out", "--push_to_hub", "--hub_model_id", "finder", "--hub_token", "hf_me"),
        )
        yield hub, folder, output


def test_the_model_of_a_dataset_by_id_is_pushed_whole_and_privately(trained):
    hub, folder, output = trained
    repository = hub.repositories["models", "me/finder"]
    assert repository.private
    assert len(repository.branches["main"].commits) == 1
    assert f"pushed  {hub.url}/me/finder/commit/{repository.branches['main'].sha}" in output
    final = folder / "out" / "final"
    local = {p.relative_to(final).as_posix(): p.read_bytes() for p in final.rglob("*") if p.is_file()}
    assert local.items() <= hub.files("models", "me/finder").items()
    assert {"README.md", "retrieval.png", "modules.json"} <= local.keys()
    assert not any(b"hf_me" in content for content in local.values())


def test_the_card_names_what_came_from_the_hub_and_guesses_nothing(trained):
    hub, folder, _ = trained
    text = hub.files("models", "me/finder")["README.md"].decode()
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["datasets"] == ["you/pairs"]
    assert "license" not in metadata and "base_model" not in metadata
    assert 'SentenceTransformer("me/finder")' in text
    assert str(folder) not in text.split("## How it was trained")[0]
    asked = [request for request in hub.requests if "/api/models/" in request]
    assert asked and all("/me/finder" in request for request in asked)  # and for nothing like the base model's folder
    results = metadata["model-index"][0]["results"][0]
    assert "query_to_answer_recall@1" in {metric["type"] for metric in results["metrics"]}


def test_plain_sentence_transformers_loads_it_by_id_with_equal_embeddings(trained, tmp_path):
    hub, folder, _ = trained
    (tmp_path / "load.py").write_text(LOAD)
    run(hub, tmp_path / "home", str(tmp_path / "load.py"), str(tmp_path / "pulled.npy"), token="hf_me")
    local = SentenceTransformer(str(folder / "out" / "final"), device="cpu").encode(SENTENCES)
    assert np.abs(np.load(tmp_path / "pulled.npy") - local).max() <= 1e-6


def test_a_wrong_token_ends_the_recipe_at_once_in_one_line(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", trained[0].url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script, out = SCRIPTS / "train_text_embedder.py", tmp_path / "out"
    arguments = ["--output_dir", str(out), "--use_cpu", "true", "--push_to_hub", "--hub_token", "hf_wrong"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "train_text_embedder.py: " in line]
    assert len(lines) == 1 and "the Hub does not know the token" in lines[0]
    assert not out.exists()
