"""Score probes: what softmax attention does with its scores, asked row by row.

    S = Q K^T / √d,  P = softmax(S),  O = P V        δS = d loss / dS,  dK = δS^T Q / √d,  dQ = δS K / √d

A row of O depends on the same row of S alone, so a row of one head is a unit of its own: the scores of all rows and
heads are moved at once by ε u, and <dO, O> is read per row. As many orthogonal probes as a row has scores are exact.
Causal attention halves what there is to probe, and a window bounds it whatever the length of the sequence.

The attention of any layer that calls ``torch.nn.functional.scaled_dot_product_attention`` is taken over while autograd
runs through the layer; everything else in it, V included, gets its exact gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from st_cached_extras.zbp.estimators import default_probes
from st_cached_extras.zbp.probes import Probes
from st_cached_extras.zbp.research.channels import Measured

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


class ProbedScores(TorchFunctionMode):
    """Within it, attention answers its backward by score probes.

    Args:
        call: of the layer; its ``n_probes``, ``probe``, ``eps`` (in the unit of scores; None for 1e-2, in fp64 1e-4),
            ``probe_chunk``, ``window`` and ``measurement`` count.
        queries_too: dQ comes from the probes as well as dK; otherwise it is exact.

    Raises:
        ValueError: on leaving, if no attention was met.
    """

    def __init__(self, call: LayerCall, queries_too: bool) -> None:
        super().__init__()
        self._call, self._queries_too = call, queries_too
        self._met = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is None and not self._met:
            raise ValueError(
                f"mode={self._call.config.mode!r} probes attention scores, and the layer {self._call.name!r} never "
                "called torch.nn.functional.scaled_dot_product_attention. Wrap a layer with attention, of a model "
                "with attn_implementation='sdpa'."
            )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        name = self._call.name
        if attn_mask is not None and attn_mask.requires_grad:
            raise ValueError(
                f"The attention of the layer {name!r} has a position bias that is trained, whose gradient score "
                "probes do not give. Freeze it, or use another mode."
            )
        if dropout_p and query.device.type != "cpu":
            raise ValueError(
                f"The attention of the layer {name!r} drops probabilities inside a fused kernel, whose draws cannot "
                f"be repeated. Set the model's attention dropout to 0 for mode={self._call.config.mode!r}."
            )
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        rows, columns = query.shape[-2], key.shape[-2]
        allowed, bias = _masks(attn_mask, is_causal, rows, columns, query.device)
        settings = ScoreSettings(
            call=self._call,
            index=self._met,
            queries_too=self._queries_too,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=self._call.config.window,
            drop=dropout_p,
        )
        self._met += 1
        return _ProbedAttention.apply(query, key, value, allowed, bias, settings)


@dataclass(frozen=True)
class ScoreSettings:
    """Of one attention of one call; ``index`` tells several in one layer apart."""

    call: LayerCall
    index: int
    queries_too: bool
    scale: float
    window: int | None
    drop: float


class _ProbedAttention(torch.autograd.Function):
    """softmax(Q K^T · scale + bias) V, [..., Tq, d], and its backward by score probes."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor | None, settings):
        dtype = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
            S = q @ k.transpose(-1, -2) * settings.scale
            S = S if bias is None else S + bias
            P = _softmax(S, allowed)  # [..., Tq, Tk]
            # Drawn as attention without a fused kernel draws it.
            kept = torch.dropout(torch.ones_like(P), settings.drop, True) if settings.drop else None
            output = (P if kept is None else P * kept) @ v
        ctx.save_for_backward(query, key, value, allowed, S, P, *([] if kept is None else [kept]))
        ctx.settings = settings
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dO: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, allowed, S, P, *kept = ctx.saved_tensors
        settings, dtype = ctx.settings, S.dtype
        with torch.autocast(query.device.type, enabled=False):
            q, k, v, dO = (t.to(dtype) for t in (query, key, value, dO))
            dV = (P * kept[0] if kept else P).transpose(-1, -2) @ dO
            # <dO_i, O_i> = sum_j P_ij R_ij
            R = dO @ v.transpose(-1, -2)
            R = R * kept[0] if kept else R
            probed = probe_scores(S, R, allowed, settings)
            exact = probed if settings.queries_too else P * (R - (P * R).sum(-1, keepdim=True))
            dQ, dK = exact @ k * settings.scale, probed.transpose(-1, -2) @ q * settings.scale
        return dQ.to(query.dtype), dK.to(key.dtype), dV.to(value.dtype), None, None, None


def probe_scores(S: Tensor, R: Tensor, allowed: Tensor, settings: ScoreSettings) -> Tensor:
    """δS of h(S) = sum_j softmax(S)_j R_j per row, from central differences along probes of each row.

    Args:
        S: scores, [..., Tq, Tk].
        R: what a unit of probability earns, of the same shape.
        allowed: bool, broadcastable to both.
        settings: how.

    Returns:
        Of the same shape, zero where nothing is allowed or the window does not reach. 2 n evaluations of all rows.
    """
    call, config = settings.call, settings.call.config
    rows, columns = S.shape[-2:]
    width = columns if settings.window is None else min(settings.window, columns)
    probed = _softmax(S, allowed) > 0  # whatever masks a score, by a bool or by a number
    if settings.window is not None:
        probed = probed & _within(rows, columns, width, S.device)
    n = default_probes(width) if config.n_probes is None else config.n_probes
    generator = call.generator("scores", settings.index)
    units = S[..., 0].numel()
    probes = Probes(config.probe, n, units, width, generator, dtype=S.dtype, call=call.call)
    eps = config.eps or (1e-4 if S.dtype == torch.float64 else 1e-2)
    # The last `width` positions have as many remainders, so that any window of them holds each coordinate once.
    coordinate = torch.arange(columns, device=S.device) % width

    def along(u: Tensor) -> Tensor:
        above, below = (_softmax(S + step * u, allowed) for step in (eps, -eps))
        return ((above - below) * R).sum(-1, keepdim=True) / (2 * eps)

    reading = Measured(along, call, n) if config.measurement else along
    total = torch.zeros_like(S)
    for start in range(0, n, config.probe_chunk):
        drawn = probes.draw(start, min(start + config.probe_chunk, n))  # [k, units, width]
        u = drawn[..., coordinate].reshape(len(drawn), *S.shape) * probed
        total += (reading(u) * u).sum(0)
    call.count.queries += 2 * n
    return total / n


def _softmax(S: Tensor, allowed: Tensor) -> Tensor:
    """Over the allowed entries; zeros in rows without any."""
    P = torch.softmax(S.masked_fill(~allowed, torch.finfo(S.dtype).min), -1)
    return P * allowed


def _masks(
    mask: Tensor | None, is_causal: bool, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Which scores count, bool [.., Tq, Tk], and what is added to them."""
    allowed = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if is_causal:
        allowed = allowed.tril()
    if mask is None or mask.dtype == torch.bool:
        return (allowed if mask is None else allowed & mask), None
    return allowed, mask  # also where it is very negative: added, as attention does


def _within(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """bool [Tq, Tk]: the last ``width`` positions up to the query's own; queries are the last of the keys."""
    own = torch.arange(rows, device=device)[:, None] + (columns - rows)
    behind = own - torch.arange(columns, device=device)
    return (behind >= 0) & (behind < width)
