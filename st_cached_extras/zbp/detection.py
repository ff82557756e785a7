"""What a layer is, asked of the layer: whether autograd is right about it, and whether it is residual or a mean.

A kernel without a backward often says nothing: ``round`` answers with zeros, a detached one with no graph at all, and
everything below stops training. Here autograd's directional derivative is held against a central difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from st_cached_extras.zbp.queries import QueryCount

# Steps relative to the RMS of the input, and directions; a layer that is right at one of them is right. The first is
# for most, the second above the steps of int8 and half precision and above usual noise, the third below most kinks.
TRIALS = ((0.03, 4), (0.1, 16), (0.01, 16))
EPS, DIRECTIONS = 0.1, 4  # of other questions
LARGEST_DIFFERENCE = 0.5
# Layers of trained encoders are at .5 to 1, branches without the residual at 0. An estimate of 4096 dimensions by 256
# probes comes to as much.
LEAST_ALIGNMENT = 0.25


def has_backward(
    f: Callable[[Tensor], Tensor],
    differentiable: Callable[[Tensor], Tensor],
    x: Tensor,
    generator: torch.Generator,
    count: QueryCount,
) -> bool:
    """Whether autograd's derivative of a layer in random directions is there and within half of the difference's.

    Args:
        f: the layer without a graph.
        differentiable: the layer for autograd.
        x: an input of it.
        generator: of the directions.
        count: where the queries are counted, as calibration.
    """
    r = _output_weights(f, x, generator, count)
    if r is None:
        return True
    g = _autograd(differentiable, x, r)
    for eps, directions in TRIALS:
        step = eps * _scale(x)
        found, differences = [], []
        for _ in range(directions):
            u = _direction(x, generator)
            differences.append(_dot(r, f(_at(x, step, u)) - f(_at(x, -step, u))) / (2 * step))
            found.append(torch.zeros_like(differences[-1]) if g is None else _dot(g, u))
        count.calibration_queries += 2 * directions
        if _agree(torch.stack(found), torch.stack(differences)):
            return True
    return False


def parameters_have_backward(
    f: Callable[[Tensor], Tensor],
    differentiable: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: list[nn.Parameter],
    generator: torch.Generator,
    count: QueryCount,
) -> bool:
    """The same of the layer's parameters: autograd against differences along random directions of all of them."""
    r = _output_weights(f, x, generator, count)
    if r is None:
        return True
    try:
        with torch.enable_grad():
            y = differentiable(x.detach())
            gradients = torch.autograd.grad(y, parameters, r.to(y.dtype), allow_unused=True)
    except Exception:  # whatever a kernel without a backward raises when it is asked for one
        return False
    for eps, directions in TRIALS:
        step = eps * parameter_scale(parameters)
        found, differences = [], []
        for _ in range(directions):
            u = random_signs(parameters, generator)
            with shifted(parameters, u, step):
                above = f(x)
            with shifted(parameters, u, -step):
                below = f(x)
            differences.append(_dot(r, above - below) / (2 * step))
            of_used = [_dot(g, d) for g, d in zip(gradients, u, strict=True) if g is not None]
            found.append(torch.stack(of_used).sum() if of_used else torch.zeros_like(differences[-1]))
        count.calibration_queries += 2 * directions
        if _agree(torch.stack(found), torch.stack(differences)):
            return True
    return False


def jacobian_alignment(
    f: Callable[[Tensor], Tensor],
    rule: Callable[[Tensor], Tensor],
    x: Tensor,
    generator: torch.Generator,
    count: QueryCount,
    valid: Tensor | None = None,
) -> float:
    """Cosine between a layer's Jacobian J and the map M that a rule without queries, v to M^T v, takes it for.

    <M, J> / (|M| |J|): for straight-through, M = I, residual layers have one, others about 0. By Hutchinson's
    estimate: E <u, M^T J u> = <M, J>, E |J u|² = |J|² and E |M^T w|² = |M|² for E[u u^T] = I, E[w w^T] = I.

    Args:
        f: the layer without a graph.
        rule: from a tensor of the output's shape to one of the input's, linear.
        x: an input of the layer.
        generator: of the directions.
        count: where the queries are counted, as calibration.
        valid: bool, broadcastable to x: False at padding, which is not looked at.
    """
    step = EPS * _scale(x)
    inner, of_layer, of_rule = [], [], []
    for _ in range(DIRECTIONS):
        u = _direction(x, generator) * (1 if valid is None else valid)
        pushed = (f(_at(x, step, u)) - f(_at(x, -step, u))).to(u.dtype) / (2 * step)
        count.calibration_queries += 2
        inner.append(_dot(u, rule(pushed)))
        of_layer.append(_dot(pushed, pushed))
        back = rule(_direction(pushed, generator))
        of_rule.append(_dot(back, back))
    norms = torch.stack(of_layer).mean() * torch.stack(of_rule).mean()
    return float(torch.stack(inner).mean() / norms.clamp_min(1e-30).sqrt())


@contextmanager
def shifted(parameters: list[nn.Parameter], directions: list[Tensor], step: Tensor | float) -> Iterator[None]:
    """Parameters moved by ``step * direction``, and put back to the bit."""
    kept = [parameter.data for parameter in parameters]
    try:
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data = (parameter.data + step * direction).to(parameter.dtype)
        yield
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def random_signs(parameters: list[nn.Parameter], generator: torch.Generator) -> list[Tensor]:
    """A direction among all parameters, of signs."""
    return [
        torch.empty(p.shape, device=p.device).bernoulli_(0.5, generator=generator).mul_(2).sub_(1) for p in parameters
    ]


def parameter_scale(parameters: list[nn.Parameter]) -> Tensor:
    """Root mean square of all parameters together."""
    squares = torch.stack([p.detach().float().square().sum() for p in parameters]).sum()
    return (squares / sum(p.numel() for p in parameters)).sqrt().clamp_min(1e-8)


def _output_weights(
    f: Callable[[Tensor], Tensor], x: Tensor, generator: torch.Generator, count: QueryCount
) -> Tensor | None:
    """Random weights of the outputs, None where those are no real numbers."""
    y = f(x)
    count.calibration_queries += 1
    if not y.is_floating_point():
        return None
    dtype = torch.promote_types(y.dtype, torch.float32)
    return torch.randn(y.shape, generator=generator, device=y.device, dtype=dtype)


def _direction(x: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=dtype)


def _scale(x: Tensor) -> Tensor:
    """Root mean square of an input."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean().sqrt().clamp_min(1e-8)


def _at(x: Tensor, step: Tensor, direction: Tensor) -> Tensor:
    return (x.to(direction.dtype) + step * direction).to(x.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.dot(a.flatten().to(dtype), b.flatten().to(dtype))


def _autograd(differentiable: Callable[[Tensor], Tensor], x: Tensor, r: Tensor) -> Tensor | None:
    try:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = differentiable(x)
            return torch.autograd.grad(y, x, r.to(y.dtype), allow_unused=True)[0] if y.requires_grad else None
    except Exception:  # whatever a kernel without a backward raises when it is asked for one; forward alone it runs
        return None


def _agree(found: Tensor, differences: Tensor) -> bool:
    return bool((found - differences).norm() <= LARGEST_DIFFERENCE * differences.norm())
