"""Losses of every kind, made from a model and the options of the caching alone."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch import nn

from st_cached_extras.losses import (
    CachedCompositeLoss,
    CachedInfoNCELoss,
    CachedLoss,
    CachedMultiEncoderMMDLoss,
    CachedSigmoidLoss,
    CachedSupConLoss,
)
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference


class CachedCoSENT(CachedLoss):
    """A loss of sentence-transformers."""

    def __init__(self, model: SentenceTransformer, **options: Any) -> None:
        super().__init__(CoSENTLoss(model), **options)


class ContrastAndDistribution(CachedCompositeLoss):
    """Two losses with parameters of their own: a scale, of known gradient, and a head, which the replays train."""

    def __init__(self, model: SentenceTransformer, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        reference = NystromReference.fit(torch.randn(64, 5, generator=generator), landmarks=16, scales=(1.0, 4.0))
        head = nn.Linear(model.get_embedding_dimension(), 5)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(generator=generator)
        distribution = CachedMultiEncoderMMDLoss(model, MultiEncoderMMD({"encoder": reference}), {"encoder": head})
        losses = {"contrast": (InfoNCE(scale=2.0, learnable_scale=True), 1.0), "distribution": (distribution, 3.0)}
        super().__init__(model, losses, **options)


FAMILIES = {
    "infonce": CachedInfoNCELoss,
    "sigmoid": CachedSigmoidLoss,
    "supcon": CachedSupConLoss,
    "cosent": CachedCoSENT,
    "composite": ContrastAndDistribution,
}
