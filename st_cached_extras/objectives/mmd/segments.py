"""Tokens of texts of any length as a fixed number of vectors: what a token-wise reference can be compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_segments(token_embeddings: Tensor, attention_mask: Tensor, segments: int) -> Tensor:
    """Means over S consecutive parts of each row's active tokens, as even as they can be: [n, L, D] → [n, S, D].

    A row of T tokens gives token ⌊s·T/S⌋ and those up to the next part's first to part s, at least one: with fewer
    tokens than parts, neighbours share one. Padding has no part, wherever it stands.

    Args:
        token_embeddings: [n, L, D].
        attention_mask: [n, L], not 0 where a token is active.
        segments: S.
    """
    active = attention_mask != 0  # [n, L]
    count = active.sum(dim=1)[:, None]  # [n, 1]
    position = active.cumsum(dim=1) - 1  # [n, L]
    part = torch.arange(segments, device=active.device)
    first = part * count // segments  # [n, S]
    end = torch.maximum((part + 1) * count // segments, first + 1)
    inside = (position[:, None] >= first[..., None]) & (position[:, None] < end[..., None]) & active[:, None]
    members = inside.to(token_embeddings.dtype)  # [n, S, L]
    return members @ token_embeddings / members.sum(dim=2, keepdim=True).clamp_min(1)
