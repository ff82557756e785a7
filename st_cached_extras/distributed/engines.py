"""When gradients are synchronised over ranks, for each way of wrapping a model.

A replay runs many backwards where a plain step runs one, and an engine must reduce gradients once for all of them.
Everything that differs between engines is behind :class:`Engine`: how a mini-batch is run, and what its last replay
of a step does in addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras._compat import uncompiled
from st_cached_extras.distributed.world import World


class Engine:
    """A model that is not wrapped: every backward simply adds to the gradients.

    Args:
        model: the model as the Trainer hands it to the loss.

    Attributes:
        world: the ranks over which the engine averages gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.world = World.current()

    @property
    def synchronises(self) -> bool:
        """Whether the backward now running ends with gradients averaged over ranks (no outer ``no_sync``)."""
        return True

    def collect(self, features: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run the model on one mini-batch whose outputs will not be differentiated by this engine."""
        return self.model(features)

    def replay(self, features: Mapping[str, Any], *, last: bool) -> Mapping[str, Any]:
        """Run the model on one mini-batch that :meth:`backward` will differentiate; ``last`` of its step."""
        return self.model(features)

    def deferring(self, last: bool) -> AbstractContextManager[None]:
        """For a forward that calls the wrapped model itself: its gradients are synchronised only if it is the last."""
        return nullcontext()

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        """Differentiate the surrogate of one mini-batch; the last one of a step synchronises the gradients."""
        surrogate.backward()

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average, in one flat bucket per dtype, the gradients of parameters that the engine does not know.

        At every backward, synchronising or not: the mean is linear, so accumulated gradients stay right, and of
        several losses that share a step each has averaged its own.
        """
        if self.world.size == 1:
            return
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for same_dtype in by_dtype.values():
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in same_dtype])
            flat = self.world.all_reduce(flat) / self.world.size
            for parameter, gradient in zip(same_dtype, flat.split([p.numel() for p in same_dtype]), strict=True):
                parameter.grad = gradient.view_as(parameter).clone()


class DDPEngine(Engine):
    """DistributedDataParallel: the mini-batches run on the module inside, and only the last one of a step through DDP.

    The module inside knows nothing of ranks, so its backwards accumulate local gradients whatever DDP's settings
    (static graph, unused parameters, an outer ``no_sync``). The last one makes DDP's reducer see the sum.
    """

    model: DistributedDataParallel

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model)
        self.world = World.current(model.process_group)

    @property
    def synchronises(self) -> bool:
        return self.model.require_backward_grad_sync

    def collect(self, features: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.model.module(features)

    def replay(self, features: Mapping[str, Any], *, last: bool) -> Mapping[str, Any]:
        return (self.model if last and self.synchronises else self.model.module)(features)

    def deferring(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        if last and self.synchronises and (self.model.static_graph or not self.model.find_unused_parameters):
            # The last mini-batch may reach only one tower of several. Without a search for unused parameters, the
            # reducer waits for every parameter that has a gradient, so each gets one of zero.
            surrogate = surrogate + sum(
                0.0 * parameter.flatten()[:1].sum()
                for parameter in self.model.parameters()
                if parameter.grad is not None
            )
        surrogate.backward()


def engine_of(model: nn.Module) -> Engine:
    """The engine that wraps ``model``.

    Raises:
        ValueError: the model is sharded, by FSDP or DeepSpeed: replaying it needs an engine that is not there, and
            without one gradients would be wrong.
    """
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return DDPEngine(inner)
    names = [parent.__name__ for parent in type(inner).__mro__]
    if sharded := [name for name in names if name in ("DeepSpeedEngine", "FullyShardedDataParallel", "FSDPModule")]:
        raise ValueError(
            f"Cached losses do not replay models wrapped by {sharded[0]}: gradients would be wrong. Use "
            "DistributedDataParallel, or one process."
        )
    return Engine(model)
