"""One mini-batch, embedded twice: first without a graph, later with one and with its cotangents injected.

Both passes must compute the same numbers, so what a forward depends on besides inputs and weights, the random state
and autocast, is captured around the first and restored around the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AutocastState:
    """Autocast as it stood at the first pass, per device type: enabled, and in which dtype."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls, device: torch.device) -> AutocastState:
        """Read the current autocast of the CPU and of the given device's type."""
        device_types = dict.fromkeys(("cpu", device.type))
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types)
        )

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Run the body under the captured autocast.

        The weight cache is off: under autocast a weight that was cast without a graph is handed to later passes
        of the same context, where its gradient would be lost without a word.
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


def surrogate(features: Tensor, cotangent: Tensor, grad_output: Tensor) -> Tensor:
    """A scalar whose derivative with respect to ``features`` is ``cotangent * grad_output``.

    The scale is applied in at least fp32, before the gradient takes the dtype of half-precision features, so that a
    loss scale lifts small cotangents out of underflow.

    Args:
        features: [n, ...] with a graph.
        cotangent: [n, ...].
        grad_output: scalar, what the outer backward hands to the loss.
    """
    dtype = torch.promote_types(torch.promote_types(features.dtype, cotangent.dtype), torch.float32)
    return torch.dot(features.flatten().to(dtype), cotangent.flatten().to(dtype)) * grad_output


class AttachCotangents(torch.autograd.Function):
    """A value whose derivatives are already known: d value / d tensors[k] = cotangents[k]."""

    @staticmethod
    def forward(ctx, value: Tensor, count: int, *tensors_and_cotangents: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors_and_cotangents[count:])
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        cotangents = ctx.saved_tensors
        gradients = [(grad_output * cotangent).to(cotangent.dtype) for cotangent in cotangents]
        return None, None, *gradients, *(None for _ in cotangents)


def attach_cotangents(value: Tensor, tensors: list[Tensor], cotangents: list[Tensor]) -> Tensor:
    """Return ``value``, differentiable in ``tensors`` with the given derivatives."""
    cotangents = [cotangent.to(tensor.dtype) for tensor, cotangent in zip(tensors, cotangents, strict=True)]
    return AttachCotangents.apply(value, len(tensors), *tensors, *cotangents)
