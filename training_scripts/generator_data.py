"""Real clips of `train_video_generator.py`, and what the generator is given in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from st_cached_extras.data import moving_shapes


def load_clips(split: str, count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Clips of moving shapes, uint8 [N, T, 3, H, W], and their captions."""
    data = moving_shapes(split, count, seed)
    return torch.stack([torch.from_numpy(row["video"]).movedim(-1, 1) for row in data]), list(data["caption"])


def random_batch(
    conditions: Tensor, batch_size: int, noise_size: int, seeds: tuple[int, int, int]
) -> dict[str, Tensor]:
    """What one step on one rank is given, whatever was drawn before it.

    Args:
        conditions: of the training captions, [N, words].
        batch_size: B.
        noise_size: numbers of noise per clip.
        seeds: of the run, the step and the rank.

    Returns:
        "noise" [B, noise_size] and "condition" [B, words], those of random captions.
    """
    seed, step, rank = seeds
    rng = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1009 + rank)
    rows = torch.randint(len(conditions), (batch_size,), generator=rng)
    noise = torch.randn(batch_size, noise_size, generator=rng)
    return {"noise": noise.to(conditions.device), "condition": conditions[rows.to(conditions.device)]}
