"""The encoders under which `train_video_generator.py` matches clips; six of them need no download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import is_sentence_transformer_model
from tiny_video_tower import tiny_video_tower
from torch import Tensor

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.encoders import (
    FrozenEncoder,
    Glimpse,
    Motion,
    PooledPixels,
    RandomConvolution3d,
    SentenceTransformerEncoder,
    load_encoder,
)
from st_cached_extras.objectives.mmd import NystromReference


def make_encoders(names: Sequence[str], tower: str | Path, *, dtype: str | None, mini_batch_size: int) -> dict:
    """Frozen encoders by name.

    Args:
        names: "tower", "convolution", "glimpse", "motion", "colours", "pixels"; or Hub ids and paths of image and
            video models, of transformers or of sentence-transformers.
        tower: path of the model that is called "tower".
        dtype: in which encoders that are loaded compute, such as "bfloat16"; None for that of their weights.
        mini_batch_size: clips at once.
    """
    options = {"dtype": dtype and getattr(torch, dtype), "mini_batch_size": mini_batch_size}
    encoders: dict[str, FrozenEncoder] = {}
    for name in names:
        if name == "pixels":
            encoders[name] = PooledPixels(mini_batch_size=mini_batch_size)
        elif name == "colours":
            encoders[name] = PooledPixels(rows=1, columns=1, mini_batch_size=mini_batch_size)
        elif name == "convolution":
            encoders[name] = RandomConvolution3d(mini_batch_size=mini_batch_size)
        elif name == "glimpse":
            encoders[name] = Glimpse(mini_batch_size=mini_batch_size)
        elif name == "motion":
            encoders[name] = Motion(mini_batch_size=mini_batch_size)
        else:
            path = str(tower) if name == "tower" else name
            if is_sentence_transformer_model(path):
                encoders[name] = SentenceTransformerEncoder(SentenceTransformer(path, device="cpu"), **options)
            else:
                encoders[name] = load_encoder(path, **options)
    return encoders


@torch.no_grad()
def features_of(encoders: Mapping[str, FrozenEncoder], clips: Tensor, batch_size: int = 64) -> dict[str, Tensor]:
    """Every encoder's features of uint8 clips [n, T, 3, H, W], on the clips' device."""
    parts = clips.split(batch_size)
    return {name: torch.cat([encoder(part.float() / 255) for part in parts]) for name, encoder in encoders.items()}


def fit_references(
    features: Mapping[str, Tensor], conditions: Tensor, condition_weight: float, **options: Any
) -> dict[str, NystromReference]:
    """What every encoder makes of real clips, and of their captions, summed up.

    Args:
        features: of every encoder, [N, ...].
        conditions: of the clips' captions, [N, words].
        condition_weight: how far apart captions are, in units of how far apart the clips are under each encoder.
        options: of :meth:`NystromReference.fit`.
    """
    references = {}
    for name, x in features.items():
        weight = condition_weight * spread(x) / spread(conditions)
        references[name] = NystromReference.fit(x, condition=conditions, condition_weight=weight, name=name, **options)
    return references


def spread(x: Tensor) -> float:
    """Root mean squared distance between two random rows."""
    return float((2 * x.flatten(1).var(dim=0).sum()).sqrt())


def train_tower(
    clips: Tensor, captions: Sequence[str], folder: Path, *, steps: int = 100, batch_size: int = 64, seed: int = 0
) -> None:
    """Train the retriever of `train_video_embedder.py` for a minute, and save it.

    Every rank trains the same one, in step with the others; the first rank saves it.

    Args:
        clips: uint8 [N, T, 3, H, W].
        captions: one per clip.
        folder: where the model goes.
        steps, batch_size, seed: of the training.
    """
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_video_tower(captions, num_frames=clips.shape[1], image_size=clips.shape[-1], device="cpu")
    loss = CachedInfoNCELoss(model, mini_batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), 1.5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, steps, pct_start=0.2)
    arrays = clips.movedim(2, -1).cpu().numpy()
    model.train()
    for _ in range(steps):
        chosen = {captions[row]: row for row in torch.randperm(len(clips), generator=rng).tolist()}  # none twice
        chosen = dict(list(chosen.items())[:batch_size])
        columns = [
            model.preprocess(list(chosen), task="query"),
            model.preprocess([arrays[row] for row in chosen.values()], task="document"),
        ]
        optimizer.zero_grad()
        loss(columns, None).backward()
        optimizer.step()
        schedule.step()
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        model.save_pretrained(str(folder), create_model_card=False)
