"""Training of the parameters that losses own, under engines that know none but the model's.

FSDP2 and DeepSpeed want to shard whatever an optimizer holds, and fail on parameters that are not the model's. Those
of the losses are few: every rank keeps them whole, receives the same gradients by
:meth:`~st_cached_extras.distributed.engines.Engine.average_gradients`, and steps them by an optimizer apart.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

LOSS_OPTIMIZER_FILE = "loss_optimizer.pt"

Groups = list[dict[str, Any]]


def split_groups(groups: Groups, own: Collection[nn.Parameter]) -> tuple[Groups, Groups]:
    """An optimizer's parameter groups without the parameters ``own``, and with them alone; without empty groups."""
    own = set(own)
    others = [{**group, "params": [p for p in group["params"] if p not in own]} for group in groups]
    owned = [{**group, "params": [p for p in group["params"] if p in own]} for group in groups]
    return [group for group in others if group["params"]], [group for group in owned if group["params"]]


class LossOptimizer:
    """An optimizer of the losses' parameters, which follows the learning rate of the model's.

    Args:
        optimizer: of the losses' parameters, with the learning rates of the beginning.
        learning_rate: that of the model's optimizer at the beginning, as a measure of how it is scheduled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        self.optimizer = optimizer
        self._learning_rate = learning_rate
        self._learning_rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, learning_rate: float, loss_scale: float = 1.0) -> None:
        """Step once and forget the gradients.

        Args:
            learning_rate: that of the model's optimizer now.
            loss_scale: by which the gradients are too large.
        """
        scheduled = learning_rate / self._learning_rate if self._learning_rate else 0.0
        for group, initial in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            group["lr"] = initial * scheduled
            for parameter in group["params"]:
                if parameter.grad is not None and loss_scale != 1.0:
                    parameter.grad /= loss_scale
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str) -> None:
        """Write the state into the folder of a checkpoint."""
        path = Path(folder) / LOSS_OPTIMIZER_FILE
        unfinished = path.with_suffix(".unfinished")
        torch.save(self.optimizer.state_dict(), unfinished)
        os.replace(unfinished, path)

    def load(self, folder: str) -> None:
        """Read the state from the folder of a checkpoint.

        Raises:
            ValueError: there is none, or it is that of other parameters.
        """
        path = Path(folder) / LOSS_OPTIMIZER_FILE
        try:
            self.optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} has no {LOSS_OPTIMIZER_FILE}: it was written for losses without parameters, or without "
                "FSDP2 and DeepSpeed. Resume under the engine and with the losses that it was trained with."
            ) from error
