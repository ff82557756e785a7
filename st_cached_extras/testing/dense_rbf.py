"""A small objective with reference features, by autograd over dense matrices: for tests of what uses objectives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult, compute_dtype


class DenseRBF(Objective):
    """Squared MMD of features and reference under a gaussian kernel, summed over branches; slow and obvious.

    Per branch: mean k(x_i, x_j) − 2 mean k(x_i, r_t) + mean k(r_t, r_u), k(a, b) = exp(−|a − b|²/2 · exp(−log_width)).

    Args:
        uses_reference: False leaves the terms of the reference out.
        learnable_width: train ``log_width``.
    """

    def __init__(self, uses_reference: bool = True, learnable_width: bool = False) -> None:
        super().__init__()
        self.uses_reference = uses_reference
        self.log_width = nn.Parameter(torch.zeros(()), requires_grad=learnable_width)

    def value_and_cotangents(
        self,
        features: Mapping[str, Tensor],
        *,
        labels: Tensor | None = None,
        reference: Mapping[str, Tensor] | None = None,
        rows: Tensor | None = None,
        world: World | None = None,
    ) -> ObjectiveResult:
        """See :class:`Objective`. Every rank computes the whole: fine for a test."""
        world = World() if world is None else world
        dtype = compute_dtype(features)
        everyone, everywhere = {}, {}
        for name, x in features.items():
            counts = world.row_counts(len(x))
            everyone[name] = world.gather_rows(x.detach(), counts).to(dtype).requires_grad_()
            begin = sum(counts[: world.rank])
            if reference is not None:
                r = reference[name].detach()
                everywhere[name] = world.gather_rows(r, world.row_counts(len(r))).to(dtype)
        with torch.enable_grad():
            width = self.log_width.detach().to(dtype).requires_grad_()
            loss = sum(self._of_branch(x, everywhere.get(name), width) for name, x in everyone.items())
            *gradients, d_width = torch.autograd.grad(loss, [*everyone.values(), width])
        cotangents = {}
        for (name, x), gradient in zip(features.items(), gradients, strict=True):
            own = gradient[begin : begin + len(x)]
            cotangents[name] = own if rows is None else own[rows]
        parameters = {"log_width": d_width} if self.log_width.requires_grad else {}
        return ObjectiveResult(loss.detach(), cotangents, parameters)

    def _of_branch(self, x: Tensor, r: Tensor | None, width: Tensor) -> Tensor:
        x = x.flatten(1)
        value = self._kernel(x, x, width).mean()
        if r is None:
            return value
        r = r.flatten(1)
        return value - 2 * self._kernel(x, r, width).mean() + self._kernel(r, r, width).mean()

    def _kernel(self, a: Tensor, b: Tensor, width: Tensor) -> Tensor:
        squared = (a[:, None] - b[None]).square().sum(-1)
        return torch.exp(-0.5 * squared * torch.exp(-width))
