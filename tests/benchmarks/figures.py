"""Figures of the benchmarks' tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.benchmarks.report import find_table

Reports = list[dict[str, Any]]
Rows = list[dict[str, Any]]


def draw(name: str, reports: Reports, file: Path) -> bool:
    """Draw what there is to see in the reports of benchmark ``name``; False if there is nothing."""
    figure = FIGURES[name](reports) if name in FIGURES else None
    if figure is None:
        return False
    figure.savefig(file, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return True


def scaling(reports: Reports) -> Figure | None:
    """Time and peak memory against B."""
    rows = find_table(reports, "B", "loss", "CPU-s", "growth of the peak, MiB")
    return _against_batch(
        rows, "loss", {"CPU-s": "CPU-s a step", "growth of the peak, MiB": "growth of the peak, MiB"}
    )


def loss_stage(reports: Reports) -> Figure | None:
    """Seconds against B, ours and ST's beside the products."""
    rows = find_table(reports, "B", "InfoNCE", "of products")
    sides = {
        "InfoNCE": lambda row: row["InfoNCE"],
        "sentence-transformers, at its best": lambda row: _least(row, "ST "),
        "the bare products": lambda row: _least(row, "products"),
    }
    curves = [
        {"B": row["B"], "side": side, "CPU-s": value(row)}
        for row in rows
        for side, value in sides.items()
        if value(row) is not None
    ]
    return _against_batch(curves, "side", {"CPU-s": "CPU-s of the loss stage"})


def levers(reports: Reports) -> Figure | None:
    """A step with all levers, and with each off."""
    tables = [table for report in reports for table in report["tables"] if "of all levers" in table["columns"]]
    if not tables:
        return None
    figure, all_axes = plt.subplots(len(tables), 1, figsize=(7, 2.2 * len(tables)), squeeze=False)
    for axes, table in zip(all_axes.flat, tables, strict=True):
        _bars(axes, [row["step"] for row in table["rows"]], [row["CPU-s"] for row in table["rows"]], "CPU-s a step")
    figure.tight_layout()
    return figure


def mmd(reports: Reports) -> Figure | None:
    """Seconds against B, ours and autograd's beside the products, a panel for every width and number of landmarks."""
    rows = find_table(reports, "B", "D", "m", "ours", "chunked", "products", "ours / products")
    panels = list(dict.fromkeys((row["D"], row["m"]) for row in rows))
    if not panels:
        return None
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


def selection(reports: Reports) -> Figure | None:
    """What differentiating a share of the rows saves, and the error that it brings."""
    rows = find_table(reports, "b/B", "of the full step", "relative error of a draw", "predicted")
    if not rows:
        return None
    figure, (time, error) = plt.subplots(1, 2, figsize=(7, 3))
    shares = [row["b/B"] for row in rows]
    time.plot(shares, [row["of the full step"] for row in rows], marker="o")
    time.set_ylabel("time, of the full step")
    error.plot(shares, [row["relative error of a draw"] for row in rows], marker="o", label="measured")
    error.plot(shares, [row["predicted"] for row in rows], linestyle="--", label="predicted")
    error.set_ylabel("relative error of the gradient")
    error.legend()
    for axes in (time, error):
        axes.set_xlabel("share of the rows that is differentiated")
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    return figure


def zbp(reports: Reports) -> Figure | None:
    """Forwards that a step through a layer costs, by mode."""
    rows = find_table(reports, "mode", "forwards a step")
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(7, 2.5))
    _bars(axes, [row["mode"] for row in rows], [row["forwards a step"] for row in rows], "forwards a step")
    figure.tight_layout()
    return figure


def memory(reports: Reports) -> Figure | None:
    """Growth of the peak over a step beside what it must hold."""
    columns = ("B", "growth over the step, MiB", "features, cotangents, copy, chunk, states, MiB")
    rows = find_table(reports, *columns)
    curves = [{"B": row["B"], "side": name, "MiB": row[name]} for row in rows for name in columns[1:]]
    return _against_batch(curves, "side", {"MiB": "MiB"})


FIGURES: dict[str, Callable[[Reports], Figure | None]] = {
    "scaling": scaling,
    "loss_stage": loss_stage,
    "levers": levers,
    "memory": memory,
    "mmd": mmd,
    "selection": selection,
    "zbp": zbp,
}


def _against_batch(rows: Rows, side: str, quantities: dict[str, str]) -> Figure | None:
    """A panel for every quantity (column: its label), a curve for every side."""
    if not rows:
        return None
    figure, all_axes = plt.subplots(1, len(quantities), figsize=(4.5 * len(quantities), 3.2), squeeze=False)
    for axes, (column, label) in zip(all_axes.flat, quantities.items(), strict=True):
        for name in dict.fromkeys(row[side] for row in rows):
            here = sorted((row["B"], row[column]) for row in rows if row[side] == name)
            axes.plot(*zip(*here, strict=True), marker="o", label=name)
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
