"""A module to put a layer of one's own in, so that its backward is estimated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.modes import IGNORES_SKIP
from st_cached_extras.zbp.run import run_layer
from st_cached_extras.zbp.state import LayerState, ZBPLayer


class ZBPBlock(ZBPLayer, nn.Module):
    """A module of one's own whose backward is estimated: y = f(x), or y = f(x) + skip(x).

    Args:
        f: the layer: a module, or a function of a tensor. It may return a tuple, whose first entry counts.
        config: how its backward is computed.
        skip: a path around it with an exact backward: ``"identity"``, a module, or None.
        batch_dims: leading axes of the input that count samples.
        local: a differentiable stand-in for f with the same arguments, such as its fake-quantised form or a
            surrogate: autograd goes through it where the configuration asks for autograd (``mode="exact"``,
            ``param_mode="local"`` and ``"straight_through"``), and ``control="local"`` starts from it. It should use
            f's own parameters.
        estimate_input_grad: False stops gradients at the input of f.
        name: seeds its probes: give blocks of one model different names.
        batched: f takes any number of leading axes, so that ``probe_chunk`` probes are one call of it.

    Raises:
        TypeError: f, skip or local cannot be called, or config is no ZBPConfig.
        ValueError: ``param_mode="straight_through"`` or ``control="local"`` without ``local``.

    Example::

        head = ZBPBlock(camera, ZBPConfig(mode="cd", n_probes=64, eps=0.3), name="camera")
    """

    def __init__(
        self,
        f: Callable[..., Any],
        config: ZBPConfig | None = None,
        skip: Literal["identity"] | nn.Module | None = None,
        batch_dims: int = 1,
        local: Callable[..., Any] | None = None,
        estimate_input_grad: bool = True,
        name: str = "",
        batched: bool = False,
    ) -> None:
        super().__init__()
        for argument, value in (("f", f), ("local", local), ("skip", None if skip == "identity" else skip)):
            if not (callable(value) or (value is None and argument != "f")):
                raise TypeError(f"{argument} must be a module or a function, got {value!r}.")
        self.f = f
        self.skip = skip
        self.local = local
        config = checked_config(ZBPConfig() if config is None else config, local)
        self.zbp = LayerState(
            config,
            name,
            estimate_input_grad=estimate_input_grad,
            is_branch=skip == "identity",
            batch_dims=batch_dims,
            batched=batched,
        )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """f(x, ...), plus skip(x) if there is one."""
        module = self.f if isinstance(self.f, nn.Module) else _NO_PARAMETERS
        out = run_layer(self.zbp, module, self.f, self.local, (x, *args), kwargs)
        if self.skip is None:
            return out
        if self.zbp.mode in IGNORES_SKIP:
            x = x.detach()
        beside = x if self.skip == "identity" else self.skip(x)
        return (out[0] + beside, *out[1:]) if isinstance(out, tuple) else out + beside

    def extra_repr(self) -> str:
        return f"config={self.zbp.config}, name={self.zbp.name!r}"


_NO_PARAMETERS = nn.Module()


def checked_config(config: ZBPConfig, local: Callable[..., Any] | None) -> ZBPConfig:
    """The configuration, if it is one and what it asks for is there."""
    if not isinstance(config, ZBPConfig):
        raise TypeError(f"config must be a ZBPConfig, got {type(config).__name__}.")
    if config.param_mode == "straight_through" and local is None:
        raise ValueError(
            "param_mode='straight_through' differentiates the layer's stand-in: give it as local=..., or use "
            "param_mode='auto', 'zo' or 'none'."
        )
    if config.control == "local" and local is None:
        raise ValueError(
            "control='local' starts from the gradient of the layer's stand-in: give it as local=..., or use "
            "control=None."
        )
    return config
