"""How known derivatives enter autograd: injected into features that have a graph, or attached to a value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def inject(
    tensors: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Back-propagate ``cotangents`` [B, ...] from ``tensors`` of the same shapes into the ``.grad`` of ``leaves``.

    Args:
        tensors: the leaves themselves, or what was computed from them.
        leaves: those that were used receive a gradient.
        parameters: what else the tensors may have been computed from; their ``.grad`` is left alone.

    Returns:
        The parameters that were used, and their derivatives.
    """
    if all(tensor.is_leaf for tensor in tensors):
        # What a backward would do, without the copy that it makes.
        for tensor, cotangent in zip(tensors, cotangents, strict=True):
            accumulate_gradient(tensor, cotangent)
        return [], []
    cotangents = [cotangent.to(tensor.dtype) for tensor, cotangent in zip(tensors, cotangents, strict=True)]
    inputs = [*leaves, *parameters]
    gradients = torch.autograd.grad(list(tensors), inputs, cotangents, allow_unused=True)
    of_leaves, of_parameters = gradients[: len(leaves)], gradients[len(leaves) :]
    for leaf, gradient in zip(leaves, of_leaves, strict=True):
        if gradient is not None:
            accumulate_gradient(leaf, gradient)
    used = [(p, gradient) for p, gradient in zip(parameters, of_parameters, strict=True) if gradient is not None]
    return [parameter for parameter, _ in used], [gradient for _, gradient in used]


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


def accumulate_gradient(leaf: Tensor, gradient: Tensor) -> None:
    """Add to ``leaf.grad`` as a backward would."""
    gradient = gradient.to(leaf.dtype)
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
