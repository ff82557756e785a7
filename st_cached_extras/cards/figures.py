"""The picture of a retriever: what it finds for captions that it never saw, and how often it is right.

Drawn with matplotlib's own objects, never pyplot: no global state, no display, safe in a training process.
"""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

RIGHT, WRONG, INK, FAINT = "#2ca25f", "#b8b8b8", "#222222", "#8a8a8a"
COLOURS = ("#1f5fa8", "#d9730d", "#7b4ea3", "#3a8f8f", "#b8405e", "#6b7a1f")
STRIP_FRAMES = 4


class Retrieved(NamedTuple):
    """What one caption brought up: its best clips or images, and which are right.

    A clip is [frames, height, width, 3] in uint8, or a mapping with that as "array"; an image is [height, width, 3],
    or a PIL image.
    """

    caption: str
    clips: Sequence[Any]
    right: Sequence[bool]


def retrieval_figure(
    path: str | os.PathLike,
    retrieved: Sequence[Retrieved],
    ranks: Mapping[str, tuple[np.ndarray, np.ndarray]],
    chance: Mapping[str, np.ndarray],
    *,
    captions_are: str = "caption",
    answers_are: str = "clip",
) -> Path:
    """Draws the best clips of some captions beside the recall curves, and saves the picture as a PNG.

    Args:
        path: Where the picture goes. It appears whole or not at all.
        retrieved: The captions to show, a row each, with their best clips or images from left to right. A clip is
            shown as a strip of frames in time order, framed in green where it is right. None: only the curves.
        ranks: Per split, the rank of the right answer for every query before and after training, each int of
            shape [queries], where 0 is the best.
        chance: Per split, the recall at 1, 2, ... of answers in random order, each of shape [max_k]; the curves go as
            far.
        captions_are: Heading of the captions, such as "caption, never trained on".
        answers_are: What is found.

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure

    if retrieved:
        figure = Figure(figsize=(14, 0.4 + 0.78 * max(len(retrieved), 5)), dpi=100, facecolor="white")
        gallery, curves = figure.subfigures(1, 2, width_ratios=(2.35, 1))
        _draw_gallery(gallery, retrieved, captions_are, answers_are)
    else:
        figure = curves = Figure(figsize=(8, 5), dpi=100, facecolor="white")
    _draw_curves(curves, ranks, chance, answers_are)

    return save_png(figure, path)


def save_png(figure: Figure, path: str | os.PathLike) -> Path:
    """Saves a figure, whole or not at all, and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(unfinished, format="png")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _draw_gallery(
    figure: SubFigure | Figure, retrieved: Sequence[Retrieved], captions_are: str, answers_are: str
) -> None:
    from matplotlib.transforms import blended_transform_factory

    columns = max((len(row.clips) for row in retrieved), default=1)
    left = 0.235  # where captions end and pictures begin, however wide those are
    axes = figure.subplots(
        len(retrieved),
        columns,
        squeeze=False,
        gridspec_kw={"left": left, "right": 0.985, "top": 0.915, "bottom": 0.02, "wspace": 0.05, "hspace": 0.14},
    )
    for axis in axes.flat:
        axis.axis("off")
    for row, (caption, clips, right) in enumerate(retrieved):
        figure.text(
            left - 0.01,
            0.5,
            wrap_caption(caption),
            transform=blended_transform_factory(figure.transSubfigure, axes[row, 0].transAxes),
            ha="right",
            va="center",
            fontsize=10,
            color=INK,
        )
        for axis, clip, is_right in zip(axes[row], clips, right, strict=False):
            axis.axis("on")
            axis.imshow(_picture(clip), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(color=RIGHT if is_right else WRONG, linewidth=4 if is_right else 2)
    for column in range(columns):
        title = (f"best {answers_are}", "second", "third")[column] if column < 3 else f"number {column + 1}"
        axes[0, column].set_title(title, fontsize=11, color=INK, pad=8)
    figure.text(left - 0.01, 0.928, captions_are, ha="right", va="baseline", fontsize=11, color=INK)


def _draw_curves(
    figure: SubFigure | Figure,
    ranks: Mapping[str, tuple[np.ndarray, np.ndarray]],
    chance: Mapping[str, np.ndarray],
    answers_are: str,
) -> None:
    axis = figure.subplots(gridspec_kw={"left": 0.12, "right": 0.965, "top": 0.915, "bottom": 0.115})
    max_k = max(map(len, chance.values()))
    for colour, (split, (before, after)) in zip(itertools.cycle(COLOURS), ranks.items(), strict=False):
        k = np.arange(1, len(chance[split]) + 1)
        axis.plot(k, _recall(after, k), color=colour, linewidth=2.4, label=f"{split}, after")
        axis.plot(k, _recall(before, k), color=colour, linewidth=1.4, alpha=0.55, label=f"{split}, before")
    # One line for all splits whose chances are the same.
    by_chance = {tuple(np.round(curve, 9)): split for split, curve in reversed(chance.items())}
    for curve, split in by_chance.items():
        label = "chance" if len(by_chance) == 1 else f"{split}, chance"
        axis.plot(np.arange(1, len(curve) + 1), curve, "--", color=FAINT, linewidth=1.4, label=label)
    axis.set(xlim=(1, max_k), ylim=(0, 1.02), xlabel="k", xticks=[1, *range(5, max_k + 1, 5)])
    axis.set_title(f"how often the right {answers_are} is among the k best", fontsize=11, color=INK, pad=8)
    axis.grid(color="#e6e6e6")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="best", fontsize=9.5, frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)


def _recall(ranks: np.ndarray, k: np.ndarray) -> np.ndarray:
    return (np.asarray(ranks)[:, None] < k).mean(axis=0)  # [max_k]


def _picture(value: Any) -> np.ndarray:
    """A clip or an image as one picture, [height, width, 3]."""
    pixels = np.asarray(value["array"] if isinstance(value, Mapping) else value)
    return strip(pixels) if pixels.ndim == 4 else pixels


def strip(clip: np.ndarray) -> np.ndarray:
    """Some frames of a clip side by side, in time order, a thin white line between: [height, width', 3]."""
    chosen = clip[np.linspace(0, len(clip) - 1, STRIP_FRAMES).round().astype(int)]
    line = np.full((clip.shape[1], max(1, clip.shape[2] // 56), 3), 255, np.uint8)
    parts = [part for frame in chosen for part in (line, frame)][1:]
    return np.concatenate(parts, axis=1)


def wrap_caption(caption: str, width: int = 24, lines: int = 3) -> str:
    """A caption in a few short lines."""
    return "\n".join(textwrap.wrap(caption, width, max_lines=lines, placeholder=" …"))
