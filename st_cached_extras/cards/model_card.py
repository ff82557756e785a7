"""The model card: sentence-transformers' card data with a template of ours that says how a run can be repeated.

The Trainer fills in what it knows (data, loss, hyperparameters, logs); a script adds what it alone knows (scores
before and after, figures, the command, limits, and what nobody has tested). Neither a licence nor a base model is
guessed, and the Hub is asked about nothing but the ids of models and datasets that came from it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from torch import nn

from st_cached_extras._compat import source_of
from st_cached_extras.losses import CachedCompositeLoss

FOLDER = "path/to/the/folder/of/this/card"


@dataclass
class ReplayModelCardData(SentenceTransformerModelCardData):
    """Card data with room for what makes a run repeatable and its result checkable.

    All that `SentenceTransformerModelCardData` takes, and:

    Args:
        summary: What was trained, in a sentence or two.
        data: What it was trained and evaluated on: a label and a description each, such as a split's size and
            fingerprint.
        run: Facts of the run, such as batch, mini-batch and seed.
        scores: Rows of the table of results, each from column name to value, all with the same columns. Floats
            print with three decimals.
        score_note: How to read the table.
        figures: Picture files and their captions. Each save of the model gets its own copy.
        command: The command line, as from `command_line()`.
        limits: Known limits, a sentence each.
        untested: What the scores do not speak of, a sentence each.

    Example:
        >>> card = ReplayModelCardData(model_name="Video retriever", limits=["Knows 25 words."])
        >>> model = SentenceTransformer("path", model_card_data=card)
        >>> card.scores = [{"Metric": "R@5", "Before": 0.08, "After": 0.95}]
        >>> model.save_pretrained("output/final")
    """

    summary: str = ""
    data: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    scores: list[dict[str, Any]] = field(default_factory=list)
    score_note: str = ""
    figures: list[tuple[str, str]] = field(default_factory=list)
    command: str = ""
    limits: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)

    template_path: Path = field(default=Path(__file__).with_name("template.md"), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.add_tags("st-cached-extras")

    def get_model_specific_metadata(self) -> dict[str, Any]:
        return {
            **super().get_model_specific_metadata(),
            "version": {**self.version, "st_cached_extras": version("st-cached-extras")},
            "score_table": markdown_table(self.scores),
            "figures": [(Path(path).name, caption) for path, caption in self.figures],
            "install": 'pip install "st-cached-extras[video]"' if self._clips() else "pip install st-cached-extras",
        }

    def set_losses(self, losses: list[nn.Module]) -> None:
        """Cites and tags losses; those that a composite is made of are tagged, and cited by it."""
        super().set_losses(losses)
        for composite in (loss for loss in losses if isinstance(loss, CachedCompositeLoss)):
            for component in composite.components.values():
                parts = (component, getattr(component, "loss", None), getattr(component, "objective", None))
                names = [type(part).__name__ for part in parts if part is not None]
                self.add_tags([f"loss:{name}" for name in names if not name.startswith("_")])

    def generate_usage_snippet(self) -> str:
        """Example code; clips go through `read_video`, because a path may be taken for text, or need torchcodec."""
        clips = self._clips()
        if not clips or not self.usage_examples_display:
            snippet = super().generate_usage_snippet()
            if self.model_id:
                return snippet
            snippet = snippet.replace("# Download from the 🤗 Hub\n", "")
            return snippet.replace("sentence_transformers_model_id", FOLDER)
        texts = [example for example in self.usage_examples if isinstance(example, str)]
        names = [name for name in self.usage_examples_display if name.startswith("assets/")]
        folder = f'snapshot_download("{self.model_id}")' if self.model_id else f'"{FOLDER}"'
        lines = [
            *(["from huggingface_hub import snapshot_download"] if self.model_id else []),
            "from sentence_transformers import SentenceTransformer",
            "from st_cached_extras.data import read_video",
            "",
            f"folder = {folder}",
            "model = SentenceTransformer(folder)",
            f"captions = {json.dumps(texts, ensure_ascii=False)}",
            f"files = {json.dumps(names)}",
            f'videos = [read_video(f"{{folder}}/{{file}}", num_frames={len(clips[0]["array"])}) for file in files]',
            "",
            "similarities = model.similarity(model.encode_query(captions), model.encode_document(videos))",
            *(["print(similarities)", self.similarities] if texts and self.similarities else []),
        ]
        return "```python\n" + "\n".join(lines) + "\n```"

    def _clips(self) -> list[dict[str, Any]]:
        """The examples that are clips with metadata."""
        return [e for e in self.usage_examples or [] if isinstance(e, dict) and "video_metadata" in e]

    def set_base_model(self, model_id: str, revision: str | None = None) -> bool:
        """Names the base model, if it came from the Hub; a folder on this machine is no base model for a reader."""
        return not is_local(model_id) and super().set_base_model(model_id, revision)

    def try_to_set_base_model(self) -> None:
        # The plain guess makes Hub ids of any path's last parts, and asks the Hub about each.
        transformer = self.model.transformers_model
        if transformer is not None and not is_local(source_of(transformer.config)):
            super().try_to_set_base_model()

    def to_dict(self) -> dict[str, Any]:
        if self.usage_examples:
            # As a mapping with metadata, a clip is saved beside the card as an mp4 for readers to try.
            self.usage_examples = [_with_metadata(example) for example in self.usage_examples]
        for dataset in (*self.train_datasets, *self.eval_datasets):
            if isinstance(dataset.get("examples"), dict):
                dataset["examples"] = {
                    column: [_describe(value) for value in values] for column, values in dataset["examples"].items()
                }
        if self.save_dir is not None:
            for path, _ in self.figures:
                target = Path(self.save_dir) / Path(path).name
                if Path(path).resolve() != target.resolve():
                    shutil.copyfile(path, target)
        return super().to_dict()


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command that started this process, as it may be published: no secrets, no path of the script's folder."""
    script, *arguments = sys.argv if argv is None else argv
    shown = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = name.startswith("--") and name.replace("-", "_").endswith(("token", "password", "key"))
        shown.append("***" if hide_next else f"{name}=***" if secret and equals else argument)
        hide_next = secret and not equals
    relative = os.path.relpath(script)
    return shlex.join(["python", os.path.basename(script) if relative.startswith("..") else relative, *shown])


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table, the columns taken from the first."""
    if not rows:
        return ""
    columns = list(rows[0])
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"Every row of scores must have the columns {columns}, got {list(row)}.")
    lines = [columns, ["---"] * len(columns), *([_format(row[column]) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def is_local(name: str | os.PathLike) -> bool:
    """Whether a model's name is, or was, a path on this machine, not an id on the Hub ("name" or "owner/name")."""
    name = os.fspath(name)
    return not name or os.path.exists(name) or name[0] in "./\\~" or os.path.isabs(name) or name.count("/") > 1


def _format(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _is_clip(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 4 and value.dtype == np.uint8


def _is_clip_with_metadata(value: Any) -> bool:
    return isinstance(value, dict) and "video_metadata" in value and _is_clip(value.get("array"))


def _with_metadata(value: Any) -> Any:
    if not _is_clip(value):
        return value
    return {"array": value, "video_metadata": {"fps": 8.0, "total_num_frames": len(value)}}


def _describe(value: Any) -> Any:
    value = value["array"] if _is_clip_with_metadata(value) else value
    if not _is_clip(value):
        return value
    frames, height, width, _ = value.shape
    return f"video of {frames} frames, {width}x{height}"
