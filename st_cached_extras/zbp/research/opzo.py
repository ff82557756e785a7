"""Online pseudo-zeroth-order training: a feedback matrix that is learned from perturbed forwards.

Xiao, Meng, Zhang, He & Lin 2024, "Online Pseudo-Zeroth-Order Training of Neuromorphic Spiking Neural Networks",
arXiv 2407.12516. One more forward of the whole network, with noise α z added to the input of every layer, moves its
output from o to õ; with E[z z^T] = I the correlation z (õ − o)^T / α is the transposed Jacobian of the output to that
input on average, and its moving average M carries the output error e = dL/do straight to the layer, g = M e.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor, nn

from st_cached_extras.zbp.probes import private_generator
from st_cached_extras.zbp.research.channels import transported
from st_cached_extras.zbp.research.layout import FeedbackLayout
from st_cached_extras.zbp.research.signal import output_error
from st_cached_extras.zbp.state import LayerState, ZBPLayer

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall

OPZO = "opzo"
_MATRIX, _WEIGHT, _UPDATES = "opzo.matrix.", "opzo.weight.", "opzo.updates"


def pseudo_zeroth_order(call: LayerCall) -> Tensor:
    """The rule of mode opzo: g = e M, e = d loss / d output of the model, M [K, C] learned by :func:`opzo_update`.

    M is shared by tokens, and where the model's output is one vector a sample, it is the mean transposed Jacobian of
    one token. No query of its own: the perturbed forwards are counted, one at every layer that they pass.

    Raises:
        ValueError: nothing is learned for these sizes yet, or no error of this forward is known.
    """
    error = transported(call, output_error(call))
    layout = FeedbackLayout(call, error.shape)
    total = call.memory.get(f"{_MATRIX}{layout.key}")
    if total is None:
        raise ValueError(
            f"mode='opzo' has no feedback matrix for the layer {call.name!r} and sizes {layout.key} yet: set "
            "opzo_alpha, with which every forward teaches it, or call opzo_update(model, forward) before."
        )
    matrix = (total / call.memory[f"{_WEIGHT}{layout.key}"]).to(call.x.device)
    return layout.project(error, matrix).to(call.x.dtype)


def opzo_update(
    model: nn.Module,
    forward: Callable[[], Any],
    clean_output: Tensor | None = None,
    alpha: float | None = None,
    decay: float | None = None,
) -> None:
    """Teach the feedback matrices of a model by one perturbed forward of all of it.

    M ← decay · M + (1 − decay) · mean over rows of (õ − o) ⊗ z / α, z of random signs, M divided by the sum of its
    weights when it is used. For a linear network, B rows a batch and C input features, E|M − J^T|² / |J|² after t
    updates is (C − 1) / B · (1 − λ)(1 + λ^t) / ((1 + λ)(1 − λ^t)) with λ = decay (and what the noise of other layers
    adds): it falls as 1 / t up to t of about 1 / (1 − λ), and stays there.

    Args:
        model: with layers of mode opzo.
        forward: runs the model and returns its output, [B, K] or [B, T, K]. It must draw what the clean forward drew:
            with dropout, run both under one random state.
        clean_output: the output without noise; None to run ``forward`` twice, under one random state.
        alpha: scale of the noise, relative to the RMS of a layer's input; None for the configuration's.
        decay: None for the configuration's.

    Raises:
        ValueError: no layer has mode opzo, no layer ran, or the outputs are not of one shape.
    """
    states = [m.zbp for m in model.modules() if isinstance(m, ZBPLayer) and m.zbp.mode == OPZO]
    if not states:
        raise ValueError("opzo_update teaches layers of mode 'opzo', and the model has none: set_mode(model, 'opzo').")
    perturbations = [Perturbation(state, alpha) for state in states]
    random_state = nullcontext()
    with torch.no_grad():
        if clean_output is None:
            random_state = RandContext(*list(model.parameters())[:1])
            with random_state:
                clean_output = forward()
        for perturbation in perturbations:
            perturbation.state.perturb = perturbation
        try:
            with random_state:
                output = forward()
        finally:
            for perturbation in perturbations:
                perturbation.state.perturb = None
        if not isinstance(output, Tensor) or output.shape != clean_output.shape:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"clean_output has the shape {tuple(clean_output.shape)} and the perturbed forward gave {found}: both "
                "must be the model's output for the same batch."
            )
        if not any(perturbation.passes for perturbation in perturbations):
            raise ValueError("forward ran none of the model's layers of mode 'opzo': it must call the model.")
        moved = output.to(torch.promote_types(output.dtype, torch.float32)) - clean_output
        for perturbation in perturbations:
            perturbation.learn(moved, decay)


class Perturbation:
    """Noise on the input of one layer during one forward, and what is learned from it.

    Args:
        state: of the layer.
        alpha: scale of the noise; None for the configuration's.

    Attributes:
        passes: per call of the layer, the call and its noise z / step.
    """

    def __init__(self, state: LayerState, alpha: float | None) -> None:
        self.state = state
        self.alpha = state.config.opzo_alpha if alpha is None else alpha
        if self.alpha is None or not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha!r}; ZBPConfig.opzo_alpha is the default.")
        self.passes: list[tuple[LayerCall, Tensor]] = []

    def __call__(self, call: LayerCall) -> Tensor:
        """The layer's input with noise on it."""
        state, x = self.state, call.x.to(torch.promote_types(call.x.dtype, torch.float32))
        updates = int(state.memory.get(_UPDATES, torch.tensor(0)))
        generator = private_generator(
            x.device, state.config.seed, state.name, call.rank, OPZO, updates, len(self.passes)
        )
        z = torch.empty(x.shape, device=x.device, dtype=x.dtype).bernoulli_(0.5, generator=generator) * 2 - 1
        if call.valid is not None and state.config.mask_padding:
            z = z * call.valid
        step = self.alpha * x.square().mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny ** 0.5)
        self.passes.append((call, z / step))
        state.count.queries += 1
        return (x + step * z).to(call.x.dtype)

    def learn(self, moved: Tensor, decay: float | None) -> None:
        """Take in by how much the output moved."""
        state, decay = self.state, self.state.config.opzo_decay if decay is None else decay
        memory = state.memory
        for call, z in self.passes:
            layout = FeedbackLayout(call, moved.shape)
            matrix, weight = f"{_MATRIX}{layout.key}", f"{_WEIGHT}{layout.key}"
            new = layout.mean_outer(moved, z)
            total = memory[matrix].to(new.device) if matrix in memory else torch.zeros_like(new)
            memory[matrix] = decay * total + (1 - decay) * new
            memory[weight] = decay * memory.get(weight, torch.tensor(0.0, dtype=torch.float64)) + (1 - decay)
        memory[_UPDATES] = memory.get(_UPDATES, torch.tensor(0)) + 1
