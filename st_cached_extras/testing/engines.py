"""Engines on the CPU: models really wrapped by FSDP2 and DeepSpeed, where Accelerate would silently fall back to DDP.

Everything here is for ranks of :func:`~st_cached_extras.testing.ranks.run_on_ranks`, which have a gloo process group.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")

WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPModule",
    "zero0": "DeepSpeedEngine",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}
"""The class that must be among those of a wrapped model, by engine."""


def forget_engine() -> None:
    """Undo what an engine leaves behind in this process: models are plain again when they are loaded."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # under ZeRO-3, transformers shards what it loads
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)


def describe_rank() -> None:
    """Set the environment variables by which a launcher would tell this process its rank."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(dist.get_rank())
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # the last one is read by DeepSpeed
        os.environ[name] = str(dist.get_world_size())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")  # nobody listens: the process group is there


def deepspeed_on_cpu() -> None:
    """Let Accelerate use DeepSpeed over gloo, without any extension that DeepSpeed would compile.

    Sets environment variables of this process: ``DS_ACCELERATOR``, ``ACCELERATE_USE_DEEPSPEED``.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ.pop("ACCELERATE_USE_CPU", None)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # it writes to the standard output
    # Collectives in shared memory would be compiled for minutes; gloo has the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState(backend="gloo")


@contextmanager
def fsdp2_on_cpu() -> Iterator[None]:
    """Let Accelerate use FSDP2 over gloo: it offers it for every kind of device but the CPU."""
    initialise = AcceleratorState.__init__

    def on_cpu(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        initialise(self, *args, **kwargs)
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = on_cpu
    try:
        yield
    finally:
        AcceleratorState.__init__ = initialise


def small_buckets(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a DeepSpeed configuration with buckets so small that a tiny model fills several."""
    config = copy.deepcopy(config)
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = 2000
    if zero["stage"] == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 500}
    return config


def make_accelerator(
    engine: str,
    *,
    layers: tuple[str, ...] = ("BertLayer",),
    accumulation: int = 1,
    clipping: float = 0.0,
    precision: str = "no",
    **zero_options: Any,
) -> Accelerator:
    """A fresh Accelerator, whatever this process had before.

    Args:
        engine: one of :data:`ENGINES`.
        layers: class names of the modules that FSDP2 shards one by one.
        accumulation: batches before a step.
        clipping: largest norm of the gradients, of which DeepSpeed sees to itself; 0 for any.
        precision: of Accelerate's mixed precision: "no" or "bf16".
        zero_options: entries of DeepSpeed's ``zero_optimization``.
    """
    forget_engine()
    describe_rank()
    if engine == "ddp":
        return Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision)
    if engine == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(layers),
            reshard_after_forward=True,
        )
        with fsdp2_on_cpu():
            return Accelerator(
                cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision, fsdp_plugin=plugin
            )
    deepspeed_on_cpu()
    config = {
        "train_micro_batch_size_per_gpu": 1,  # rows are the losses' business
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": int(engine.removeprefix("zero")), "overlap_comm": False},
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    config = small_buckets(config)
    config["zero_optimization"] |= zero_options
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision, deepspeed_plugin=plugin)


def trainer_arguments(
    engine: str, *, layers: tuple[str, ...] | None = ("BertLayer",), deepspeed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` under which the Trainer uses the engine on this rank.

    Make the arguments and the trainer inside :func:`fsdp2_on_cpu`.

    Args:
        engine: one of :data:`ENGINES`, or "plain" for one process.
        layers: class names of the modules that FSDP2 shards one by one; None to name none.
        deepspeed: DeepSpeed's configuration; its buckets are made small.
    """
    forget_engine()
    if engine == "plain":
        return {"use_cpu": True}
    describe_rank()
    if engine == "ddp":
        return {"use_cpu": True, "ddp_backend": "gloo"}
    if engine == "fsdp2":
        options: dict[str, Any] = {"version": 2, "reshard_after_forward": True}
        if layers is not None:
            options["transformer_layer_cls_to_wrap"] = list(layers)
        return {"use_cpu": True, "ddp_backend": "gloo", "fsdp": True, "fsdp_config": options}
    deepspeed_on_cpu()
    configured = {"use_configured_state": True}
    return {"deepspeed": small_buckets(deepspeed), "use_cpu": False, "accelerator_config": configured}


def check_wrapped(model: Any, engine: str) -> None:
    """Raise unless the model is wrapped by the engine."""
    names = [parent.__name__ for parent in type(model).__mro__]
    stage = model.zero_optimization_stage() if "DeepSpeedEngine" in names else None
    if WRAPPERS[engine] not in names or (stage is not None and f"zero{stage}" != engine):
        raise AssertionError(f"{engine} was asked for, and the model is wrapped by {names[:3]}, ZeRO stage {stage}.")


def local_elements(model: nn.Module) -> int:
    """Elements of the model's parameters that this rank holds."""
    return sum(_local(parameter).numel() for parameter in model.parameters())


def local_optimizer_elements(optimizer: Any) -> int:
    """Elements of the optimizer's state that this rank holds, but single numbers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    tensors = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return sum(_local(x).numel() for x in tensors if x.numel() > 1)


def _local(x: Any) -> Tensor:
    if hasattr(x, "to_local"):
        return x.to_local()
    return getattr(x, "ds_tensor", x)
