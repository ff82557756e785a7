"""The comparison command runs every mode, at equal queries, and leaves a table and a figure."""

import sys

from PIL import Image

from st_cached_extras.zbp.config import KNOWN_MODES
from tests.benchmarks import zbp_modes

# Decided before a backward runs; for layers that pool; and what "replay" begins with.
ELSEWHERE = {"auto", "bp", "broadcast", "capture"}


def test_every_mode_is_compared_at_equal_queries(tmp_path, monkeypatch, capsys):
    arguments = "--queries 6 --steps 2 --every 1 --batch_size 4 --seeds 0 1 --figure"
    monkeypatch.setattr(sys, "argv", ["zbp_modes", *arguments.split(), str(tmp_path / "modes.png")])
    zbp_modes.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)}
    assert rows.keys() == zbp_modes.configurations(6, 4).keys()
    queries = {name: int(row[2]) for name, row in rows.items()}
    assert set(queries.values()) == {0, 6, 8} and queries["score_qk, window 4"] == 8
    assert {name.split(",")[0] for name in rows} == KNOWN_MODES - ELSEWHERE
    exact_backwards = {name.split(",")[0] for name, row in rows.items() if int(row[3])}
    assert exact_backwards == {"exact", "oracle", "noise", "slice", "score_k", "score_qk"}
    assert rows["exact"][0] == "1.00" and rows["exact"][1] == "0.00" and rows["zero"][1] == "1.00"
    with Image.open(tmp_path / "modes.png") as picture:
        assert picture.width >= 900 and picture.height >= 500
