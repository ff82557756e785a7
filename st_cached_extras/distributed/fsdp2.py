"""FSDP2: parameters and gradients as DTensors, gathered and reduced module by module in every forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from st_cached_extras.distributed.engines import Engine


class FSDP2Engine(Engine):
    """A model of modules that ``torch.distributed.fsdp.fully_shard`` has sharded.

    Every backward reduces into the shards, so that no rank ever holds a whole model's gradients. When reductions are
    deferred, the gradients of all mini-batches are summed whole, on every rank, and reduced once.

    Args:
        model: the sharded model.
        defer_reduction: reduce once a step, at the cost of whole gradients in memory.

    Raises:
        ValueError: the parameters are sharded over a part of the ranks, as by tensor parallelism.
    """

    shards = True

    def __init__(self, model: nn.Module, *, defer_reduction: bool = False) -> None:
        super().__init__(model)
        self.defer_reduction = defer_reduction
        meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
        if too_small := [mesh for mesh in meshes if mesh.size() != dist.get_world_size()]:
            raise ValueError(
                f"Cached losses average gradients over all {dist.get_world_size()} ranks, and parameters of the model "
                f"are sharded over {too_small[0]}. Use FSDP2 without tensor, context or pipeline parallelism."
            )

    @property
    def synchronises(self) -> bool:
        # Accelerate switches the synchronisation of FSDP2 off and on, and here alone says which.
        return GradientState().sync_gradients

    def deferring(self, last: bool) -> AbstractContextManager[None]:
        return self._reducing(last) if self.defer_reduction else nullcontext()

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        with self.deferring(last):
            surrogate.backward()

    @contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        """Let the backwards inside reduce gradients only if they are the last ones of a synchronising step."""
        synchronises = self.synchronises
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_gradient_sync(last and synchronises, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_gradient_sync(synchronises, recurse=False)
