"""Whole weights of a model whose parameters are sharded over ranks: to write them, and to read them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule


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
