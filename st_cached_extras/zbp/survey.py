"""Which layers of a model lack a backward: the derivative of every module is held against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor, nn

from st_cached_extras.zbp.arguments import LayerArguments, forward_signature
from st_cached_extras.zbp.detection import has_backward
from st_cached_extras.zbp.probes import private_generator
from st_cached_extras.zbp.queries import QueryCount


def layers_without_backward(model: nn.Module, batch: Any) -> dict[str, nn.Module]:
    """The smallest modules of a model whose backward is missing or wrong.

    A module is looked at if it takes a floating-point tensor first and returns one (or a tuple that begins with one);
    of modules inside each other, the innermost counts. Wrong means that autograd's derivative along random directions
    is off by more than half from a central difference, at each of three steps: .03, .1 and .01 of the input's RMS.

    Args:
        model: in the mode that it is trained in.
        batch: its input, as in ``model(batch)``.

    Returns:
        Modules by name; the global random state is as it was.

    Raises:
        ValueError: there are none.
    """
    found: dict[str, nn.Module] = {}
    seen: set[str] = set()

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Hooks of inner modules run first, and those of the modules around them can be spared.
            if name in seen or any(inner.startswith(f"{name}.") for inner in found):
                return
            seen.add(name)
            if not _lacks_backward(name, module, args, kwargs, output):
                return
            found[name] = module

        return hook

    handles = [
        module.register_forward_hook(look(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        with torch.no_grad(), RandContext(*_tensors_of(batch)):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ValueError(
            f"layers='no_backward': every one of the {len(seen)} modules that ran has a right backward. There is "
            "nothing that ZBP is needed for."
        )
    return found


def _lacks_backward(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    y = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return False
    try:
        arguments = LayerArguments(forward_signature(module.forward), name, args, kwargs)
    except (TypeError, ValueError):  # not a layer of one differentiable input
        return False
    x = arguments.release_input()
    random_state = RandContext(x)

    def f(z: Tensor) -> Tensor:
        with random_state:
            out = arguments.call(module.forward, z)
        return out[0] if isinstance(out, (tuple, list)) else out

    generator = private_generator(x.device, "no_backward", name)
    return not has_backward(f, f, x.detach(), generator, QueryCount())


def _tensors_of(batch: Any) -> list[Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else [batch]
    return [value for value in values if isinstance(value, Tensor)]
