"""The benchmarks are all in the list; of two, the miniatures run, and all figures are drawn from what is printed."""

import ast
import json
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from tests.benchmarks import figures, zbp
from tests.benchmarks.__main__ import BENCHMARKS, SETTINGS, commands, main, parse_arguments
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


def test_equal_time_comes_after_the_runs_that_it_reads(tmp_path, monkeypatch):
    words = commands(BENCHMARKS["zbp"], parse_arguments(["--output", str(tmp_path / "to here"), "--texts", ""]))
    parsed = []
    for command in words:
        monkeypatch.setattr(sys, "argv", ["zbp", *command])
        parsed.append(zbp.parse_arguments())
    parts = [arguments.part for arguments in parsed]
    assert sorted(parts) == sorted(["optical", "int8", "equal_time", "quality", "control", "cost", "memory"])
    results = {arguments.part: arguments.results for arguments in parsed}
    assert parts.index("optical") < parts.index("equal_time")
    assert results["optical"] == results["equal_time"] == [tmp_path / "to here" / "zbp_optical.json"]
    assert results["int8"] == [tmp_path / "to here" / "zbp_int8.json"]


# ------------------------------------------------------------------------------------------------------- figures

SHARES = ["b/B", "CPU-s", "wall s", "of the full step", "relative error of a draw", "predicted"]
GROWTH = ["B", "inputs, MiB", "growth over the step, MiB", "features, cotangents, copy, chunk, states, MiB"]
LOSS_STAGE = ["B", "InfoNCE", "ST 32", "ST 256", "products 128", "products 256", "× ST 32", "× ST best", "of products"]
# By benchmark, what its commands print in full runs: (arguments, columns, rows).
PRINTED = {
    "scaling": [
        (
            "",
            ["B", "loss", "mini-batches", "CPU-s", "wall s", "growth of the peak, MiB"],
            [
                [256, "ours", "rows 32", 4, 3, 50],
                [256, "ST plain", "whole", 8, 6, 900],
                [1024, "ours", "rows 32", 16, 9, 60],
            ],
        )
    ],
    "loss_stage": [
        (
            "--batch_sizes 4096 1024",
            LOSS_STAGE,
            [[4096, 0.3, 2.7, 0.7, 0.3, 0.31, 9, 2.3, 1], [1024, 0.02, 0.2, 0.05, 0.02, 0.019, 8, 2, 1]],
        ),
        (
            "--batch_sizes 65536 --tables blocks",
            ["B", "rows of a product", "InfoNCE", "products", "of products"],
            [[65536, 256, 96, 94, 1.02]],
        ),
    ],
    "levers": [
        (
            "--batch_size 2048",
            ["step", "CPU-s", "wall s", "of all levers", "gradients differ by"],
            [["all levers", 4, 3, 1, "0e+00"], ["without sorting", 6, 5, 1.5, "8e-07"]],
        ),
        (
            "--table directions",
            ["loss stage", "products shared, CPU-s", "each its own, CPU-s", "ratio", "gradients differ by"],
            [["2 directions, joint", 1, 2, 2, "0e+00"]],
        ),
    ],
    "memory": [
        ("--batch_sizes 512 8192", GROWTH, [[512, 1, 163, 6], [8192, 12, 195, 90]]),
        ("--batch_sizes 1024 65536 --layers 1", GROWTH, [[1024, 2, 10, 4], [65536, 114, 97, 132]]),
    ],
    "mmd": [
        (
            "",
            ["B", "D", "m", "ours", "dense", "chunked", "products", "chunked / ours", "ours / products"],
            [[512, 384, 512, 0.006, 0.01, 0.015, 0.004, 2.3, 1.5], [8192, 384, 512, 0.56, "", 2.6, 0.6, 4.7, 0.9]],
        )
    ],
    "selection": [
        (
            "",
            [*SHARES, "R@10 after 60 s", "steps"],
            [[1, 18, 12, 1, 0, 0, "0.1 (0.1)", 5], [0.5, 11, 8, 0.6, 0.39, 0.38, "0.1 (0.1)", 8]],
        ),
        (
            "--layers 1 --seconds 25",
            [*SHARES, "R@10 after 25 s", "steps"],
            [[1, 6, 4, 1, 0, 0, "0.2 (0.2)", 8], [0.5, 4, 2, 0.6, 0.44, 0.48, "0.2 (0.2)", 11]],
        ),
    ],
    "zbp": [
        ("control", ["gradient", "cosine with exact", "norm ratio"], [["ZBP, 16 probes", 0.9, 1]]),
        ("cost", ["mode", "forwards a step", "forwards a probe"], [["cd", 33, 2], ["backprop", 3, ""]]),
    ],
}


def reports_of(name, rename=lambda column: column):
    return [
        read_report(f"python -m tests.benchmarks.{name} {arguments}\n\n{table([*map(rename, head)], rows)}")
        for arguments, head, rows in PRINTED[name]
    ]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws a benchmark's figure; the figure, still open."""
    monkeypatch.setattr(plt, "close", lambda figure: None)

    def draw(name, reports):
        assert figures.draw(name, reports, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        return plt.gcf()

    yield draw
    monkeypatch.undo()
    plt.close("all")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(figures.FIGURES))
def test_every_figure_is_drawn_from_the_columns_that_are_printed(name, drawn):
    source = ast.parse((FOLDER / f"{name}.py").read_text())
    literals = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
    _, columns = figures.FIGURES[name]
    assert set(columns) <= literals
    for axes in drawn(name, reports_of(name)).axes:
        assert axes.lines or axes.patches
        for line in axes.lines:
            assert len(line.get_xdata()) > 0


@pytest.mark.parametrize("name", list(figures.FIGURES))
def test_columns_of_another_name_are_missed_aloud(name, tmp_path):
    _, columns = figures.FIGURES[name]
    renamed = reports_of(name, lambda column: "new name" if column == columns[-1] else column)
    with pytest.warns(UserWarning, match=rf"{name} has no figure: .*{columns[-1]}.*new name"):
        assert not figures.draw(name, renamed, tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_sides_of_the_loss_stage_are_missed_aloud(drawn):
    renamed = reports_of("loss_stage", lambda column: column.replace("ST ", "sentence-transformers "))
    with pytest.warns(UserWarning, match="no column has the values of sentence-transformers, at its best"):
        drawn("loss_stage", renamed)


@pytest.mark.filterwarnings("error")
def test_what_has_no_figure_or_no_table_is_no_matter(tmp_path):
    assert not figures.draw("step", reports_of("levers"), tmp_path / "none.png")
    assert not figures.draw("memory", [read_report("nothing\n")], tmp_path / "none.png")


def test_of_two_commands_each_has_its_panel_or_its_lines(drawn):
    small, large = drawn("memory", reports_of("memory")).axes
    assert small.get_title() == "--batch_sizes 512 8192"
    assert large.get_title() == "--batch_sizes 1024 65536 --layers 1"
    assert [list(line.get_ydata()) for line in small.lines] == [[163, 195], [6, 90]]
    assert [list(line.get_ydata()) for line in large.lines] == [[10, 97], [4, 132]]

    time, error = drawn("selection", reports_of("selection")).axes
    assert [line.get_label() for line in time.lines] == ["defaults", "--layers 1 --seconds 25"]
    found = {line.get_label(): list(line.get_ydata()) for line in error.lines}
    assert found == {
        "defaults, measured": [0, 0.39],
        "defaults, predicted": [0, 0.38],
        "--layers 1 --seconds 25, measured": [0, 0.44],
        "--layers 1 --seconds 25, predicted": [0, 0.48],
    }


def test_of_commands_is_told_what_not_all_of_them_have():
    one, two = "python -m it --layers 1 --wordnet /a", "python -m it --wordnet /a --layers 2 --sides a 'b c'"
    assert figures.what_differs([one, two]) == ["--layers 1", "--layers 2 --sides a 'b c'"]
    assert figures.what_differs(["python -m it", "python -m it part --x"]) == ["defaults", "part --x"]
    assert figures.what_differs([one]) == [""]


def test_an_unknown_benchmark_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["steps"])
    assert "no benchmark is called steps; there are step, scaling" in capsys.readouterr().err
