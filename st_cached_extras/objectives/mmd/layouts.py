"""How the features of one encoder, vectors or tokens, become the rows that a kernel compares, and the way back.

Blocks are [P, B, D]: P kernels side by side, whose statistics are averaged.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["flatten", "per_token", "mean"]
LAYOUTS = ("flatten", "per_token", "mean")


def check_layout(layout: str, name: str, sample_shape: tuple[int, ...]) -> None:
    """A ValueError unless there is such a layout and it takes rows of this shape."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: found {layout!r}, expected one of {LAYOUTS}. Give 'flatten' for vectors.")
    if not sample_shape or 0 in sample_shape or (layout != "flatten" and len(sample_shape) != 2):
        expected = "[B, ...] with at least one value a row" if layout == "flatten" else "[B, tokens, D]"
        raise ValueError(
            f"{name}: rows of shape {list(sample_shape)}, expected {expected} with layout={layout!r}. Give "
            "layout='flatten' for one vector per row."
        )


def to_blocks(x: Tensor, layout: Layout, condition: Tensor | None = None) -> Tensor:
    """Rows [B, ...] as blocks [P, B, D].

    Args:
        x: "flatten": [B, ...] → [1, B, D], one kernel on all values of a row. "per_token": [B, P, D] → [P, B, D], one
            kernel per position. "mean": [B, N, D] → [1, B, D], one kernel on the mean over positions.
        layout: which of the three.
        condition: [B, C], appended to the rows of every block: the law of (features, condition) is compared.
    """
    if layout == "flatten":
        blocks = x.flatten(1)[None]
    elif layout == "mean":
        blocks = x.mean(dim=1)[None]
    else:
        blocks = x.transpose(0, 1)
    if condition is None:
        return blocks
    return torch.cat([blocks, condition.to(blocks.dtype).expand(len(blocks), -1, -1)], dim=2)


def from_blocks(gradient: Tensor, layout: Layout, sample_shape: tuple[int, ...]) -> Tensor:
    """d/d rows [b, ...] out of d/d blocks [P, b, D], without the part of a condition."""
    gradient = gradient[..., : sample_shape[-1] if layout != "flatten" else torch.Size(sample_shape).numel()]
    if layout == "flatten":
        return gradient[0].reshape(-1, *sample_shape)
    if layout == "mean":
        return (gradient[0] / sample_shape[0])[:, None].expand(-1, *sample_shape).contiguous()
    return gradient.transpose(0, 1).contiguous()
