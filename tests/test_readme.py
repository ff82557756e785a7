"""Every Python snippet of the README and of the pages in ``docs/`` runs, on a tiny model in place of the Hub's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from st_cached_extras.testing.tiny_models import tiny_text_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.stem}-{index}")
    for page in PAGES
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
HUB_MODEL = '"sentence-transformers/all-MiniLM-L6-v2"'


@pytest.mark.parametrize("code", SNIPPETS)
def test_the_snippet_runs(code, tmp_path):
    tiny_text_model().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    code = code.replace(HUB_MODEL, repr(str(tmp_path / "model")))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)


def test_both_commands_set_up_a_fresh_machine_and_name_files_that_exist():
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
        assert all((ROOT / path).exists() for path in re.findall(r"\S+/\S+\.py", command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_that_exist(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
