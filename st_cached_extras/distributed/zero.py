"""DeepSpeed ZeRO-1, 2 and 3: what a backward reduces depends on whether it ends a step, and on what it reaches.

DeepSpeed runs its hooks on the assumption of one backward per step of accumulation. Many are possible: all but the
last one are told that they end nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from st_cached_extras._compat import (
    deepspeed_between_boundaries,
    deepspeed_reduce,
    deepspeed_without_reduction,
)
from st_cached_extras.distributed.engines import Engine, zero_terms


class ZeROEngine(Engine):
    """A ``DeepSpeedEngine`` with ZeRO-1, ZeRO-2 or ZeRO-3.

    ZeRO-1 adds whole gradients up and reduces them once. ZeRO-2 and ZeRO-3 reduce every mini-batch into the ranks'
    partitions, so that no rank holds a whole model's gradients; when reductions are deferred, they are summed whole
    and reduced once.

    Args:
        model: the engine.
        defer_reduction: reduce once a step, at the cost of whole gradients in memory.
        inside_backward: whether replays run inside ``model.backward``, as those of a loss do. That backward then ends
            the step, and has applied the loss scale.

    Raises:
        ValueError: a feature of DeepSpeed that does not go with replays; the message names it.
    """

    shards = True

    def __init__(self, model: Any, *, defer_reduction: bool = False, inside_backward: bool = False) -> None:
        super().__init__(model)
        self.defer_reduction = defer_reduction
        self.inside_backward = inside_backward
        self._begun = False
        self._reached: set[Tensor] = set()  # by the first mini-batch of a step
        _check_supported(model)

    @property
    def synchronises(self) -> bool:
        return self.model.is_gradient_accumulation_boundary()

    def deferring(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else deepspeed_between_boundaries(self.model)

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        if not self.inside_backward and reached_leaves(surrogate).isdisjoint(self._trainable()):
            surrogate.backward()  # it runs stages again, and one of them has an engine of its own around this model
            return
        first, self._begun = not self._begun, not last
        partitioned = self.model.zero_optimization_stage() == 3
        deferred = self.defer_reduction and self.model.zero_optimization_stage() > 1  # ZeRO-1 defers anyway
        if self.model.zero_use_cpu_optimizer() and self.model.zero_optimization_stage() > 1 and not deferred:
            self._check_same_parameters(first, reached_leaves(surrogate))
        elif first and partitioned:
            self._forget_gradients_of_other_than(reached_leaves(surrogate))
        elif last and not partitioned:
            # It is the hooks of the last backward that reduce, and only of the parameters that it reaches.
            reached = reached_leaves(surrogate)
            surrogate = surrogate + zero_terms(p for p in self._trainable() if p not in reached)
        with deepspeed_without_reduction(self.model) if deferred else nullcontext():
            if last and self.inside_backward and not deferred:
                surrogate.backward()  # the backward around it ends the step
            else:
                # The engine applies the loss scale, which the backward around it has applied already.
                scaled = surrogate / self._loss_scale() if self.inside_backward else surrogate
                with nullcontext() if last and not deferred else deepspeed_between_boundaries(self.model):
                    self.model.backward(scaled, scale_wrt_gas=False)
        if last and deferred:
            deepspeed_reduce(self.model)
            if not self.inside_backward:
                self.model.allreduce_gradients()

    def _trainable(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.model.module.parameters() if parameter.requires_grad)

    def _loss_scale(self) -> Tensor:
        one = 1.0 * torch.ones((), device=self.model.device, requires_grad=True)  # only losses with a graph are scaled
        return self.model.optimizer.scale_if_loss(one).detach()

    def _check_same_parameters(self, first: bool, reached: set[Tensor]) -> None:
        """Raise if this mini-batch reaches other parameters than the first: of a step's backwards, the first one alone
        overwrites the gradients in the memory of the CPU, and the last one alone hands them to the optimizer."""
        if first:
            self._reached = reached
        elif reached != self._reached:
            raise ValueError(
                "The optimizer is offloaded to the CPU, and mini-batches reach different parameters, such as those of "
                "several towers: DeepSpeed would mix gradients of several steps. Set defer_reduction=True in the "
                "loss, or train without offload_optimizer."
            )

    def _forget_gradients_of_other_than(self, reached: set[Tensor]) -> None:
        """Zero the partitions of gradients that the first backward of a step does not reach.

        ZeRO-3 overwrites a partition in the first backward of a step and adds to it in the others: where the first
        one does not come, the others would add to the gradient of an earlier step.
        """
        if self.model.optimizer.micro_step_id > 0:  # they hold what this step has accumulated
            return
        import deepspeed

        for parameter in self._trainable():
            if parameter not in reached:
                deepspeed.utils.safe_set_local_grad(parameter, torch.zeros_like(parameter.ds_tensor))


def reached_leaves(tensor: Tensor) -> set[Tensor]:
    """The leaves that a backward from ``tensor`` gives a gradient."""
    leaves, nodes, seen = set(), [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _check_supported(model: Any) -> None:
    refused = {
        "ZeRO stage 0": model.zero_optimization_stage() == 0,
        "pipeline parallelism": model.pipeline_parallelism,
        "managed_gradient_accumulation=false": not model.managed_gradient_accumulation(),
        "DeepCompile": model.is_deepcompile_enabled(),
        "ZenFlow": bool(getattr(model, "zenflow", False)),
        "mixture-of-experts layers": model.has_moe_layers,
    }
    if found := [name for name, is_used in refused.items() if is_used]:
        raise ValueError(
            f"Cached losses do not replay under DeepSpeed with {', '.join(found)}: gradients would be wrong. Use ZeRO "
            "stage 1, 2 or 3 without, or DistributedDataParallel."
        )
