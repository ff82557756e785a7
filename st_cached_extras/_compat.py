"""Every private name of a dependency that the package relies on, in one place.

An upgrade that moves one of them breaks here, at import, with a message that says what to do.
"""

from __future__ import annotations

from typing import Any

import sentence_transformers
from torch import nn

try:
    from sentence_transformers.base.losses.gradcache import _create_minibatch as create_mini_batch
    from sentence_transformers.base.losses.gradcache import _get_batch_size as get_batch_size
except ImportError as error:
    raise ImportError(
        f"st-cached-extras uses two helpers of sentence-transformers that version {sentence_transformers.__version__} "
        f"no longer has where 6.2 had them ({error}). Install a supported version: "
        'pip install "sentence-transformers>=6.2,<7", or upgrade st-cached-extras.'
    ) from error

__all__ = ["create_mini_batch", "get_batch_size", "uncompiled"]


def uncompiled(model: nn.Module) -> Any:
    """The module inside a ``torch.compile`` wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)
