"""Feedback alignment: the transposed Jacobian replaced by a fixed random matrix.

Lillicrap, Cownden, Tweed & Akerman 2016, "Random synaptic feedback weights support error backpropagation for deep
learning", Nature Communications 7:13276, equation 1 with B for W^T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from st_cached_extras.zbp.probes import private_generator
from st_cached_extras.zbp.research.layout import FeedbackLayout

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


def feedback_alignment(call: LayerCall) -> Tensor:
    """The rule of mode fa: g = scale · v B, v = d loss / d output, B fixed.

    B [K, C] is shared by the tokens of a sequence. Where a layer turns a sequence into one vector, every token gets
    an equal share of v B, as in mode broadcast; between other shapes B maps all of a sample. With
    ``control="identity"`` the residual path stays exact, g = v + scale · v B. No query.
    """
    layout = FeedbackLayout(call, call.v.shape)
    gradient = carry(call, call.v, "fa", layout)
    if call.config.control == "identity":
        if call.v.shape != call.x.shape:
            raise ValueError(
                f"control='identity' needs a layer that keeps the shape of its input, got {tuple(call.x.shape)} to "
                f"{tuple(call.v.shape)}. Use control=None."
            )
        gradient = gradient + call.v
    return gradient.to(call.x.dtype)


def carry(call: LayerCall, signal: Tensor, kind: str, layout: FeedbackLayout) -> Tensor:
    """scale · signal B with the layer's fixed matrix of that kind; in spread layouts, a token's share of it."""
    matrix = fixed_matrix(call, kind, layout).to(torch.promote_types(signal.dtype, torch.float32))
    gradient = layout.project(signal, matrix)
    return call.config.feedback_scale * layout.share(gradient.dtype) * gradient


def fixed_matrix(call: LayerCall, kind: str, layout: FeedbackLayout) -> Tensor:
    """B [K, C], fp32, with independent entries N(0, 1 / C): |e B| = |e| on average, as of a fresh linear layer.

    It depends on the configuration's seed, the layer's name, the kind and the sizes, and on nothing else: not on
    rank, device or process. It is kept in the layer's memory, which checkpoints hold.
    """
    seed = call.config.seed
    key = f"{kind}.{seed}.{layout.key}"
    matrix = call.memory.get(key)
    if matrix is None:
        generator = private_generator(torch.device("cpu"), seed, call.name, "feedback", kind, *layout.sizes)
        matrix = torch.randn(layout.sizes, generator=generator) / layout.sizes[1] ** 0.5
    if key not in call.memory or matrix.device != call.x.device:
        call.memory[key] = matrix = matrix.to(call.x.device)
    return matrix
