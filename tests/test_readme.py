"""Every Python snippet of the README runs, on a tiny model in place of the one from the Hub."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from st_cached_extras.testing.tiny_models import tiny_text_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
HUB_MODEL = '"sentence-transformers/all-MiniLM-L6-v2"'


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_the_snippet_runs(index, tmp_path):
    tiny_text_model().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    code = SNIPPETS[index].replace(HUB_MODEL, repr(str(tmp_path / "model")))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)


def test_both_commands_set_up_a_fresh_machine_and_name_files_that_exist():
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
        assert all((ROOT / path).exists() for path in re.findall(r"\S+/\S+\.py", command))
