"""A Trainer that also keeps what losses own.

``SentenceTransformerTrainer`` trains the parameters of a loss but saves only the model: on resuming, a learned scale
starts anew beside the optimizer state of the old one. The mixin writes them, and every other state that a replay
needs to go on as before, into one file of each checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.model import BaseModel
from torch import Tensor, nn

from st_cached_extras._compat import uncompiled

logger = logging.getLogger(__name__)

LOSS_STATE_FILE = "loss_state.safetensors"


class ReplayTrainerMixin:
    """Saves and restores the state of losses with every checkpoint; mix it into any ``SentenceTransformerTrainer``.

    The state is the parameters that a loss owns (a scale, a bias, a classifier, a projection head; never those of the
    model, nor of another SentenceTransformer that the loss holds, such as a teacher) and the ``replay_state()`` of
    every module of the loss and of the model that has one. It is written to ``loss_state.safetensors`` in the
    checkpoint's folder, under the path of its module.

    Raises:
        ValueError: on resuming, if the checkpoint's loss state is damaged or belongs to other losses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for _, module in self._loss_modules():
            if hasattr(module, "state_is_saved"):
                module.state_is_saved = True

    def loss_state(self) -> dict[str, Tensor]:
        """Copies on the CPU of all state that the losses own, by module path."""
        tensors = dict(self._loss_parameters())
        for path, module in self._stateful_modules():
            tensors |= {f"{path}.replay_state.{key}": value for key, value in module.replay_state().items()}
        return {path: tensor.detach().cpu().contiguous().clone() for path, tensor in tensors.items()}

    def load_loss_state(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`loss_state` returned, all of it or, if it does not fit, nothing."""
        expected = self.loss_state()
        if state.keys() != expected.keys():
            raise ValueError(
                "The loss state of the checkpoint belongs to other losses: "
                f"missing are {sorted(expected.keys() - state.keys()) or 'none'}, unknown are "
                f"{sorted(state.keys() - expected.keys()) or 'none'}. Resume with the losses that it was trained with."
            )
        for path, value in expected.items():
            if state[path].shape != value.shape:
                raise ValueError(
                    f"The loss state of the checkpoint has {path} of shape {list(state[path].shape)}, and the loss of "
                    f"this run {list(value.shape)}. Resume with the losses that it was trained with."
                )
        with torch.no_grad():
            for path, parameter in self._loss_parameters():
                parameter.copy_(state[path])
        for path, module in self._stateful_modules():
            prefix = f"{path}.replay_state."
            module.load_replay_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    # ------------------------------------------------------------------------------------ the Trainer's hooks

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if state := self.loss_state():
            path = Path(output_dir if output_dir is not None else self.args.output_dir) / LOSS_STATE_FILE
            unfinished = path.with_suffix(".unfinished")
            save_file(state, unfinished)
            os.replace(unfinished, path)

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(checkpoint_path, *args, **kwargs)
        self._load_loss_state_from(checkpoint_path)

    def _load_loss_state_from(self, checkpoint_path: str) -> None:
        path = Path(checkpoint_path) / LOSS_STATE_FILE
        if not path.exists():
            if self.loss_state():
                logger.warning(
                    f"{checkpoint_path} has no {LOSS_STATE_FILE}: it was written without ReplayTrainerMixin. The "
                    "parameters and counters of the loss start anew."
                )
            return
        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a readable safetensors file ({error}). Resume from another checkpoint."
            ) from error
        self.load_loss_state(state)

    # --------------------------------------------------------------------------------------- what there is

    def _loss_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules of the loss or losses, but no SentenceTransformer and nothing inside one."""
        losses = self.loss if isinstance(self.loss, dict) else {"": self.loss}
        for name, loss in losses.items():
            yield from _outside_of_models(f"loss.{name}" if name else "loss", loss, set())

    def _loss_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, module in self._loss_modules():
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter

    def _stateful_modules(self) -> Iterator[tuple[str, Any]]:
        model = ((f"model.{path}", module) for path, module in self.model.named_modules() if path)
        for path, module in (*self._loss_modules(), *model):
            if hasattr(module, "replay_state"):
                yield path, module


def _outside_of_models(path: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in module.named_children():
        if not _holds_a_model(child):
            yield from _outside_of_models(f"{path}.{name}", child, seen)


def _holds_a_model(module: nn.Module) -> bool:
    """Whether the module is a SentenceTransformer, perhaps compiled or wrapped by an engine."""
    inner = uncompiled(module)
    return isinstance(getattr(inner, "module", inner), BaseModel)


class ReplaySentenceTransformerTrainer(ReplayTrainerMixin, SentenceTransformerTrainer):
    """``SentenceTransformerTrainer`` that saves and restores the state of its losses, too."""
