"""A linear surrogate of a layer as a control variate: what it predicts is not estimated.

y ≈ x M + c by ridge regression on the pairs that training passes by anyway. With ĝ = v M^T and a factor s,

    g ≈ s ĝ + (1/n) sum_i u_i (D_i − s <ĝ, u_i>),     s = EMA(sum D <ĝ, u>) / EMA(sum <ĝ, u>²),

which is unbiased given M and s, since neither depends on this call's probes: M comes from the forwards so far, s from
the readings of earlier calls. The variance is that of g − s ĝ, the least along ĝ for the s that is being fitted.
(Control variates: Glasserman 2003, "Monte Carlo Methods in Financial Engineering", 4.1. Surrogates of the same kind
for evolution strategies: Maheswaranathan et al. 2019, "Guided evolutionary strategies", arXiv 1806.10230.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from st_cached_extras.zbp.research.layout import FeedbackLayout, product
from st_cached_extras.zbp.units import UnitLayout

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall

LARGEST = 8192  # features in or out: statistics are that squared


@torch.no_grad()
def observe(call: LayerCall, y: Tensor) -> None:
    """Take in what a forward passed by: call.x and the layer's output y. Statistics stay on their device."""
    config, memory = call.config, call.memory
    layout = _layout(call, y.shape)
    x, y, weight = _rows(call, layout, y)
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)  # [R, C + 1]
    rows = weight.sum().clamp_min(1)
    keep = config.surrogate_ema
    for name, new in (("xx", product(x.T, weight * x) / rows), ("xy", product(x.T, weight * y) / rows)):
        key = f"surrogate.{name}.{layout.key}"
        memory[key] = keep * memory[key].to(new.device) + (1 - keep) * new if key in memory else (1 - keep) * new


def linear_map(call: LayerCall, layout: FeedbackLayout) -> Tensor | None:
    """M [C, K] of the statistics so far; None before the first pair."""
    xx, xy = (call.memory.get(f"surrogate.{name}.{layout.key}") for name in ("xx", "xy"))
    if xx is None or xy is None:
        return None
    xx, xy = xx.to(call.x.device), xy.to(call.x.device)
    ridge = call.config.surrogate_ridge * xx.diagonal()[:-1].mean().clamp_min(torch.finfo(xx.dtype).tiny ** 0.5)
    damping = torch.ones_like(xx[0]) * ridge
    damping[-1] = 0  # the constant is not shrunk
    # The ridge makes it positive definite; none of these reports errors to the host.
    L = torch.linalg.cholesky_ex(xx + damping.diag()).L
    half = torch.linalg.solve_triangular(L, xy, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True)[:-1]


class SurrogateControl:
    """The control variate of one call.

    Args:
        call: of the layer.
        units: how readings are taken.
        dtype: of the readings.

    Attributes:
        known: s ĝ, of the input's shape; None before the first pair.
    """

    def __init__(self, call: LayerCall, units: UnitLayout, dtype: torch.dtype) -> None:
        self._call, self._units = call, units
        layout = _layout(call, call.v.shape)
        self._key = f"surrogate.fit.{layout.key}"
        M = linear_map(call, layout)
        self._predicted: Tensor | None = None
        self.known: Tensor | None = None
        if M is None:
            return
        self._predicted = (layout.share(M.dtype) * layout.project(call.v, M.T)).to(dtype)
        # EMA of sum D <ĝ, u> and of sum <ĝ, u>²
        fit = call.memory.get(self._key, torch.zeros(2, dtype=dtype)).to(call.x.device)
        self._fit, self._new = fit, torch.zeros_like(fit)
        s = fit[0].clamp_min(0) / fit[1].clamp_min(torch.finfo(dtype).tiny)
        self.known = s * self._predicted

    def remainder(self, u: Tensor, D: Tensor) -> Tensor:
        """D − s <ĝ, u> of probes u [k, *input shape], and a note of both for the next s."""
        if self._predicted is None or self.known is None:
            return D
        c = self._units.read(self._predicted * u)
        self._new = self._new + torch.stack([(D * c).sum(), c.square().sum()])
        return D - self._units.read(self.known * u)

    def learn(self) -> None:
        """After the last probe: the readings of this call count from the next one on."""
        if self._predicted is not None:
            keep = self._call.config.surrogate_ema
            self._call.memory[self._key] = keep * self._fit + (1 - keep) * self._new


def _layout(call: LayerCall, shape: torch.Size) -> FeedbackLayout:
    layout = FeedbackLayout(call, shape)
    if max(layout.sizes) > LARGEST:
        raise ValueError(
            f"surrogate=True would regress {layout.sizes[0]} on {layout.sizes[1]} numbers for the layer "
            f"{call.name!r}, and {LARGEST} are the most. Use surrogate=False."
        )
    return layout


def _rows(call: LayerCall, layout: FeedbackLayout, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs [R, C], [R, K] and their weights [R, 1]: tokens where the map is shared by them, without padding."""
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    x, y = call.x.to(dtype), y.detach().to(dtype)
    valid = call.valid if call.config.mask_padding else None
    if layout.spreads:  # y is linear in the mean of the tokens' x
        share = layout.share(dtype) * (1.0 if valid is None else valid.to(dtype))
        x = (x * share).sum(-2)
        valid = None
    x, y = x.reshape(-1, layout.sizes[1]), y.reshape(-1, layout.sizes[0])
    if valid is None or valid.expand(*call.x.shape[:-1], 1).numel() != len(x):
        return x, y, torch.ones_like(x[:, :1])
    return x, y, valid.expand(*call.x.shape[:-1], 1).reshape(-1, 1).to(dtype)
