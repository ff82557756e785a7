"""The card of a generator: what was trained, on what, how it can be repeated, and what it scored."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from st_cached_extras.cards.model_card import markdown_table

PACKAGES = ("st-cached-extras", "torch", "sentence-transformers", "transformers", "accelerate")


def save_generator_card(
    folder: str | os.PathLike,
    *,
    name: str,
    summary: str,
    scores: Sequence[Mapping[str, Any]],
    figures: Sequence[tuple[str, str]],
    run: Mapping[str, Any],
    command: str,
    usage: str,
    limits: Sequence[str],
    untested: Sequence[str] = (),
    license: str | None = None,
) -> Path:
    """Writes README.md beside a generator that was saved to a folder.

    Args:
        folder: Where the generator is.
        name: Heading of the card.
        summary: What was trained, in a sentence or two.
        scores: Rows of the table of results, all with the same columns.
        figures: File names in the folder, and captions.
        run: Facts of the run, such as batch, encoders and seed.
        command: The command line that trained it, as from `command_line()`.
        usage: The command line that draws with it.
        limits: Known limits, a sentence each.
        untested: What the scores do not speak of, a sentence each.
        license: Identifier of the licence; None says nothing.

    Returns:
        The path of the card.
    """
    folder = Path(folder)
    for file, _ in figures:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"figures names {file!r}, which is not in {folder}.")
    data = ModelCardData(
        license=license,
        library_name="st-cached-extras",
        pipeline_tag="text-to-video",
        tags=["st-cached-extras", "distribution-matching", "text-to-video"],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("generator_template.md")),
        name=name,
        summary=summary,
        score_table=markdown_table([dict(row) for row in scores]),
        figures=figures,
        run=run,
        command=command,
        usage=usage,
        limits=limits,
        untested=untested,
        license=license,
        versions={package: version(package) for package in PACKAGES},
    )
    path = folder / "README.md"
    unfinished = folder / f".README.md.{os.getpid()}.tmp"
    unfinished.write_text(str(card))
    os.replace(unfinished, path)
    return path
