"""The benchmarks are all in the list, run in miniature, and what they print is read as it stands."""

import ast
import json
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import BENCHMARKS, SETTINGS, main
from tests.benchmarks.measure import table
from tests.benchmarks.report import find_table, read_report

FOLDER = Path(__file__).parent / "benchmarks"


def has_main(file):
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(file.read_text()).body)


def test_every_command_is_a_benchmark_and_every_setting_is_of_one():
    assert set(BENCHMARKS) == {file.stem for file in FOLDER.glob("*.py") if has_main(file)} - {"__main__"}
    assert set(SETTINGS) <= set(BENCHMARKS)


def test_tables_are_read_as_they_are_printed():
    head = "Xeon, 2 cores; Python 3.11.7, torch 2.14\npython -m tests.benchmarks.step --batch_size 4\n"
    printed = f"{head}\n### Seconds\n\n{table(['side', 'CPU-s'], [['a', '1.50'], ['b', '']])}\n\nand\n\n"
    printed += table(["B", "of"], [[8, "0.44"]])
    report = read_report(printed)
    assert report["machine"].startswith("Xeon") and report["command"] == head.splitlines()[1]
    first, second = report["tables"]
    assert first == {
        "title": "Seconds",
        "columns": ["side", "CPU-s"],
        "rows": [{"side": "a", "CPU-s": 1.5}, {"side": "b", "CPU-s": ""}],
    }
    assert second["title"] == "and" and second["rows"] == [{"B": 8.0, "of": 0.44}]
    assert find_table([report, report], "B", "of") == 2 * second["rows"]


def test_miniatures_leave_tables_data_and_figures(tmp_path):
    main(["--quick", "levers", "mmd", "--output", str(tmp_path)])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"{name}.{kind}" for name in ("levers", "mmd") for kind in ("json", "md", "png")
    ]
    (report,) = json.loads((tmp_path / "levers.json").read_text())
    assert report["command"].startswith("python -m tests.benchmarks.levers --batch_size 12")
    (steps,) = report["tables"]
    assert len(steps["rows"]) == 5 and all(row["gradients differ by"] < 1e-4 for row in steps["rows"])
    assert "| all levers |" in (tmp_path / "levers.md").read_text()


def test_an_unknown_benchmark_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["steps"])
    assert "no benchmark is called steps; there are step, scaling" in capsys.readouterr().err
