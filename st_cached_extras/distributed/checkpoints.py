"""Whole weights of a model whose parameters are sharded over ranks: to write, to copy, and to read them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def whole_weights(wrapped: Any) -> dict[str, Tensor]:
    """The weights of which each rank holds a shard, whole, on the CPU of the first rank; a collective.

    Args:
        wrapped: a model as FSDP2 or DeepSpeed have wrapped it; nothing else is sharded.

    Returns:
        By their names in the model's ``state_dict()``; empty on the other ranks.
    """
    if any(isinstance(module, FSDPModule) for module in wrapped.modules()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(wrapped, options=options)
    if not any(hasattr(parameter, "ds_id") for parameter in wrapped.parameters()):
        return {}
    import deepspeed

    wrapped.empty_partition_cache()  # some may be on their way for a forward that does not come
    whole: dict[nn.Parameter, Tensor] = {}  # by parameter, because tied weights stay one
    parameters = dict(wrapped.module.named_parameters(remove_duplicate=False))
    for parameter in dict.fromkeys(parameters.values()):
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                whole[parameter] = parameter.detach().cpu().clone()
    return {name: whole[parameter] for name, parameter in parameters.items() if parameter in whole}


def whole_parameters(wrapped: nn.Module) -> dict[str, Tensor]:
    """Whole copies of a model's parameters, on every rank and in fp32 or better; a collective if they are sharded.

    Args:
        wrapped: a plain model, or one wrapped by any engine. Of DeepSpeed, masters are what is copied.

    Returns:
        By their names in the plain model, without second names of tied ones.
    """
    inner = extract_model_from_parallel(wrapped)
    masters = inner is not wrapped and not isinstance(wrapped, DistributedDataParallel)
    return {name: _whole(parameter, masters) for name, parameter in inner.named_parameters()}


def _whole(parameter: nn.Parameter, masters: bool) -> Tensor:
    whole = parameter.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    elif masters:
        import deepspeed

        master = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if master is not None:
            whole = master
        elif hasattr(parameter, "ds_id"):  # frozen
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone()
    return whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)


@torch.no_grad()
def copy_whole_parameters(wrapped: nn.Module, plain: nn.Module) -> None:
    """Copy the parameters of a model, whatever wraps it, into a plain one on every rank: a collective if sharded.

    Args:
        wrapped: the model in training.
        plain: another one of the same architecture, whole on every rank, such as one for an average of weights.
    """
    parameters = dict(plain.named_parameters())
    for name, whole in whole_parameters(wrapped).items():
        parameters[name].copy_(whole)


@contextmanager
def saving(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Let every ``state_dict()`` of the model and of its modules hold these weights in place of its own.

    A SentenceTransformer is saved module by module, each in its own way, and all of them ask their modules for a
    state dict.

    Args:
        model: the model.
        weights: by their names in ``model.state_dict()``.
    """

    def hook_of(path: str) -> Any:
        def put_whole(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name, _ in module.named_parameters(recurse=False):
                if f"{path}{name}" in weights:
                    state[f"{prefix}{name}"] = weights[f"{path}{name}"]
                elif isinstance(shard := state.get(f"{prefix}{name}"), DTensor):  # on other ranks, for nobody to read
                    state[f"{prefix}{name}"] = shard.to_local()

        return put_whole

    handles = [
        module.register_state_dict_post_hook(hook_of(f"{path}." if path else ""))
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def load_whole_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give every rank its shard of the first rank's weights; a collective.

    Args:
        model: sharded by FSDP2.
        weights: as in ``model.state_dict()``, on the first rank; the other ranks' are not looked at.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
