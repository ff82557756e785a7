"""Gradients of a layer's own parameters: by autograd inside it, or by forward differences of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from st_cached_extras.zbp.detection import parameter_scale, random_signs, shifted
from st_cached_extras.zbp.estimators import LayerCall, default_probes
from st_cached_extras.zbp.step_size import DEFAULT_PARAMETER_EPS


def gradients_by_autograd(
    differentiable: Callable[[Tensor], Tensor],
    x: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    with_input: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """d<v, f(x)>/dx, if wanted, and d<v, f(x)>/dθ; None for parameters that f does not use.

    Raises:
        ValueError: f has no graph.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_(with_input)
        y = differentiable(x)
    if not y.requires_grad:
        raise ValueError(
            "The layer (or its stand-in local=...) has no graph to the parameters that are to be trained. Use "
            "param_mode='zo' or 'none', or a stand-in that uses the layer's own parameters."
        )
    inputs = [x, *parameters] if with_input else list(parameters)
    gradients = list(torch.autograd.grad(y, inputs, v.to(y.dtype), allow_unused=True))
    return (gradients.pop(0) if with_input else None), gradients


def estimate_parameter_gradients(call: LayerCall, parameters: Sequence[Tensor]) -> list[Tensor]:
    """d<v, f(x)>/dθ from central differences along random signs of all parameters together, (1/n) sum_i u_i D_i.

    Relative variance (P - 1) / n for P parameters in all (SPSA; Spall 1992): for small layers, or slow ones. 2 n
    queries.
    """
    config = call.config
    n = default_probes(call.x[0].numel()) if config.n_probes is None else config.n_probes
    generator = call.generator("parameters")
    parameters = list(parameters)
    v = call.v.to(torch.promote_types(call.v.dtype, torch.float32))
    step = (DEFAULT_PARAMETER_EPS if call.eps is None else call.eps) * parameter_scale(parameters)
    totals = [torch.zeros_like(p, dtype=v.dtype) for p in parameters]
    for _ in range(n):
        u = random_signs(parameters, generator)
        with shifted(parameters, u, step):
            above = call.f(call.x)
        with shifted(parameters, u, -step):
            below = call.f(call.x)
        D = ((above.to(v.dtype) - below.to(v.dtype)) * v).sum() / (2 * step)
        for total, direction in zip(totals, u, strict=True):
            total += D / n * direction
    call.count.parameter_queries += 2 * n
    return [total.to(p.dtype) for total, p in zip(totals, parameters, strict=True)]
