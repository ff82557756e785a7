"""Every private name of a dependency that the package relies on, in one place.

An upgrade that moves one of them breaks here, at import, with a message that says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sentence_transformers
import torch.distributed as dist
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Module
from sentence_transformers.util import fullname
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

try:
    from sentence_transformers.base.losses.gradcache import _get_batch_size as get_batch_size
except ImportError as error:
    raise ImportError(
        f"st-cached-extras uses a helper of sentence-transformers that version {sentence_transformers.__version__} "
        f"no longer has where 6.2 had it ({error}). Install a supported version: "
        'pip install "sentence-transformers>=6.2,<7", or upgrade st-cached-extras.'
    ) from error

__all__ = [
    "deepspeed_between_boundaries",
    "deepspeed_reduce",
    "deepspeed_without_reduction",
    "get_batch_size",
    "is_compiled",
    "layers_to_shard",
    "model_of_checkpoint",
    "rendezvous_store",
    "source_of",
    "uncompiled",
]


def uncompiled(model: nn.Module) -> Any:
    """The module inside a ``torch.compile`` wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it goes through ``torch.compile``."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())


def source_of(config: PretrainedConfig) -> str:
    """The id or path that a configuration was loaded from."""
    return config._name_or_path


def layers_to_shard(model: nn.Module) -> list[str]:
    """Class names of the layers that transformers' models in ``model`` ask to be kept whole."""
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return sorted(named & {type(module).__name__ for module in model.modules()})


def rendezvous_store() -> dist.Store:
    """The key-value store by which the ranks found each other: reachable while they wait in a collective."""
    return dist.distributed_c10d._get_default_store()


def model_of_checkpoint(model: Any, path: str) -> BaseModel:
    """The model that a Trainer has saved in a checkpoint of ``model``, made of the same classes of modules."""
    model = uncompiled(model)
    classes = {fullname(module): type(module) for module in model.modules() if isinstance(module, Module)}
    plain = next(parent for parent in type(model).__mro__ if not issubclass(parent, FSDPModule))
    return plain._load_with_module_classes(path, classes, trust_remote_code=model.trust_remote_code)


@contextmanager
def deepspeed_between_boundaries(engine: Any) -> Iterator[None]:
    """Let the backwards inside end no step, and leave the engine's own count of boundaries as it was."""
    boundary = engine._is_gradient_accumulation_boundary
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine._is_gradient_accumulation_boundary = boundary


@contextmanager
def deepspeed_without_reduction(engine: Any) -> Iterator[None]:
    """Let the backwards inside leave their sum, whole, on the parameters of this rank, as ``no_sync`` would."""
    engine.optimizer._coalesce_grad_reduction = True
    engine.inside_no_sync_ctxt = True
    try:
        yield
    finally:
        engine.optimizer._coalesce_grad_reduction = False
        engine.inside_no_sync_ctxt = False


def deepspeed_reduce(engine: Any) -> None:
    """Begin to reduce, under ZeRO-2 or ZeRO-3, the gradients that lie whole on the parameters; the end of the backward
    around this, or ``engine.allreduce_gradients``, ends it."""
    optimizer = engine.optimizer
    optimizer.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())
    if engine.zero_optimization_stage() == 3:
        for parameter in (parameter for group in optimizer.fp16_groups for parameter in group):
            if parameter.requires_grad and parameter.grad is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(parameter)
        return
    optimizer.setup_buckets()
    for index, group in enumerate(optimizer.bit16_groups):
        for parameter in group:
            if parameter.requires_grad and parameter.grad is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, index)
