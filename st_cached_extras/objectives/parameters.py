"""What a loss or an objective owns and trains, as opposed to the models that it merely holds."""

from __future__ import annotations

from sentence_transformers.base.model import BaseModel
from torch import nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of ``module``, keyed as ``named_parameters()``, without those of any model in it.

    A model is a SentenceTransformer or one of its siblings, however it is wrapped: the one that a loss trains, or
    another one, such as a guide.
    """
    models = [child for child in module.modules() if isinstance(child, BaseModel)]
    of_models = {parameter for model in models for parameter in model.parameters()}
    return {name: p for name, p in module.named_parameters() if p.requires_grad and p not in of_models}
