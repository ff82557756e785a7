"""The example cards are what their commands wrote: complete, readable by the Hub, and without weights."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml
from PIL import Image

from st_cached_extras.evaluation import rank_statistics

CARDS = Path(__file__).parents[2] / "model_cards"
MAKE = runpy.run_path(str(CARDS / "make.py"))
NAMES = sorted(folder.name for folder in CARDS.iterdir() if (folder / "README.md").is_file())
RETRIEVERS = [name for name in NAMES if name.endswith("-embedder")]


@pytest.mark.parametrize("name", NAMES)
def test_a_card_states_the_command_that_makes_it_and_shows_its_figures(name):
    text = (CARDS / name / "README.md").read_text()
    script = Path(MAKE["RECIPES"][name].split()[0])
    assert (CARDS.parent / script).is_file()
    assert re.search(rf"^python \S*{script.name} --", text, re.MULTILINE)
    figures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert figures
    for figure in figures:
        with Image.open(CARDS / name / figure) as picture:
            assert picture.width >= 600
    for heading in ("Results", "Usage", "Known limits", "Not tested", "Licence", "How it was trained"):
        assert f"\n## {heading}\n" in text
    assert not re.search(r"/home/|/root/|/tmp/", text)


@pytest.mark.parametrize("name", RETRIEVERS)
def test_the_model_index_has_every_metric_of_every_split(name):
    text = (CARDS / name / "README.md").read_text()
    assert re.search(r"\*\*Training:\*\* [\d,]+ \w+, fingerprint of 256 of them `\w{16}`", text)
    results = yaml.safe_load(text.split("---")[1])["model-index"][0]["results"]
    splits = {
        line.split("|")[1].strip() for line in text.splitlines() if re.match(r"\| [\w ]+ \| \w+ to \w+ \|", line)
    }
    assert {result["dataset"]["name"] for result in results} == splits
    for result in results:
        assert len(result["metrics"]) == 2 * len(rank_statistics((1, 5, 10)))


def test_no_weights_and_nothing_else_lie_among_the_cards():
    files = [file for name in NAMES for file in (CARDS / name).rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".md", ".png", ".mp4"}
    assert sum(file.stat().st_size for file in files) < 2_000_000
    links = re.findall(r"\]\(([\w-]+)/README.md\)", (CARDS / "README.md").read_text())
    assert sorted(links) == NAMES and set(NAMES) <= set(MAKE["RECIPES"])


def test_cards_are_kept_as_they_are(tmp_path):
    model, folder = tmp_path / "final", tmp_path / "card"
    (model / "assets").mkdir(parents=True)
    for file in ("README.md", "retrieval.png", "assets/video_0.mp4", "model.safetensors"):
        (model / file).write_bytes(file.encode())
    folder.mkdir()
    (folder / "of_an_older_run.png").touch()
    MAKE["keep"].__globals__["HERE"] = tmp_path / "model_cards"
    MAKE["keep"](model, folder)
    kept = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert kept == {file: file.encode() for file in ("README.md", "retrieval.png", "assets/video_0.mp4")}
