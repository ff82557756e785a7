"""What the ranks of test_distributed.py run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    random_sentences,
    relative_error,
    tiny_text_model,
)
from st_cached_extras.zbp import ZBPConfig, apply_zbp, zbp_blocks, zbp_stats

CONFIG = ZBPConfig(mode="cd", n_probes=3, eps=1e-2, param_mode="local")
TOP = "0.model.encoder.layer.1"


def _setting(**changes: Any) -> tuple[nn.Module, list[dict]]:
    warnings.filterwarnings("ignore", message="The layer .* is differentiable")
    model = tiny_text_model(dropout=0.1)
    model[0].model.pooler.requires_grad_(False)
    apply_zbp(model, [-1], CONFIG.replace(**changes))
    rank = dist.get_rank()
    return model, [model.preprocess(random_sentences(4, 10 * rank + column)) for column in (0, 1)]


def _checksum(model: nn.Module) -> float:
    return float(sum(g.double().abs().sum() for g in gradients(model).values()))


def step_under_ddp(mode: str, control: str | None, cached: bool) -> dict[str, Any]:
    """Gradients after one step of DDP, beside the mean over ranks of what each computes alone, and the queries."""
    model, columns = _setting(mode=mode, control=control)
    alone = copy.deepcopy(model)
    dist.barrier()
    results = []
    for net in (DistributedDataParallel(model, find_unused_parameters=False), alone):
        torch.manual_seed(dist.get_rank())
        if cached:
            inner = net.module if net is not alone else net
            loss = CachedInfoNCELoss(inner, mini_batch_size=2)
            loss.model = net
            loss(copy_columns(columns), None).backward()
        else:
            sum(
                (net(copy_columns(columns)[c])["sentence_embedding"] * (c + 1)).square().sum() for c in (0, 1)
            ).backward()
        results.append(gradients(net.module if net is not alone else net))
    mean = {name: g.clone() for name, g in results[1].items()}
    for gradient in mean.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    own = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(own, torch.tensor([float(sum(g.abs().sum() for g in results[1].values()))]))
    return {
        "error": relative_error(results[0], mean),
        "checksum": _checksum(model),
        "ranks differ": float((own[0] - own[1]).abs() / own[0]),
        "stats": zbp_stats(model)[TOP],
    }


def probes_of_ranks() -> list[float]:
    """The same input on every rank: the input gradient differs by the probes alone."""
    model, _ = _setting()
    layer = model.get_submodule(TOP)
    seen = []
    layer.zbp.observer = lambda call, gradient: seen.append(gradient)
    torch.manual_seed(0)
    model(model.preprocess(["w1 w2 w3"]))["sentence_embedding"].sum().backward()
    return seen[0].flatten().tolist()


def step_under_fsdp() -> dict[str, Any]:
    """One step with the wrapped layer sharded by FSDP2, beside the mean over ranks of unsharded steps."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, columns = _setting()
    alone = copy.deepcopy(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[0].model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    results = []
    for net in (model, alone):
        torch.manual_seed(dist.get_rank())
        net(copy_columns(columns)[0])["sentence_embedding"].square().sum().backward()
        found = {}
        for name, parameter in net.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            found[name] = torch.zeros(parameter.shape) if gradient is None else gradient
        results.append(found)
    for gradient in results[1].values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    local = sum(p.to_local().numel() for p in model.parameters())
    return {
        "error": relative_error(results[0], results[1]),
        "share": local / sum(p.numel() for p in alone.parameters()),
        "queries": zbp_blocks(model)[TOP].zbp.count.queries,
    }
