"""Controls: what a gradient is worth that holds nothing, noise, or an error of another time.

    zero      0
    noise     a direction at random with the norm of each sample's exact gradient
    capture   the exact gradient, kept
    replay    the kept ones again, one a backward, in turn

Noise and capture run exact backpropagation through the layer, which the statistics count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from st_cached_extras.zbp.estimators import exact

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall

_CAPTURED, _REPLAYED = "captured.", "replayed"


def zero(call: LayerCall) -> Tensor:
    """The rule of mode zero: g = 0. Of a residual layer that is less than nothing known: its path is cut, too."""
    return torch.zeros_like(call.x)


def noise(call: LayerCall) -> Tensor:
    """The rule of mode noise: per sample |g| z / |z|, z Gaussian, g the exact gradient."""
    g = exact(call)
    z = torch.randn(
        g.shape,
        generator=call.generator("noise control"),
        device=g.device,
        dtype=torch.promote_types(g.dtype, torch.float32),
    )
    if call.valid is not None and call.config.mask_padding:
        z = z * call.valid
    axes = list(range(call.batch_dims, g.ndim))
    norms = [t.square().sum(axes, keepdim=True).sqrt() for t in (g.to(z.dtype), z)]
    return (z * norms[0] / norms[1].clamp_min(torch.finfo(z.dtype).tiny)).to(g.dtype)


def capture(call: LayerCall) -> Tensor:
    """The rule of mode capture: the exact gradient, of which a copy is kept in the layer's memory on the CPU."""
    g = exact(call)
    count = sum(key.startswith(_CAPTURED) for key in call.memory)
    call.memory[f"{_CAPTURED}{count}"] = g.detach().cpu().clone()
    return g


def replay(call: LayerCall) -> Tensor:
    """The rule of mode replay: the k-th backward gets the captured gradient k modulo their number.

    Raises:
        ValueError: none was captured, or the one in turn has another shape.
    """
    captured = [key for key in call.memory if key.startswith(_CAPTURED)]
    if not captured:
        raise ValueError(
            f"mode='replay' injects gradients that mode='capture' kept, and the layer {call.name!r} has none: run "
            "set_mode(model, 'capture') and a step before."
        )
    turn = int(call.memory.get(_REPLAYED, torch.tensor(0)))
    g = call.memory[f"{_CAPTURED}{turn % len(captured)}"]
    if g.shape != call.x.shape:
        raise ValueError(
            f"mode='replay' has a gradient of shape {tuple(g.shape)} in turn {turn}, and the input of the layer "
            f"{call.name!r} is {tuple(call.x.shape)}. Replay batches of the shapes that were captured, in their order."
        )
    call.memory[_REPLAYED] = torch.tensor(turn + 1)
    return g.to(call.x.device, call.x.dtype)


def forget_captured(memory: dict[str, Tensor]) -> None:
    """Drop what was captured."""
    for key in [key for key in memory if key.startswith(_CAPTURED) or key == _REPLAYED]:
        del memory[key]
