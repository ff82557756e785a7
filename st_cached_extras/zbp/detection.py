"""What a layer is, asked of the layer: whether autograd is right about it, and whether it is residual.

A kernel without a backward often says nothing: ``round`` answers with zeros, a detached one with no graph at all, and
everything below stops training. Here autograd's directional derivative is held against a central difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from st_cached_extras.zbp.queries import QueryCount

DIRECTIONS = 4
EPS = 0.1  # relative to the RMS of the input: above the steps of int8 and half precision, and above usual noise
LARGEST_DIFFERENCE = 0.5
RESIDUAL_ALIGNMENT = 0.25  # layers of trained encoders are at .5 to 1, branches without the residual at 0


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
    r, u, step = _directions(f, x, generator, count)
    if r is None:
        return True
    g = _autograd(differentiable, x, r)
    differences = torch.stack([_dot(r, (f(_at(x, step, d)) - f(_at(x, -step, d)))) / (2 * step) for d in u])
    count.calibration_queries += 2 * len(u)
    return _agree(None if g is None else torch.stack([_dot(g, direction) for direction in u]), differences)


def parameters_have_backward(
    f: Callable[[Tensor], Tensor],
    differentiable: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: list[nn.Parameter],
    generator: torch.Generator,
    count: QueryCount,
) -> bool:
    """The same of the layer's parameters: autograd against differences along random directions of all of them."""
    r, _, _ = _directions(f, x, generator, count)
    try:
        with torch.enable_grad():
            y = differentiable(x.detach())
            gradients = torch.autograd.grad(y, parameters, r.to(y.dtype), allow_unused=True)
    except Exception:  # whatever a kernel without a backward raises when it is asked for one
        return False
    step = EPS * parameter_scale(parameters)
    found, differences = [], []
    for _ in range(DIRECTIONS):
        u = random_signs(parameters, generator)
        with shifted(parameters, u, step):
            above = f(x)
        with shifted(parameters, u, -step):
            below = f(x)
        differences.append(_dot(r, above - below) / (2 * step))
        found.append(sum(_dot(g, d) for g, d in zip(gradients, u, strict=True) if g is not None) + 0 * differences[-1])
    count.calibration_queries += 2 * DIRECTIONS
    return _agree(torch.stack(found), torch.stack(differences))


def identity_alignment(
    f: Callable[[Tensor], Tensor], x: Tensor, generator: torch.Generator, count: QueryCount
) -> float:
    """Cosine between a layer's Jacobian and the identity, tr J / (|J| √d): residual layers have one, others about 0.

    By Hutchinson's estimate: E <u, J u> = tr J and E |J u|² = |J|² for E[u u^T] = I. 0 where shapes differ.
    """
    r, u, step = _directions(f, x, generator, count)
    if r is None or r.shape != x.shape:
        return 0.0
    pushed = [(f(_at(x, step, d)) - f(_at(x, -step, d))).to(d.dtype) / (2 * step) for d in u]
    count.calibration_queries += 2 * len(u)
    trace = sum(_dot(d, p) for d, p in zip(u, pushed, strict=True))
    norms = sum(_dot(p, p) for p in pushed) * len(u) * x.numel()
    return float(trace / norms.clamp_min(1e-30).sqrt())


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


def _directions(
    f: Callable[[Tensor], Tensor], x: Tensor, generator: torch.Generator, count: QueryCount
) -> tuple[Tensor | None, list[Tensor], Tensor]:
    """Weights of the outputs, directions of the inputs, and the step along them."""
    y = f(x)
    count.calibration_queries += 1
    if not y.is_floating_point():
        return None, [], torch.ones(())
    dtype = torch.promote_types(x.dtype, torch.float32)
    options = {"generator": generator, "device": x.device, "dtype": dtype}
    r = torch.randn(y.shape, **options)
    u = [torch.randn(x.shape, **options) for _ in range(DIRECTIONS)]
    return r, u, EPS * x.to(dtype).square().mean().sqrt().clamp_min(1e-8)


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


def _agree(found: Tensor | None, differences: Tensor) -> bool:
    if found is None:
        return not bool(differences.any())
    return bool((found - differences).norm() <= LARGEST_DIFFERENCE * differences.norm())
