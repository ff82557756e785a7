"""The input gradient g = J^T v of a layer, from forward queries.

With probes u_i, E[u u^T] = I, and readings D_i = <v, J u_i>: ĝ = (1/n) sum_i u_i D_i, E ĝ = g (Nesterov & Spokoiny
2017, "Random gradient-free minimization of convex functions", for differences; Baydin et al. 2022, arXiv 2202.08587,
for forward mode). What is known exactly need not be estimated: with a control s w, ĝ = s w + (1/n) sum_i u_i
(D_i - s <w, u_i>), of which only the remainder has variance. w is v itself, or what a stand-in answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.probes import Probes, private_generator, relative_variance
from st_cached_extras.zbp.queries import QueryCount, Readout
from st_cached_extras.zbp.research.channels import Measured, arriving
from st_cached_extras.zbp.research.surrogate import SurrogateControl
from st_cached_extras.zbp.step_size import choose_eps
from st_cached_extras.zbp.units import UnitLayout, layout_of

if TYPE_CHECKING:
    from st_cached_extras.zbp.research.signal import Signal

LARGEST_DEFAULT = 256


@dataclass
class LayerCall:
    """One backward of one layer: all that a rule may ask for.

    Attributes:
        f: the layer without a graph, input to output, the same at every call but for the layer's own noise.
        x: its input.
        v: d loss / d output.
        config: the configuration.
        differentiable: the same map with a graph, for the rules that use autograd; None where there is none.
        valid: bool, broadcastable to the input: False at padding; None where nothing is.
        segments: boundaries of packed segments, int [S + 1]; None for plain rows.
        batch_dims: leading axes that count samples.
        batched: f takes leading axes of probes.
        name: of the layer, a part of the seed of its probes.
        rank: of the process, too.
        call: how many backwards of the layer came before, too.
        count: where queries are counted.
        eps: the step, chosen or given.
        memory: tensors that the rule keeps from call to call; replaced, never changed in place.
        signal: of the model's output in this forward, where an ErrorTap watches it.
    """

    f: Callable[[Tensor], Tensor]
    x: Tensor
    v: Tensor
    config: ZBPConfig
    differentiable: Callable[[Tensor], Tensor] | None = None
    valid: Tensor | None = None
    segments: Tensor | None = None
    batch_dims: int = 1
    batched: bool = False
    name: str = ""
    rank: int = 0
    call: int = 0
    count: QueryCount = field(default_factory=QueryCount)
    eps: float | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    signal: Signal | None = None

    def generator(self, *purpose: int | str) -> torch.Generator:
        """The private generator of this call."""
        return private_generator(self.x.device, self.config.seed, self.name, self.rank, self.call, *purpose)


def estimate_vjp(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    v: Tensor,
    config: ZBPConfig,
    *,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    batch_dims: int = 1,
    batched: bool = False,
    call: int = 0,
    count: QueryCount | None = None,
    memory: dict[str, Tensor] | None = None,
) -> Tensor:
    """J^T v of a map, estimated (or computed) as a configuration says.

    Args:
        f: from inputs of x's shape to outputs of v's.
        x: input, [B, ...].
        v: d loss / d output, [B, ...].
        config: how; ``"auto"`` means ``"cd"`` here.
        valid: bool, broadcastable to x, False where the gradient is to be zero.
        segments: int [S + 1], boundaries of packed segments in an input [N, C] or [1, N, C].
        batch_dims: leading axes of x that count samples.
        batched: f takes any number of leading axes, so that ``probe_chunk`` probes are one plain call.
        call: draws other probes for every value.
        count: where queries are counted.
        memory: what the mode keeps from call to call, such as a feedback matrix.

    Returns:
        The gradient, of x's shape and dtype.

    Raises:
        ValueError: shapes that do not fall into the units or the mode of the configuration.
    """
    from st_cached_extras.zbp.modes import RULES, inside_of

    if config.mode in ("auto", "bp"):
        config = config.replace(mode="cd" if config.mode == "auto" else "exact")
    layer_call = LayerCall(
        f=f,
        x=x.detach(),
        v=v.detach(),
        config=config,
        differentiable=f,
        valid=valid,
        segments=segments,
        batch_dims=batch_dims,
        batched=batched,
        call=call,
        count=QueryCount() if count is None else count,
        eps=config.eps,
        memory={} if memory is None else memory,
    )
    with torch.no_grad(), inside_of(layer_call):
        return RULES[config.mode](arriving(layer_call))


def default_probes(size: int) -> int:
    """Probes for units of ``size`` dimensions where the configuration does not say: a sixth, between 1 and 256."""
    return max(1, min(round(size / 6), LARGEST_DEFAULT))


def estimate(call: LayerCall) -> Tensor:
    """The rule of the modes cd, fd, jvp and oracle. Chooses ``call.eps`` first, where it is None."""
    config = call.config
    if config.control in ("fit", "identity") and call.v.shape != call.x.shape:
        raise ValueError(
            f"control={config.control!r} needs a layer that keeps the shape of its input, got {tuple(call.x.shape)} "
            f"to {tuple(call.v.shape)}. Use control=None, or 'local' with a stand-in."
        )
    units = layout_of(config, call.x.shape, call.v.shape, call.segments, call.batch_dims)
    readout = Readout(
        call.f,
        call.x,
        call.v,
        units,
        call.count,
        batched=call.batched,
        noise=config.readout_noise,
        generator=call.generator("noise") if config.readout_noise else None,
    )
    if config.mode in ("cd", "fd") and call.eps is None:
        call.eps = choose_eps(readout, config.mode, config.eps_mode, call.generator("calibration"))
    along = derivative_along(call, readout)
    directions = Directions(call, units, readout)

    n = directions.n
    if config.measurement:
        along = Measured(along, call, n)
    control = _control(call, readout, along)
    surrogate = SurrogateControl(call, units, readout.dtype) if config.surrogate else None
    total = torch.zeros(call.x.shape, dtype=readout.dtype, device=call.x.device)
    for start in range(0, n, config.probe_chunk):
        u = directions.draw(start, min(start + config.probe_chunk, n))  # [k, *input shape]
        D = along(u)  # [k, readings]
        if control is not None:
            D = D - control.factor * units.read(control.direction * u)
        if surrogate is not None:
            D = surrogate.remainder(u, D)
        total += (units.spread(D) * u).sum(0)
    total /= n
    if config.shrink == "mmse":
        total /= 1 + directions.relative_variance()
    if control is not None:
        total += control.known
    if surrogate is not None:
        surrogate.learn()
        if surrogate.known is not None:
            total += surrogate.known
    if call.valid is not None and config.mask_padding:
        total = total * call.valid
    return total.to(call.x.dtype)


def derivative_along(call: LayerCall, readout: Readout) -> Callable[[Tensor], Tensor]:
    """From directions [k, *input shape] to readings <v, J u> [k, ...], by the means of the configuration's mode."""
    mode = call.config.mode
    if mode == "jvp":
        return readout.tangent
    if mode == "oracle":
        g = exact(call).to(readout.dtype)
        return lambda u: readout.units.read(g * u)
    steps = readout.steps(call.eps, call.config.eps_mode)
    difference = readout.central if mode == "cd" else readout.forward
    return lambda u: difference(u, steps)


class Directions:
    """The probes of one call, in the shape of inputs: zero at padding, within the wanted subspace.

    Attributes:
        n: how many.
        size: dimensions among which they are drawn.
    """

    def __init__(self, call: LayerCall, units: UnitLayout, readout: Readout) -> None:
        config = call.config
        self.units = units
        self.valid = call.valid if config.mask_padding else None
        self.basis: Tensor | None = None
        self.size = units.size
        if config.subspace == "error":
            self.basis = error_subspace(readout.v, call.x.shape, config.subspace_rank)  # [B, T, r]
            self.size = self.basis.shape[-1] * call.x.shape[-1]
        self.n = default_probes(self.size) if config.n_probes is None else config.n_probes
        self._probe, self._width = config.probe, call.x.shape[-1]
        self._probes = Probes(
            config.probe,
            self.n,
            units.count,
            self.size,
            call.generator("probes"),
            dtype=readout.dtype,
            call=call.call,
            lasting_generator=private_generator(call.x.device, config.seed, call.name, call.rank, "lasting"),
        )

    def draw(self, start: int, stop: int) -> Tensor:
        """Probes start to stop − 1, [k, *input shape]."""
        u = self._probes.draw(start, stop)  # [k, U, d]
        if self.basis is not None:
            w = u.reshape(len(u), self.units.count, -1, self._width)  # [k, B, r, C]
            return torch.einsum("btr,kbrc->kbtc", self.basis, w)
        u = self.units.as_inputs(u)
        return u if self.valid is None else u * self.valid

    def relative_variance(self) -> float:
        """Of the estimate, by the formula."""
        return relative_variance(self._probe, self.n, self.size)


def error_subspace(v: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """The top left singular vectors of every sample's v, [B, T, r], orthonormal: where along a sequence the error is.

    Raises:
        ValueError: input and output are not [B, T, C] with the same T.
    """
    if len(shape) != 3 or v.shape[:2] != shape[:2]:
        raise ValueError(
            f"subspace='error' needs [B, T, C] with the same positions before and after the layer, got {tuple(shape)} "
            f"and {tuple(v.shape)}. Use subspace='full'."
        )
    return torch.linalg.svd(v, full_matrices=False).U[..., :rank]


@dataclass(frozen=True)
class Control:
    """What is known of a gradient.

    Attributes:
        factor: s, one per reading.
        direction: w, of the input's shape.
        known: s w, of the input's shape.
    """

    factor: Tensor | float
    direction: Tensor
    known: Tensor


def _control(call: LayerCall, readout: Readout, along: Callable[[Tensor], Tensor]) -> Control | None:
    control, v, units = call.config.control, readout.v, readout.units
    if control is None:
        return None
    if control == "identity":
        return Control(1.0, v, v)
    w = v if control == "fit" else exact(call).to(readout.dtype)
    # The exact derivative along w, with w scaled to an RMS of 1 so that the step is that of a probe.
    tiny = torch.finfo(readout.dtype).tiny
    direction = (w / units.rms(w)[1].clamp_min(tiny))[None]
    if call.config.mode == "fd":
        D = readout.central(direction, readout.steps(call.eps, call.config.eps_mode))
    else:
        D = along(direction)
    s = D / units.read(direction * w).clamp_min(tiny)  # [1, readings]
    return Control(s, w, units.spread(s)[0] * w)


def exact(call: LayerCall) -> Tensor:
    """The rule of mode exact: autograd through the layer or its stand-in.

    Raises:
        ValueError: there is no graph from output to input.
    """
    if call.differentiable is None:
        raise ValueError(f"mode={call.config.mode!r} needs autograd, and the layer {call.name!r} has none here.")
    call.count.exact_backwards += 1
    with torch.enable_grad():
        x = call.x.detach().requires_grad_()
        y = call.differentiable(x)
        gradient = torch.autograd.grad(y, x, call.v, allow_unused=True)[0] if y.requires_grad else None
    if gradient is None:
        raise ValueError(
            f"mode={call.config.mode!r} needs autograd, and the output of the layer {call.name!r} has no graph to its "
            "input. Give its differentiable stand-in (local=...), or use mode='cd'."
        )
    return gradient


def without_queries(inputs: torch.Size, outputs: torch.Size) -> str | None:
    """The mode that asks nothing of a layer from these shapes to those, if there is one."""
    if inputs == outputs:
        return "skip"
    if len(inputs) == 3 and outputs == (inputs[0], inputs[2]):
        return "broadcast"
    return None


def skip(call: LayerCall) -> Tensor:
    """The rule of mode skip: straight-through, g = v (Bengio et al. 2013, arXiv 1308.3432)."""
    if call.v.shape != call.x.shape:
        raise ValueError(
            f"mode='skip' passes the output's gradient on as the input's, and the layer {call.name!r} maps "
            f"{tuple(call.x.shape)} to {tuple(call.v.shape)}. Use mode='cd', or 'broadcast' for a pooling stage."
        )
    masked = call.valid is not None and call.config.mask_padding
    return (call.v * call.valid if masked else call.v).to(call.x.dtype)


def broadcast(call: LayerCall) -> Tensor:
    """The rule of mode broadcast: v / T at each of the T positions, as if the stage were their mean."""
    x, v = call.x, call.v
    if without_queries(x.shape, v.shape) != "broadcast":
        raise ValueError(
            f"mode='broadcast' is for stages from [B, T, C] to [B, C], got {tuple(x.shape)} to {tuple(v.shape)}. Use "
            "mode='cd'."
        )
    if call.valid is None or not call.config.mask_padding:
        return (v / x.shape[1])[:, None].expand_as(x).to(x.dtype)
    valid = call.valid.expand(len(x), x.shape[1], 1).to(v.dtype)
    return (v[:, None] * valid / valid.sum(1, keepdim=True).clamp_min(1)).to(x.dtype)
