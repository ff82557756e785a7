"""Gradients of word embeddings, added by rows.

Autograd gives an embedding's weight [V, D] a dense gradient at every backward: zeros for the whole vocabulary, the
rows of the tokens added to it, and the sum added to ``.grad``. A plain step pays that once, a replay once per
mini-batch, which for small mini-batches and large vocabularies is more than the model itself. Here the rows are added
straight to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from st_cached_extras._compat import is_compiled


class _EmbedByRows(torch.autograd.Function):
    """The output of an embedding, whose backward adds the rows of its gradient to ``weight.grad``."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, tokens: Tensor, output: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding = weight, padding
        return output.clone()  # a view could not be changed in place by what follows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        weight, tokens = ctx.weight, tokens.flatten()
        rows = gradient.reshape(len(tokens), -1).to(weight.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((tokens == ctx.padding)[:, None], 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens, rows)
        return None, None, None, None


def _embed_by_rows(module: nn.Embedding, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    # Rows of this weight and nothing else: not what a hook or a replaced forward has made of them.
    node = output.grad_fn
    if type(node).__name__ != "EmbeddingBackward0" or node.next_functions[0][0].variable is not module.weight:
        return output
    if not (torch.is_grad_enabled() and inputs):
        return output
    return _EmbedByRows.apply(module.weight, inputs[0], output.detach(), module.padding_idx)


def adds_by_rows(module: nn.Module) -> bool:
    """Whether the gradient of this module's weight can be added by rows and nobody sees a difference.

    It is left to autograd where something else wants to see it (hooks on the weight), where it is not a plain sum over
    tokens (``scale_grad_by_freq``), where it is sparse already, where the forward changes the weight (``max_norm``),
    and where the weight is not a parameter of the module's own (frozen, parametrised, or sharded).
    """
    if type(module) is not nn.Embedding or type(module._parameters.get("weight")) is not nn.Parameter:
        return False
    weight = module.weight
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    unusual = module.sparse or module.scale_grad_by_freq or module.max_norm is not None
    return weight.requires_grad and not hooked and not unusual and weight.layout is torch.strided


@contextmanager
def embedding_gradients_by_rows(model: nn.Module) -> Iterator[None]:
    """Within it, backwards of forwards made within it add the gradients of word embeddings by rows.

    Gradients are those of autograd up to the order of summation, also where hooks or a forward of another kind make
    something else of the rows: those embeddings are left to it. A weight that is also used
    elsewhere (tied) gets the rest of its gradient from autograd, into the same buffer.

    Args:
        model: its embeddings of type ``nn.Embedding``, as far as :func:`adds_by_rows` allows. Of a compiled model
            none, which would be compiled anew for the hooks.
    """
    modules = [] if is_compiled(model) else list(model.modules())
    handles = [module.register_forward_hook(_embed_by_rows) for module in modules if adds_by_rows(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
