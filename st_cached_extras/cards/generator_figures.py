"""The pictures of a generator: what it draws as training goes on, and how far its clips are from real ones."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from st_cached_extras.cards.figures import COLOURS, FAINT, INK, save_png, strip, wrap_caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def contact_sheet_figure(path: str | os.PathLike, captions: Sequence[str], columns: Mapping[str, np.ndarray]) -> Path:
    """Draws clips as strips of frames in time order, a row per caption, and saves the picture as a PNG.

    Args:
        path: Where the picture goes. It appears whole or not at all.
        captions: Of the rows.
        columns: Heading → clips, uint8 [captions, frames, height, width, 3].

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure

    rows = len(captions)
    figure = Figure(figsize=(2.2 + 2.9 * len(columns), 0.45 + 0.8 * rows), dpi=100, facecolor="white")
    left = 2.2 / figure.get_figwidth()
    top = 1 - 0.42 / figure.get_figheight()
    axes = figure.subplots(
        rows,
        len(columns),
        squeeze=False,
        gridspec_kw={"left": left, "right": 0.995, "top": top, "bottom": 0.01, "wspace": 0.04, "hspace": 0.08},
    )
    for row, caption in enumerate(captions):
        axes[row, 0].text(
            -0.03, 0.5, wrap_caption(caption), transform=axes[row, 0].transAxes, ha="right", va="center", color=INK
        )
        for axis, clips in zip(axes[row], columns.values(), strict=True):
            axis.imshow(strip(clips[row]), interpolation="nearest")
            axis.axis("off")
    for axis, heading in zip(axes[0], columns, strict=True):
        axis.set_title(heading, fontsize=11, color=INK, pad=6)
    return save_png(figure, path)


def generator_curves_figure(
    path: str | os.PathLike,
    raw: Sequence[Mapping[str, float]],
    floors: Mapping[str, float],
    scores: Mapping[int, Mapping[str, float]],
    floor_distance: float,
) -> Path:
    """Draws how a generator came closer to real clips, and saves the picture as a PNG.

    Args:
        path: Where the picture goes. It appears whole or not at all.
        raw: Per step, the raw value of every encoder's discrepancy in the batch that was trained on.
        floors: By encoder, what real clips score.
        scores: By step, the raw values "mmd/ENCODER" that compare with the floors, and what was not trained against,
            "sliced_wasserstein" and the shares "read/NAME".
        floor_distance: The sliced Wasserstein distance of real clips from real clips.

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), dpi=100, facecolor="white")
    matched, distance, read = figure.subplots(
        1, 3, gridspec_kw={"left": 0.055, "right": 0.985, "top": 0.9, "bottom": 0.13, "wspace": 0.2}
    )
    for colour, (name, floor) in zip(itertools.cycle(COLOURS), floors.items(), strict=False):
        matched.plot([values[name] for values in raw], color=colour, linewidth=1, alpha=0.3)
        judged = {step: found[f"mmd/{name}"] for step, found in sorted(scores.items())}
        matched.plot(list(judged), list(judged.values()), "o-", color=colour, linewidth=1.6, label=name)
        matched.axhline(floor, color=colour, linestyle="--", linewidth=1.4)
    matched.plot([], [], "--", color=FAINT, label="real clips")
    matched.plot([], [], color=FAINT, linewidth=1, alpha=0.5, label="batches in training")
    matched.set_yscale("log")
    _finish(matched, "raw MMD² under each encoder")

    steps = sorted(scores)
    distance.plot(
        steps,
        [scores[step]["sliced_wasserstein"] for step in steps],
        "o-",
        color=COLOURS[0],
        label="generated against real",
    )
    distance.axhline(floor_distance, linestyle="--", color=FAINT, label="real against real")
    distance.set_ylim(bottom=0)
    _finish(distance, "sliced Wasserstein under a held-out encoder")

    names = [name for name in scores[steps[0]] if name.startswith("read/")]
    for colour, name in zip(itertools.cycle(COLOURS), names, strict=False):
        read.plot(
            steps,
            [scores[step][name] for step in steps],
            "o-",
            color=colour,
            label=name.removeprefix("read/"),
        )
    read.set_ylim(0, 1.02)
    _finish(read, "share of clips that show what was asked for")
    return save_png(figure, path)


def _finish(axis: Axes, title: str) -> None:
    axis.set_xlabel("step")
    axis.set_title(title, fontsize=11, color=INK, pad=8)
    axis.grid(color="#e6e6e6")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9.5, frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
