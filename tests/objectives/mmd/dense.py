"""The slow and obvious truth: kernels written out, all pairs at once, autograd in fp64."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference

KERNELS = ("gaussian", "laplace", "rational_quadratic", "energy")


def dense_kernel(name: str, scales: tuple[float, ...], sigma: float, x: Tensor, y: Tensor) -> Tensor:
    """k per scale, [scales, n, m], of rows [n, D] and [m, D], with a derivative of 0 where rows coincide."""
    squared = (x[:, None] - y[None]).square().sum(dim=-1)
    same = squared == 0
    distance = torch.where(same, 0.0, torch.where(same, 1.0, squared).sqrt())
    if name == "energy":
        return -distance[None] / sigma
    of_scales = {
        "gaussian": lambda s: torch.exp(-squared / (2 * s**2)),
        "laplace": lambda s: torch.exp(-distance / s),
        "rational_quadratic": lambda s: 1 / (1 + squared / (2 * s**2)),
    }
    return torch.stack([of_scales[name](s * sigma) for s in scales])


def dense_blocks(x: Tensor, layout: str, condition: Tensor | None) -> list[Tensor]:
    if layout == "flatten":
        blocks = [x.flatten(1)]
    elif layout == "mean":
        blocks = [x.mean(dim=1)]
    else:
        blocks = [x[:, position] for position in range(x.shape[1])]
    return blocks if condition is None else [torch.cat([block, condition], dim=1) for block in blocks]


def dense_raw(
    reference: NystromReference,
    x: Tensor,
    current: Tensor | None = None,
    *,
    rho: float = 0.0,
    statistic: str = "v",
    condition: Tensor | None = None,
    current_condition: Tensor | None = None,
    other_side: Tensor | None = None,
) -> Tensor:
    """The raw value of one encoder, with a graph; ``other_side`` takes the place of x_j in k(x_i, x_j)."""
    kernel, layout, B = reference.kernel, reference.layout, len(x)
    if condition is not None:
        condition = reference.condition_weight * condition
    if current_condition is not None:
        current_condition = reference.condition_weight * current_condition
    raws = []
    for p, rows in enumerate(dense_blocks(x, layout, condition)):

        def k(a: Tensor, b: Tensor, sigma: float = reference.sigma[p]) -> Tensor:
            return dense_kernel(kernel.name, kernel.scales, sigma, a, b)

        z = reference.landmarks[p].to(x) + reference.center[p].to(x)
        alpha = reference.alpha[p].to(x)
        others = rows if other_side is None else dense_blocks(other_side, layout, condition)[p]
        gram = k(rows, others).mean(dim=0)
        if statistic == "v":
            repulsion = gram.mean()
        else:
            repulsion = (gram - torch.diag(gram.diagonal())).sum() / max(1, B * (B - 1))
        attraction = torch.einsum("snm,sm->", k(rows, z), alpha) / (len(alpha) * B)
        constant = reference.k_rr[p]
        if current is not None and rho:
            c = dense_blocks(current, layout, current_condition)[p]
            k_rc = torch.einsum("snm,sm->", k(c, z), alpha) / (len(alpha) * len(c))
            attraction = (1 - rho) * attraction + rho * k(rows, c).mean()
            constant = (1 - rho) ** 2 * constant + 2 * rho * (1 - rho) * k_rc + rho**2 * k(c, c).mean()
        raws.append(repulsion - 2 * attraction + constant)
    return torch.stack(raws).mean()


def dense_loss(objective: MultiEncoderMMD, features: dict[str, Tensor], current: dict[str, Tensor] | None) -> Tensor:
    """The loss of a whole objective, with a graph."""
    loss = torch.zeros((), dtype=torch.float64)
    for name, reference in objective.references.items():
        conditional = reference.condition_size > 0
        raw = dense_raw(
            reference,
            features[name],
            None if current is None else current[name],
            rho=objective.current_reference_weight,
            statistic=objective.statistic,
            condition=features["condition"] if conditional else None,
            current_condition=current["condition"] if conditional and current is not None else None,
        )
        scale = 1 / (raw.detach().abs() + objective.eps) if objective.normalize else 1.0
        loss = loss + objective.weights[name] * scale * raw
    return loss


@lru_cache
def small_reference(
    shape: tuple[int, ...],
    kernel: str = "gaussian",
    scales: tuple[float, ...] = (0.5, 1.0, 2.0),
    layout: str = "flatten",
    condition_size: int = 0,
    offset: float = 0.0,
    seed: int = 0,
) -> NystromReference:
    """Fitted to 40 random rows of ``shape``, with 9 landmarks."""
    generator = torch.Generator().manual_seed(100 + seed)
    features = torch.randn(40, *shape, generator=generator) + offset
    condition = torch.randn(40, condition_size, generator=generator) if condition_size else None
    return NystromReference.fit(
        features,
        condition=condition,
        condition_weight=0.7,
        landmarks=9,
        kernel=kernel,
        scales=scales,
        layout=layout,
        name="random",
    )


def random_rows(count: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows whose law is not that of :func:`small_reference`; the same values, rounded, for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (0.8 * torch.randn(count, *shape, generator=generator) + 0.4).to(dtype)
