"""What a recipe sets in the Trainer's arguments before the Trainer sees them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentence_transformers.base.training_args import BatchSamplers
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from st_cached_extras.data import distinct
from st_cached_extras.recipes.arguments import DataArguments, LossArguments, RecipeTrainingArguments, one_for_each
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.losses import make_loss


def check_training(args: RecipeTrainingArguments, data: DataArguments, text_columns: Sequence[str]) -> str | None:
    """Make the Trainer's arguments fit the recipe, before anything is loaded.

    Args:
        args: changed in place: batches of which no text comes twice compare the columns of text alone, and what early
            stopping wants is set.
        data: where the data come from.
        text_columns: columns of text.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        UsageError: arguments that exclude each other, or no checkpoint where one is asked for.
    """
    if data.streaming and args.max_steps <= 0:
        raise UsageError("--streaming needs --max_steps: how many rows a stream has is not known before its end.")
    if data.streaming and not data.dataset:
        raise UsageError("--streaming needs --dataset: the default data are made here.")
    args.dataloader_persistent_workers = args.dataloader_num_workers > 0  # else they start anew for every epoch
    if data.streaming:
        args.batch_sampler = BatchSamplers.BATCH_SAMPLER  # there is nothing else for streams
    elif args.batch_sampler == BatchSamplers.NO_DUPLICATES:
        args.batch_sampler = distinct(*text_columns)
    if getattr(data, "lora_rank", None) is not None and _shards(args):
        raise UsageError("--lora_rank is for one device or DDP: under FSDP2 and DeepSpeed adapters are not saved.")
    if args.early_stopping_patience is not None:
        if args.eval_strategy == "no":
            raise UsageError("--early_stopping_patience needs --eval_strategy steps or epoch.")
        args.load_best_model_at_end = True
        args.save_strategy, args.save_steps = args.eval_strategy, args.eval_steps or args.save_steps
    return _resume_point(args)


def stop_early(args: RecipeTrainingArguments, evaluators: Sequence[Any]) -> list[TrainerCallback]:
    """The callback of ``--early_stopping_patience``, by the main score of the first evaluator unless another is named.

    Called before the Trainer is made, since what the best model is goes into its arguments.
    """
    if args.load_best_model_at_end and args.metric_for_best_model in (None, "loss"):
        args.metric_for_best_model, args.greater_is_better = f"eval_{evaluators[0].primary_metric}", True
    if args.early_stopping_patience is None:
        return []
    return [EarlyStoppingCallback(args.early_stopping_patience)]


def make_losses(model: Any, arguments: LossArguments, train: Any) -> nn.Module | dict[str, nn.Module]:
    """The loss, or one for each of several datasets by their names."""
    if not isinstance(train, dict):
        if len(arguments.loss) > 1:
            raise UsageError(f"--loss has {len(arguments.loss)} names for one dataset.")
        return make_loss(model, arguments)
    names = one_for_each(arguments.loss, len(train), "--loss")
    if len(set(names)) == 1 and len(arguments.loss) == 1:
        return make_loss(model, arguments)
    return {name: make_loss(model, arguments, index) for index, name in enumerate(train)}


def _shards(args: RecipeTrainingArguments) -> bool:
    flags = (os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() for engine in ("FSDP", "DEEPSPEED"))
    return bool(args.deepspeed or args.fsdp) or "true" in flags


def _resume_point(args: RecipeTrainingArguments) -> str | None:
    wanted = args.resume_from_checkpoint
    if wanted is None:
        return None
    if str(wanted).lower() in ("last", "true"):
        last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        if last is None:
            raise UsageError(
                f"--resume_from_checkpoint {wanted}: there is no checkpoint in {args.output_dir}. Checkpoints are "
                "written with --save_strategy steps or epoch."
            )
        return last
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise UsageError(f"--resume_from_checkpoint {wanted}: there is no checkpoint, which has a trainer_state.json.")
    return wanted
