"""When gradients are synchronised over ranks, for each way of wrapping a model.

A replay runs many backwards where a plain step runs one, and the sum of all must be what an engine has reduced in the
end. Everything that differs between engines is behind :class:`Engine`: how a mini-batch is run, and what its backward
does in addition. Engines that shard parameters are in modules of their own, :mod:`.fsdp2` and :mod:`.zero`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras._compat import uncompiled
from st_cached_extras.distributed.world import RankError, World


class Engine:
    """A model that is not wrapped: every backward simply adds to the gradients.

    Args:
        model: the model as the Trainer hands it to the loss.

    Attributes:
        world: the ranks over which the engine averages gradients.
        shards: whether mini-batches themselves wait for other ranks, which hold shards of the parameters or reduce
            their gradients: then all ranks must run the same parts of the model in the same order.
    """

    shards: bool = False

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

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """For a body in which ranks may wait for each other: an error there ends it on all, and all hear the cause.

        Raises:
            RankError: in place of any error of the body, if this engine shards.
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if self.shards:
                self.world.abort(error)
            raise

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
            waiting = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            surrogate = surrogate + zero_terms(waiting)
        surrogate.backward()


def zero_terms(parameters: Iterable[nn.Parameter]) -> Tensor | float:
    """A scalar of value zero whose derivative with respect to each of the parameters is zero, and not None."""
    return sum(0.0 * parameter.flatten()[:1].sum() for parameter in parameters)


def engine_of(model: Any, *, defer_reduction: bool = False, inside_backward: bool = False) -> Engine:
    """The engine that wraps ``model``.

    Args:
        model: the model as the Trainer hands it to the loss, or any callable.
        defer_reduction: under FSDP2 and DeepSpeed, sum the gradients of all mini-batches whole and reduce once.
        inside_backward: whether replays run inside the engine's own backward, as those of a loss do.

    Raises:
        ValueError: the model is wrapped in a way in which gradients would be wrong; the message names the way out.
    """
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return DDPEngine(inner)
    if not isinstance(inner, nn.Module):
        return Engine(model)
    if any(parent.__name__ == "DeepSpeedEngine" for parent in type(inner).__mro__):  # imported only where it is used
        from st_cached_extras.distributed.zero import ZeROEngine

        return ZeROEngine(inner, defer_reduction=defer_reduction, inside_backward=inside_backward)
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    modules = list(inner.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ValueError(
            "Cached losses do not replay models wrapped by FullyShardedDataParallel, the first version of FSDP. Use "
            "the second: fsdp_version: 2 in Accelerate's configuration, or torch.distributed.fsdp.fully_shard."
        )
    if any(isinstance(module, FSDPModule) for module in modules):
        from st_cached_extras.distributed.fsdp2 import FSDP2Engine

        return FSDP2Engine(inner, defer_reduction=defer_reduction)
    return Engine(model)
