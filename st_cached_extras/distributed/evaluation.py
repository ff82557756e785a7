"""Embedding with a model in training whose parameters are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def leaving_inference_mode(model: nn.Module) -> Iterator[None]:
    """Let forwards of the model run under ``no_grad`` where they would run in inference mode, as those of ``encode``.

    FSDP2 and ZeRO-3 keep parameters, or their memory, that a forward has gathered. Gathered in inference mode, these
    are inference tensors, which the next step of training cannot differentiate.

    Args:
        model: as an engine has prepared it: its hooks, which gather, run inside of those that are put on it here.
    """
    entered: list[ExitStack] = []

    def leave(module: nn.Module, inputs: Any) -> None:
        modes = ExitStack()
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())  # which the line above has ended
        entered.append(modes)

    def go_back(module: nn.Module, inputs: Any, outputs: Any) -> None:
        entered.pop().close()

    before = model.register_forward_pre_hook(leave, prepend=True)
    after = model.register_forward_hook(go_back, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
