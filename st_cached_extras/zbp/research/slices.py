"""Slice probes: where along the features an estimate errs, one slice at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from st_cached_extras.zbp.estimators import estimate, exact

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


def slice_probes(call: LayerCall) -> Tensor:
    """The rule of mode slice: features a to b − 1 of the last axis by central differences, the others exact.

    ``coordinates=(a, b)``. Probes are drawn among the slice alone, and ε is relative to its RMS: for d dimensions of
    it the variance is d / n − 1 (orthogonal) times |g_slice|². Exact backpropagation runs for the others, which the
    statistics count.

    Raises:
        ValueError: no coordinates are given, or the layer has fewer.
    """
    config = call.config
    if config.coordinates is None:
        raise ValueError("mode='slice' estimates some features and no others: give coordinates=(first, after_last).")
    a, b = config.coordinates
    if b > call.x.shape[-1]:
        raise ValueError(
            f"coordinates=({a}, {b}), but the input of the layer {call.name!r} has {call.x.shape[-1]} features."
        )
    gradient = exact(call)

    def f(part: Tensor) -> Tensor:
        before, after = (side.expand(*part.shape[:-1], side.shape[-1]) for side in (call.x[..., :a], call.x[..., b:]))
        return call.f(torch.cat([before, part, after], -1))

    part = replace(
        call, f=f, x=call.x[..., a:b], differentiable=None, config=config.replace(mode="cd", surrogate=False)
    )
    estimated = estimate(part)
    call.eps = part.eps
    return torch.cat([gradient[..., :a], estimated, gradient[..., b:]], -1)
