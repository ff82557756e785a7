"""Every private name of a dependency that the package relies on, in one place.

An upgrade that moves one of them breaks here, at import, with a message that says what to do.
"""

from __future__ import annotations

from typing import Any

import sentence_transformers
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig

try:
    from sentence_transformers.base.losses.gradcache import _get_batch_size as get_batch_size
except ImportError as error:
    raise ImportError(
        f"st-cached-extras uses a helper of sentence-transformers that version {sentence_transformers.__version__} "
        f"no longer has where 6.2 had it ({error}). Install a supported version: "
        'pip install "sentence-transformers>=6.2,<7", or upgrade st-cached-extras.'
    ) from error

__all__ = ["dataset_fingerprint", "get_batch_size", "source_of", "uncompiled"]


def uncompiled(model: nn.Module) -> Any:
    """The module inside a ``torch.compile`` wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def dataset_fingerprint(dataset: Dataset) -> str:
    """A hash of a dataset's content and of what was done to it."""
    return dataset._fingerprint


def source_of(config: PretrainedConfig) -> str:
    """The id or path that a configuration was loaded from."""
    return config._name_or_path
