"""Embedding with a model in training whose parameters are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def ready_to_encode(model: nn.Module) -> Iterator[None]:
    """Let ``encode`` of a model that FSDP2 or DeepSpeed train run as the steps of training do.

    Its forwards leave inference mode for ``no_grad``: FSDP2 and ZeRO-3 keep parameters, or their memory, that a
    forward has gathered, and inference tensors cannot be differentiated in the next step. Features come in the
    parameters' dtype and in a plain dictionary, in which alone FSDP2 looks for what to cast; embeddings leave in fp32.

    Args:
        model: as the engine has prepared it: its hooks, which gather, run inside of those that are put on it here.
    """
    entered: list[ExitStack] = []

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        modes = ExitStack()
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())  # which the line above has ended
        entered.append(modes)
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        return tuple(_floats_to(dtype, x) for x in inputs)

    def after(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        entered.pop().close()
        return _floats_to(torch.float32, outputs)

    handles = [
        model.register_forward_pre_hook(before, prepend=True),
        model.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats_to(dtype: torch.dtype, features: Any) -> Any:
    """Features with tensors of numbers in the dtype, as a plain dictionary; what is no mapping as it is."""
    if not isinstance(features, Mapping):
        return features
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in features.items()
    }
