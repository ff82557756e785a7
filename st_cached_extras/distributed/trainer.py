"""A Trainer that also keeps what losses own, and writes whole models where ranks hold shards.

``SentenceTransformerTrainer`` trains the parameters of a loss but saves only the model: on resuming, a learned scale
starts anew beside the optimizer state of the old one. The mixin writes them, and every other state that a replay
needs to go on as before, into one file of each checkpoint. Under FSDP2 and DeepSpeed it trains them, too, which fails
without it, and gathers the weights that it saves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.model import BaseModel
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from st_cached_extras._compat import layers_to_shard, model_of_checkpoint, uncompiled
from st_cached_extras.distributed.checkpoints import load_whole_weights, saving, whole_weights
from st_cached_extras.distributed.evaluation import ready_to_encode
from st_cached_extras.distributed.own_parameters import LossOptimizer, split_groups

logger = logging.getLogger(__name__)

LOSS_STATE_FILE = "loss_state.safetensors"
GROUP_NAMES = {"params", "model", "optimizer_dict"}  # what Trainer calls an optimizer's parameter groups


class ReplayTrainerMixin:
    """Saves and restores the state of losses with every checkpoint; mix it into any ``SentenceTransformerTrainer``.

    The state is the parameters that a loss owns (a scale, a bias, a classifier, a projection head; never those of the
    model, nor of another SentenceTransformer that the loss holds, such as a teacher) and the ``replay_state()`` of
    every module of the loss and of the model that has one. It is written to ``loss_state.safetensors`` in the
    checkpoint's folder, under the path of its module.

    Under FSDP2 and DeepSpeed, parameters of the loss are stepped by an optimizer of their own, of the same kind and
    with the same schedule; every checkpoint and every ``save_model`` holds the whole model, to be loaded by
    ``SentenceTransformer(folder)``; resuming and loading the best model work; and evaluators may call ``encode``.
    Under FSDP2, layers are sharded one by one, where no class of them is named.

    Raises:
        ValueError: on resuming, if the checkpoint's loss state is damaged or belongs to other losses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loss_optimizer: LossOptimizer | None = None
        self._loss_scale = 1.0
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap is None:
            # Accelerate asks the SentenceTransformer, which names none: it would be gathered whole in every forward.
            self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = layers_to_shard(self.model) or None
        self.add_callback(_StepLosses(self))
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
        # What appears as a run goes on is not there yet in one that is to be resumed.
        grown = tuple(
            f"{path}.replay_state.{module.grown_replay_state}"
            for path, module in self._stateful_modules()
            if hasattr(module, "grown_replay_state")
        )
        expected = {path: value for path, value in self.loss_state().items() if not path.startswith(grown)}
        found = {path for path in state if not path.startswith(grown)}
        if found != expected.keys():
            raise ValueError(
                "The loss state of the checkpoint belongs to other losses: "
                f"missing are {sorted(expected.keys() - found) or 'none'}, unknown are "
                f"{sorted(found - expected.keys()) or 'none'}. Resume with the losses that it was trained with."
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

    # ------------------------------------------------------------------------------------ training

    @property
    def _shards(self) -> bool:
        """Whether an engine trains that knows the model's parameters alone."""
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        optimizer_cls, kwargs, _ = self._split_optimizer(args, model)
        return optimizer_cls, kwargs

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if self._loss_optimizer is None:
            optimizer_cls, kwargs, groups = self._split_optimizer(self.args, model)
            if groups:
                options = {name: value for name, value in kwargs.items() if name not in GROUP_NAMES}
                self._loss_optimizer = LossOptimizer(optimizer_cls(groups, **options), self.args.learning_rate)
        return optimizer

    def _split_optimizer(self, args: Any, model: Any) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
        """Class and arguments of the model's optimizer, and the groups of the losses' where they have one apart."""
        optimizer_cls, kwargs = super().get_optimizer_cls_and_kwargs(args, model)
        own = [parameter for _, parameter in self._loss_parameters() if parameter.requires_grad]
        if not self._shards or not own:
            return optimizer_cls, kwargs, []
        (name,) = GROUP_NAMES & kwargs.keys()
        groups, of_losses = split_groups(kwargs[name], own)
        return optimizer_cls, {**kwargs, name: groups}, of_losses

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._loss_optimizer is not None:
            self._loss_scale = self._current_loss_scale()  # the step itself may change it
        return super().training_step(*args, **kwargs)

    def _current_loss_scale(self) -> float:
        if self.is_deepspeed_enabled:
            return float(getattr(self.model_wrapped.optimizer, "loss_scale", 1.0))
        scaler = getattr(self.accelerator, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    def _step_losses(self) -> None:
        if self._loss_optimizer is not None and not self.accelerator.optimizer_step_was_skipped:
            self._loss_optimizer.step(self._get_learning_rate(), self._loss_scale)
        for _, parameter in self._loss_parameters():  # the Trainer zeroes those of the model
            parameter.grad = None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with ready_to_encode(self.model) if self._shards else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    # ------------------------------------------------------------------------------------ saving and loading

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._shards:
            super().save_model(output_dir, _internal_call)
            return
        # Trainer would leave it to the kind of sharded checkpoint whether the model is written at all.
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._shards:
            # All ranks, because the model card is made with embeddings of the model. The others' files are not kept.
            whole = whole_weights(self.model_wrapped)
            with saving(self.model, whole), ready_to_encode(self.model), TemporaryDirectory() as elsewhere:
                super()._save(output_dir if self.args.should_save else elsewhere)
        elif self.args.should_save:
            super()._save(output_dir)
        if not self.args.should_save:
            return
        if state := self.loss_state():
            path = Path(output_dir if output_dir is not None else self.args.output_dir) / LOSS_STATE_FILE
            unfinished = path.with_suffix(".unfinished")
            save_file(state, unfinished)
            os.replace(unfinished, path)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._loss_optimizer is not None and self.args.should_save:
            self._loss_optimizer.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._loss_optimizer is not None:
            self._loss_optimizer.load(checkpoint)
        if self.is_deepspeed_enabled:  # which loads the model on its own
            self._load_loss_state_from(checkpoint)

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        if self.is_deepspeed_enabled:
            deepspeed_load_checkpoint(self.model_wrapped, checkpoint_path)
        elif self.is_fsdp_enabled:
            first = self.accelerator.is_main_process
            weights = model_of_checkpoint(self.model, checkpoint_path).state_dict() if first else {}
            load_whole_weights(self.model, weights)
        else:
            super()._load_from_checkpoint(checkpoint_path)
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


class _StepLosses(TrainerCallback):
    """Steps the losses' parameters after the model's."""

    def __init__(self, trainer: ReplayTrainerMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._step_losses()


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
