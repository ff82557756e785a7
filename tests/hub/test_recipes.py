"""Recipes that do not end as the others do push what they made in the same way."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

from datasets import Dataset

from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model

SCRIPTS = Path(__file__).parents[2] / "training_scripts"


def test_the_recipe_of_layers_without_a_backward_pushes_its_best_arm(hub, tmp_path, monkeypatch, capsys):
    tiny_text_model(layers=3).save_pretrained(str(tmp_path / "model"), create_model_card=False)
    texts = list(dict.fromkeys(random_sentences(80, 1)))
    pairs = Dataset.from_dict({"term": texts, "gloss": random_sentences(len(texts), 2)})
    pairs.to_parquet(str(tmp_path / "pairs.parquet"))
    script, out = SCRIPTS / "train_with_zbp.py", tmp_path / "out"
    arguments = [
        *("--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "pairs.parquet"), "--probes", "2"),
        *("--scenario", "int8", "--arms", "ZBP, 2 probes", "--max_steps", "1", "--use_cpu", "true"),
        *("--per_device_train_batch_size", "8", "--mini_batch_size", "8", "--output_dir", str(out)),
        *("--push_to_hub", "--hub_model_id", "through-int8", "--hub_token", "hf_me"),
    ]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(script), run_name="__main__")
    repository = hub.repositories["models", "me/through-int8"]
    assert repository.private and len(repository.branches["main"].commits) == 1
    seen = hub.files("models", "me/through-int8")
    assert {"README.md", "arms.png", "modules.json", "model.safetensors"} <= seen.keys()
    card = seen["README.md"].decode()
    assert "- **Layers without a backward:** `" in card and " queries in " in card
    assert 'SentenceTransformer("me/through-int8")' in card and "hf_me" not in card
    assert "A real instrument." in card
    assert f"pushed  {hub.url}/me/through-int8/commit/" in capsys.readouterr().out
