"""Figures of the benchmarks' tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """A table to draw.

    Attributes:
        label: what its command has that not all commands have; "" if there is one command.
        rows: by column.
    """

    label: str
    rows: Rows


def draw(name: str, reports: list[dict[str, Any]], file: Path) -> bool:
    """Draw what there is to see in the reports of benchmark ``name``; False if there is nothing.

    Warns if the reports have tables, and none with the columns of the figure.
    """
    if name not in FIGURES:
        return False
    picture, columns = FIGURES[name]
    labels = what_differs([report["command"] for report in reports])
    printed = [(label, table) for label, report in zip(labels, reports, strict=True) for table in report["tables"]]
    tables = [Table(label, table["rows"]) for label, table in printed if set(columns) <= set(table["columns"])]
    if not any(table.rows for table in tables):
        if printed:
            found = "; ".join(", ".join(table["columns"]) for _, table in printed)
            warnings.warn(
                f"{name} has no figure: it is drawn from a table with the columns {', '.join(columns)}, and the "
                f"tables have {found}.",
                stacklevel=2,
            )
        return False
    figure = picture(tables)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return True


def what_differs(commands: Sequence[str]) -> list[str]:
    """Of each command, the options that not all of them have; "defaults" where it has no more than all."""
    options = []
    for command in commands:
        first, *others = command.split(" --")
        options.append([*first.split(), *(f"--{option.strip()}" for option in others)])
    if len(commands) == 1:
        return [""]
    return [" ".join(x for x in own if not all(x in other for other in options)) or "defaults" for own in options]


def scaling(tables: list[Table]) -> Figure:
    """Time and peak memory against B."""
    growth = "growth of the peak, MiB"
    return _against_batch(_all_rows(tables), "loss", {"CPU-s": "CPU-s a step", growth: growth})


def loss_stage(tables: list[Table]) -> Figure:
    """Seconds against B, ours and ST's beside the products."""
    sides = {
        "InfoNCE": lambda row: row["InfoNCE"],
        "sentence-transformers, at its best": lambda row: _least(row, "ST "),
        "the bare products": lambda row: _least(row, "products"),
    }
    curves = [
        {"B": row["B"], "side": side, "CPU-s": value(row)}
        for row in _all_rows(tables)
        for side, value in sides.items()
        if value(row) is not None
    ]
    if missing := sides.keys() - {row["side"] for row in curves}:
        warnings.warn(f"loss_stage: no column has the values of {', '.join(sorted(missing))}.", stacklevel=3)
    return _against_batch(curves, "side", {"CPU-s": "CPU-s of the loss stage"})


def levers(tables: list[Table]) -> Figure:
    """A step with all levers, and with each off; a panel for every command."""
    figure, all_axes = plt.subplots(len(tables), 1, figsize=(7, 2.4 * len(tables)), squeeze=False)
    for axes, table in zip(all_axes.flat, tables, strict=True):
        _bars(axes, [row["step"] for row in table.rows], [row["CPU-s"] for row in table.rows], "CPU-s a step")
        axes.set_title(table.label, fontsize=7)
    figure.tight_layout()
    return figure


def mmd(tables: list[Table]) -> Figure:
    """Seconds against B, ours and autograd's beside the products, a panel for every width and number of landmarks."""
    rows = _all_rows(tables)
    panels = list(dict.fromkeys((row["D"], row["m"]) for row in rows))
    figure, all_axes = plt.subplots(1, len(panels), figsize=(3.5 * len(panels), 3), squeeze=False)
    for axes, (dim, landmarks) in zip(all_axes.flat, panels, strict=True):
        here = [row for row in rows if (row["D"], row["m"]) == (dim, landmarks)]
        for side in ("ours", "chunked", "products"):
            axes.plot([row["B"] for row in here], [row[side] for row in here], marker="o", label=side)
        _logarithmic(axes, "CPU-s")
        axes.set_title(f"D = {dim:g}, {landmarks:g} landmarks", fontsize=9)
    all_axes.flat[0].legend()
    figure.tight_layout()
    return figure


def selection(tables: list[Table]) -> Figure:
    """What differentiating a share of the rows saves, and the error that it brings; a line for every command."""
    figure, (time, error) = plt.subplots(1, 2, figsize=(7, 3))
    for table in tables:
        shares, before = [row["b/B"] for row in table.rows], f"{table.label}, " if table.label else ""
        [line] = time.plot(shares, [row["of the full step"] for row in table.rows], marker="o", label=table.label)
        for column, name, style in (
            ("relative error of a draw", "measured", {"marker": "o"}),
            ("predicted", "predicted", {"linestyle": "--"}),
        ):
            values = [row[column] for row in table.rows]
            error.plot(shares, values, color=line.get_color(), label=f"{before}{name}", **style)
    time.set_ylabel("time, of the full step")
    error.set_ylabel("relative error of the gradient")
    error.legend(fontsize=7)
    for axes in (time, error):
        axes.set_xlabel("share of the rows that is differentiated")
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    return figure


def zbp(tables: list[Table]) -> Figure:
    """Forwards that a step through a layer costs, by mode."""
    rows = _all_rows(tables)
    figure, axes = plt.subplots(figsize=(7, 2.5))
    _bars(axes, [row["mode"] for row in rows], [row["forwards a step"] for row in rows], "forwards a step")
    figure.tight_layout()
    return figure


MEMORY = ("growth over the step, MiB", "features, cotangents, copy, chunk, states, MiB")


def memory(tables: list[Table]) -> Figure:
    """Growth of the peak over a step beside what it must hold; a panel for every command."""
    figure, all_axes = plt.subplots(1, len(tables), figsize=(4.5 * len(tables), 3.4), squeeze=False)
    for axes, table in zip(all_axes.flat, tables, strict=True):
        for name in MEMORY:
            axes.plot(*_curve(table.rows, name), marker="o", label=name)
        _logarithmic(axes, "MiB")
        axes.set_title(table.label, fontsize=8)
    all_axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


# By benchmark, what draws its figure, and the columns by which it knows its tables.
FIGURES: dict[str, tuple[Callable[[list[Table]], Figure], tuple[str, ...]]] = {
    "scaling": (scaling, ("B", "loss", "CPU-s", "growth of the peak, MiB")),
    "loss_stage": (loss_stage, ("B", "InfoNCE", "of products")),
    "levers": (levers, ("step", "CPU-s", "of all levers")),
    "memory": (memory, ("B", *MEMORY)),
    "mmd": (mmd, ("B", "D", "m", "ours", "chunked", "products", "ours / products")),
    "selection": (selection, ("b/B", "of the full step", "relative error of a draw", "predicted")),
    "zbp": (zbp, ("mode", "forwards a step")),
}


def _all_rows(tables: list[Table]) -> Rows:
    """The rows of tables that go on where the one before ends."""
    return [row for table in tables for row in table.rows]


def _curve(rows: Rows, column: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(B, values), by B."""
    return tuple(zip(*sorted((row["B"], row[column]) for row in rows), strict=True))


def _against_batch(rows: Rows, side: str, quantities: dict[str, str]) -> Figure:
    """A panel for every quantity (column: its label), a curve for every side."""
    figure, all_axes = plt.subplots(1, len(quantities), figsize=(4.5 * len(quantities), 3.2), squeeze=False)
    for axes, (column, label) in zip(all_axes.flat, quantities.items(), strict=True):
        for name in dict.fromkeys(row[side] for row in rows):
            axes.plot(*_curve([row for row in rows if row[side] == name], column), marker="o", label=name)
        _logarithmic(axes, label)
    all_axes.flat[0].legend()
    figure.tight_layout()
    return figure


def _logarithmic(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _bars(axes: Axes, names: list[str], values: list[float], label: str) -> None:
    axes.barh(names[::-1], values[::-1], height=0.6)
    for place, value in enumerate(values[::-1]):
        axes.text(value, place, f" {value:g}", va="center", fontsize=8)
    axes.set_xlabel(label)
    axes.margins(x=0.12)


def _least(row: dict[str, Any], prefix: str) -> float | None:
    values = [value for name, value in row.items() if name.startswith(prefix) and isinstance(value, float)]
    return min(values, default=None)
