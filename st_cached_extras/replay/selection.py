"""Which rows are differentiated, and the weight that keeps the gradient unbiased.

The objective sees all B rows of a batch, but only b of them are embedded a second time. With the b drawn uniformly
without replacement, before anything is embedded, and their cotangents multiplied by B/b, the parameter gradient is
right on average, with total variance B(B − b)/b · S², S² the sample variance (divisor B − 1) of the rows' gradients.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def count_differentiated(differentiated: int | float | None, count: int) -> int:
    """How many of ``count`` rows are differentiated.

    Args:
        differentiated: a number of rows (all, where there are fewer), a share of them between 0 and 1 (at least one
            row), or None for all.
        count: the rows there are.
    """
    if differentiated is None:
        return count
    if isinstance(differentiated, int):
        return min(differentiated, count)
    return max(1, round(differentiated * count))


def check_differentiated(name: str, differentiated: int | float | None) -> None:
    """Raise unless it is a positive int, a float in (0, 1], or None."""
    if differentiated is None:
        return
    if isinstance(differentiated, bool) or not isinstance(differentiated, (int, float)):
        raise TypeError(
            f"{name} must be a number of rows (int) or a share of them (float), got {differentiated!r} of type "
            f"{type(differentiated).__name__}."
        )
    fits = differentiated >= 1 if isinstance(differentiated, int) else 0 < differentiated <= 1
    if not fits:
        raise ValueError(
            f"{name} must be at least 1 row (int) or a share above 0 and up to 1 (float), got {differentiated!r}. "
            "None differentiates all rows."
        )


def draw_rows(count: int, drawn: int, *, seed: int, step: int, rank: int) -> Tensor:
    """``drawn`` of ``count`` rows, uniformly without replacement, in ascending order: int64 [drawn].

    The draw depends on seed, step and rank alone, and leaves the global random state as it was.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randperm(count, generator=generator)[:drawn].sort().values


def stacked_rows(rows: Tensor, columns: int, count: int) -> Tensor:
    """The same ``rows`` (int64 [b]) of each of several columns that are stacked to ``count`` rows: [columns · b]."""
    starts = torch.arange(0, count, count // columns, device=rows.device)
    return (starts[:, None] + rows).flatten()
