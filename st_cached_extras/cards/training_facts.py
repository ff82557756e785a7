"""What a Trainer knows of the run that it has done, for the card."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.trainer import BaseTrainer
from torch import nn

from st_cached_extras._compat import uncompiled
from st_cached_extras.replay import ReplayLoss
from st_cached_extras.zbp import zbp_blocks, zbp_stats


def training_facts(trainer: BaseTrainer, unit: str = "rows") -> dict[str, Any]:
    """Facts of a run, by label: batch, caching, engine, precision, steps, seed, machine, layers without a backward.

    A collective where layers have no backward, because their queries are summed over ranks: call it on all of them.

    Args:
        trainer: after training.
        unit: what a row is, such as "pairs".
    """
    args, state = trainer.args, trainer.state
    devices, batches = args.world_size, args.gradient_accumulation_steps
    facts = {
        "Batch": f"{args.train_batch_size} {unit}"
        + (f" on each of {devices} devices" if devices > 1 else "")
        + (f", {batches} batches a step" if batches > 1 else "")
    }
    caching = list(dict.fromkeys(_caching(loss, unit) for loss in replay_losses(trainer.loss)))
    if caching:
        facts["Memory"] = "; ".join(caching)
    facts["Engine"] = engine_name(trainer)
    facts["Precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else str(trainer.model.dtype).split(".")[-1]
    facts["Steps"] = state.global_step
    if args.load_best_model_at_end and trainer.model.model_card_data.best_model_step is not None:
        facts["Steps"] = f"{state.global_step}, of which step {trainer.model.model_card_data.best_model_step} was best"
    if args.resume_from_checkpoint:
        facts["Interrupted"] = "yes: the run went on from a checkpoint"
    facts["Seed"] = args.seed
    facts["Machine"] = machine(args.device)
    if layers := layers_without_backward(trainer.model):
        facts["Layers without a backward"] = layers
    return facts


def engine_name(trainer: BaseTrainer) -> str:
    """What shares the work among devices."""
    if trainer.is_deepspeed_enabled:
        return f"DeepSpeed ZeRO-{trainer.accelerator.state.deepspeed_plugin.zero_stage}"
    if trainer.is_fsdp_enabled:
        return "FSDP2"
    return "DistributedDataParallel" if trainer.args.world_size > 1 else "one process"


def machine(device: torch.device) -> str:
    """What a device is; no name by which the machine could be found."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {platform.system()}"
    if device.type != "cpu":
        return f"{device.type}, {platform.machine()} {platform.system()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU, {cores} cores, {torch.get_num_threads()} thread(s), {platform.machine()} {platform.system()}"


def replay_losses(loss: nn.Module | dict[str, nn.Module]) -> Iterator[ReplayLoss]:
    """The cached losses among the Trainer's, inside wrappers, too; of a composite, the composite alone."""
    for one in loss.values() if isinstance(loss, dict) else [loss]:
        if isinstance(one, ReplayLoss):
            yield one
        elif isinstance(inner := getattr(uncompiled(one), "loss", None), nn.Module):
            yield from replay_losses(inner)


def _caching(loss: ReplayLoss, unit: str) -> str:
    size = (
        f"mini-batches of {loss.mini_batch_size} rows"
        if loss.mini_batch_num_tokens is None
        else f"mini-batches of at most {loss.mini_batch_num_tokens} tokens"
    )
    chosen = loss.differentiated_samples
    if chosen is None:
        share = "every row is differentiated"
    else:
        count = f"{chosen} rows" if isinstance(chosen, int) else f"{chosen:.0%} of the rows"
        share = f"{count} are differentiated, drawn at random in each step and weighted for the rest"
    kept = f", {loss.kept_graphs:.0%} of their graphs kept" if loss.kept_graphs else ""
    gathered = ", one loss over all devices" if loss.gather_across_devices else ""
    return f"{size}{kept}, {share}{gathered}"


def layers_without_backward(model: nn.Module) -> str:
    """Layers whose backward is estimated, how, and by how many queries; a collective, as `zbp_stats` is."""
    stats, blocks = zbp_stats(model), zbp_blocks(model)
    return "; ".join(
        f"`{name}`: {block.zbp.mode or block.zbp.config.mode}, {stats[name]['queries']:,.0f} queries in "
        f"{stats[name]['backward_calls']:,.0f} backwards"
        for name, block in blocks.items()
    )
