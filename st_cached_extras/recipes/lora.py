"""Low-rank adapters (arXiv 2106.09685) that train in place of the weights and are saved as part of them.

What a model with adapters saves is a plain, whole model, W + s B A where it had W, which loads without PEFT and
without the base model. The adapters themselves are what a checkpoint resumes from: each layer that has one offers
them as its ``replay_state``, which :class:`~st_cached_extras.ReplaySentenceTransformerTrainer` keeps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from st_cached_extras.recipes.arguments import LoraArguments
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.run import one_line


def add_lora(model: SentenceTransformer, arguments: LoraArguments) -> None:
    """Freeze the model and give each of its transformers adapters, where a rank is asked for.

    Raises:
        UsageError: PEFT is not installed, or the layers named are not there.
    """
    if arguments.lora_rank is None:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise UsageError("--lora_rank needs PEFT: pip install peft") from error
    model.requires_grad_(False)
    try:
        config = LoraConfig(
            r=arguments.lora_rank,
            lora_alpha=arguments.lora_alpha or 2 * arguments.lora_rank,
            lora_dropout=arguments.lora_dropout,
            target_modules=arguments.lora_modules or "all-linear",
        )
        for part in [module for module in model.modules() if isinstance(module, Transformer)]:
            inject_adapter_in_model(config, part.auto_model)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--lora_rank {arguments.lora_rank}: {one_line(error)}") from error
    for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
        layer.register_state_dict_post_hook(_merge)
        layer.register_load_state_dict_pre_hook(_keep)
        layer.replay_state = partial(_adapter, layer)
        layer.load_replay_state = partial(_load_adapter, layer)


def _adapter(layer: nn.Module) -> dict[str, Tensor]:
    """Copies of an adapter's own parameters."""
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters() if not _of_base(name)}


def _load_adapter(layer: nn.Module, state: dict[str, Tensor]) -> None:
    own = {name: parameter for name, parameter in layer.named_parameters() if not _of_base(name)}
    if own.keys() != state.keys():
        raise ValueError(f"The checkpoint has the adapter parameters {sorted(state)}, expected {sorted(own)}.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def _merge(layer: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """In a state dict, the weights that the layer has with its adapter, under the names that it had without."""
    base = f"{prefix}base_layer."
    plain = {key.removeprefix(base): state[key] for key in list(state) if key.startswith(base)}
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    with torch.no_grad():
        delta = layer.get_delta_weight(layer.active_adapters[0])
        plain["weight"] = plain["weight"] + delta.to(plain["weight"])
    state.update({f"{prefix}{name}": value for name, value in plain.items()})


def _keep(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """On loading, leave the layer as it is: the file holds the sum, and the adapter comes with the replay state."""
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    state.update({f"{prefix}{name}": value.detach().clone() for name, value in own.items()})


def _of_base(name: str) -> bool:
    return name.startswith("base_layer.")
