"""Giving layers of a model an estimated backward, and taking it away again, without renaming anything.

A layer's class is swapped for a subclass of it made on the spot. The module stays the same object in the same place:
its keys in the state dict do not change, a plain sentence-transformers loads what is saved, adapters, hooks and
checkpointing find what they look for, and copies are independent. (A wrapping module would rename the layer's keys,
and a plain reload would leave it randomly initialised without an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn

from st_cached_extras.distributed.world import World
from st_cached_extras.zbp.block import checked_config
from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.modes import TAUGHT_BY_OUTPUT
from st_cached_extras.zbp.queries import QueryCount
from st_cached_extras.zbp.research.controls import forget_captured
from st_cached_extras.zbp.research.error_tap import ErrorTap
from st_cached_extras.zbp.run import run_layer
from st_cached_extras.zbp.state import LayerState, Warned, ZBPLayer
from st_cached_extras.zbp.survey import layers_without_backward

Layers: TypeAlias = str | Sequence[str] | Sequence[int] | type[nn.Module] | tuple[type[nn.Module], ...]
_STATISTICS = (
    "queries",
    "parameter_queries",
    "calibration_queries",
    "exact_backwards",
    "backward_calls",
    "seconds",
)


class SwappedLayer(ZBPLayer):
    """Goes before a layer's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        local = self.zbp_local
        stand_in = None if local is None else lambda *a, **k: local(self, *a, **k)
        return run_layer(self.zbp, self, super().forward, stand_in, args, kwargs)

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with the backward that it has by itself."""
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class has no name that an unpickler could import: it is made again from the layer's own.
        return _new_swapped, (_own_class(self),), self.__dict__.copy()


def apply_zbp(
    model: nn.Module,
    layers: Layers,
    config: ZBPConfig | None = None,
    *,
    batch: Any = None,
    local: Callable[..., Any] | None = None,
) -> dict[str, nn.Module]:
    """Give layers of a model a backward that is estimated (or passed through, or computed) as ``config`` says.

    Args:
        model: any module; changed in place.
        layers: which of its modules:

            - a pattern of names as in ``model.named_modules()``, such as ``"*.layer.3"`` or ``"*.mlp"``, or several;
            - indexes into the one list of layers that the model has, such as ``[2, 3]`` or ``[-1]``;
            - a class of modules, or a tuple of classes;
            - ``"no_backward"``: the smallest modules whose backward is missing or wrong on ``batch``.
        config: how; the default leaves the choice to the layer (``mode="auto"``).
        batch: one input of ``model(batch)``, for ``layers="no_backward"`` alone.
        local: differentiable stand-in, called as ``local(layer, *args, **kwargs)`` with the arguments of the layer's
            forward; it may call ``layer.plain_forward``. See :class:`~st_cached_extras.zbp.ZBPBlock`. To be pickled
            with the model it must be a module-level function.

    Returns:
        The changed layers by name.

    Raises:
        TypeError: ``layers`` or ``config`` is of no such kind.
        ValueError: nothing matches, a layer is inside another or wrapped already, or there is no single list of
            layers.
    """
    config = checked_config(ZBPConfig() if config is None else config, local)
    chosen = _choose(model, layers, batch)
    wrapped = zbp_blocks(model)
    for name, layer in chosen.items():
        if isinstance(layer, ZBPLayer):
            raise ValueError(f"The layer {name!r} has an estimated backward already. Call remove_zbp(model) first.")
        inside = [other for other in (*chosen, *wrapped) if other != name and _is_inside(name, other)]
        around = [other for other in wrapped if _is_inside(other, name)]
        if inside or around:
            raise ValueError(
                f"The layers {name!r} and {(inside + around)[0]!r} are one inside the other: give only one of them an "
                "estimated backward, the smaller one if it alone lacks a backward."
            )
    warned = Warned()
    for name, layer in chosen.items():
        layer.zbp = LayerState(config, name, warned=warned)
        layer.zbp_local = local
        layer.__class__ = _swapped_class(type(layer))
    _watch_output(model)
    return chosen


def remove_zbp(model: nn.Module) -> None:
    """Give the layers that :func:`apply_zbp` changed their own class back. Blocks of one's own stay what they are."""
    for layer in zbp_blocks(model).values():
        if isinstance(layer, SwappedLayer):
            layer.__class__ = _own_class(layer)
            del layer.zbp, layer.zbp_local
    tap = getattr(model, "error_tap", None)
    if tap is not None and not zbp_blocks(model):
        tap.close(model)


def zbp_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with an estimated backward, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ZBPLayer)}


def zbp_stats(model: nn.Module) -> dict[str, dict[str, float]]:
    """What the estimates have cost so far, by layer, summed over ranks: call it on all of them.

    Returns:
        Per layer: ``queries`` (forward calls for input gradients), ``parameter_queries``, ``calibration_queries`` (for
        the choice of steps and modes), ``exact_backwards`` (backpropagations through the layer: a mode that only a
        diagnosis can afford has some), ``backward_calls`` and ``seconds`` (of backwards, on the host's clock).
    """
    blocks = zbp_blocks(model)
    rows = [
        [
            float(state.count.queries),
            float(state.count.parameter_queries),
            float(state.count.calibration_queries),
            float(state.count.exact_backwards),
            float(state.calls),
            state.seconds,
        ]
        for state in (block.zbp for block in blocks.values())
    ]
    if not rows:
        return {}
    world = World.current()
    total = torch.tensor(rows, dtype=torch.float64)
    if world.size > 1:
        total = world.all_reduce(total.to(next(model.parameters()).device)).cpu()
    names = [name for name in blocks]
    return {
        name: {key: value if key == "seconds" else int(value) for key, value in zip(_STATISTICS, row, strict=True)}
        for name, row in zip(names, total.tolist(), strict=True)
    }


def set_mode(model: nn.Module, mode: str, **changes: Any) -> None:
    """Give all layers with an estimated backward another mode, and go on counting their calls.

    What a mode has learned (a feedback matrix, a surrogate) stays for when it is set again; ``"capture"`` begins anew.

    Args:
        model: with wrapped layers or blocks.
        mode: see :class:`~st_cached_extras.zbp.ZBPConfig`.
        changes: other arguments of the configuration.

    Raises:
        ValueError: there are no such layers, or no such mode.
    """
    blocks = zbp_blocks(model)
    if not blocks:
        raise ValueError("set_mode changes layers with an estimated backward; the model has none. Call apply_zbp.")
    configs = [block.zbp.config.replace(mode=mode, **changes) for block in blocks.values()]
    for block, config in zip(blocks.values(), configs, strict=True):
        block.zbp.configure(config)
        if mode == "capture":
            forget_captured(block.zbp.memory)
    _watch_output(model)


def total_queries(model: nn.Module) -> int:
    """Forward calls of all layers for estimates of gradients, over ranks: call it on all of them. Those that chose
    steps and modes are not among them."""
    return sum(layer["queries"] + layer["parameter_queries"] for layer in zbp_stats(model).values())


def reset_queries(model: nn.Module) -> None:
    """Count queries and seconds from zero. The number of backwards, and with it the cycle of probes, goes on."""
    for block in zbp_blocks(model).values():
        block.zbp.count = QueryCount()
        block.zbp.seconds = 0.0


def _watch_output(model: nn.Module) -> None:
    if any(block.zbp.mode in TAUGHT_BY_OUTPUT for block in zbp_blocks(model).values()):
        ErrorTap.of(model)


@cache
def _swapped_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(f"ZBP{own.__name__}", (SwappedLayer, own), {"__module__": own.__module__})


def _own_class(layer: nn.Module) -> type[nn.Module]:
    """The class that the layer had; what others (such as FSDP) put before the swap stays a matter of theirs."""
    if SwappedLayer not in type(layer).__bases__:
        raise TypeError(
            f"The class of the layer was changed again after apply_zbp, to {type(layer).__name__}. Undo that first."
        )
    return type(layer).__bases__[1]


def _new_swapped(own: type[nn.Module]) -> nn.Module:
    swapped = _swapped_class(own)
    return swapped.__new__(swapped)


# ------------------------------------------------------------------------------------------------------ which layers


def _choose(model: nn.Module, layers: Layers, batch: Any) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    if isinstance(layers, type) or (
        isinstance(layers, tuple) and layers and all(isinstance(entry, type) for entry in layers)
    ):
        chosen = {name: module for name, module in modules.items() if isinstance(module, layers)}
    elif layers == "no_backward":
        if batch is None:
            raise ValueError("layers='no_backward' runs the model to see which layers lack a backward: give batch=...")
        return layers_without_backward(model, batch)
    elif isinstance(layers, Sequence) and layers and all(type(entry) is int for entry in layers):
        return _by_index(model, layers)
    elif isinstance(layers, str) or (
        isinstance(layers, Sequence) and layers and all(isinstance(entry, str) for entry in layers)
    ):
        patterns = [layers] if isinstance(layers, str) else layers
        chosen = {n: m for n, m in modules.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    else:
        raise TypeError(
            f"layers must be a pattern of names, a list of indexes, a class or 'no_backward', got {layers!r}."
        )
    if not chosen:
        some = ", ".join(list(modules)[:8])
        raise ValueError(f"layers={layers!r} matches none of the model's {len(modules)} modules ({some}, ...).")
    return chosen


def list_of_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The one list of layers of a model, with its name.

    Raises:
        ValueError: the model has none or several, such as towers of images and of text.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module) or any(_is_inside(name, other) for other in lists):
            continue
        if len({_own_class(layer) if isinstance(layer, SwappedLayer) else type(layer) for layer in module}) == 1:
            lists[name] = module
    if len(lists) != 1:
        raise ValueError(
            f"Layers are counted in the model's list of layers, and it has {len(lists)} such lists "
            f"({', '.join(lists) or 'none'}). Name the layers by a pattern, such as '*.layers.3'."
        )
    return next(iter(lists.items()))


def _by_index(model: nn.Module, indexes: Sequence[int]) -> dict[str, nn.Module]:
    path, layers = list_of_layers(model)
    for index in indexes:
        if not -len(layers) <= index < len(layers):
            raise ValueError(f"layers has the index {index}, but {path} has {len(layers)} layers.")
    return {f"{path}.{index % len(layers)}": layers[index % len(layers)] for index in indexes}


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")
