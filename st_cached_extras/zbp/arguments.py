"""The arguments of one call of a layer, as an estimate needs them: which is differentiated, what its rows are.

Layers of transformers take ``hidden_states`` first, masks and positions after it, by position or by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
SEGMENTS = ("cu_seqlens", "cu_seq_lens_q")


class LayerArguments:
    """One call's arguments, bound to the names of the layer's own forward.

    Args:
        signature: of the forward, without ``self``.
        name: of the layer, for errors.
        args: as the layer was called.
        kwargs: as the layer was called.

    Raises:
        TypeError: the first argument is not a floating-point tensor.
        ValueError: another argument is differentiable: its gradient would be lost.
    """

    def __init__(self, signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._bound = signature.bind(*args, **kwargs)
        self._first, x = next(iter(self._bound.arguments.items()), ("", None))
        self._variadic = self._is_variadic(signature, self._first)
        if self._variadic:
            x = x[0] if x else None
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"ZBP estimates the gradient of a layer's first argument; {name!r} got {found} where a floating-point "
                "tensor is expected. Wrap a layer that takes hidden states first."
            )
        self.x: Tensor | None = x
        self.others = {key: value for key, value in self._flat().items() if key != self._first}
        for key, value in self.others.items():
            if any(tensor.requires_grad for tensor in _tensors(value)):
                raise ValueError(
                    f"The argument {key!r} of the layer {name!r} is differentiable, too, and its gradient would be "
                    f"lost: ZBP estimates that of {self._first!r} alone. Detach it, or wrap a layer that has one "
                    "differentiable input (a whole block rather than its output half)."
                )

    def release_input(self) -> Tensor:
        """The first argument, which is not kept from here on."""
        x, self.x = self.x, None
        self._bound.arguments[self._first] = (
            (None, *self._bound.arguments[self._first][1:]) if self._variadic else None
        )
        return x

    def call(self, forward: Callable[..., Any], x: Tensor, with_cache: bool = False) -> Any:
        """Call a forward with x in the first argument's place.

        A key-value cache is handed on only where it is to be filled: a second forward would attend to the keys and
        values of the first as if they were earlier tokens.
        """
        arguments = dict(self._bound.arguments)
        arguments[self._first] = (x, *arguments[self._first][1:]) if self._variadic else x
        bound = inspect.BoundArguments(self._bound.signature, arguments)
        kwargs = dict(bound.kwargs)
        args = list(bound.args)
        if not with_cache:
            names = list(bound.signature.parameters)
            args = [None if name in CACHES else value for name, value in zip(names, args, strict=False)] + args[
                len(names) :
            ]
            kwargs = {key: None if key in CACHES else value for key, value in kwargs.items()}
        return forward(*args, **kwargs)

    def segments(self, x: Tensor) -> Tensor | None:
        """Boundaries of packed segments, if the input x is packed."""
        found = next((self.others[key] for key in SEGMENTS if isinstance(self.others.get(key), Tensor)), None)
        packed = x.ndim == 2 or (x.ndim == 3 and len(x) == 1)
        return found if packed else None

    def valid(self, x: Tensor) -> Tensor | None:
        """bool [B, T, 1], False where no token attends to: the padding. None where nothing says so.

        Masks are [B, T], or [B or 1, heads or 1, T, T] of bools or of numbers to add to scores.
        """
        mask = self.others.get("attention_mask")
        if not isinstance(mask, Tensor) or x.ndim != 3 or mask.ndim not in (2, 4) or mask.shape[-1] != x.shape[1]:
            return None
        if mask.ndim == 4:
            allowed = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0
            mask = allowed.flatten(1, 2).any(1)
        if len(mask) not in (1, len(x)):
            return None
        return (mask != 0).expand(len(x), -1)[..., None]

    def check_cache_is_empty(self, layer: nn.Module, name: str) -> None:
        """Raise a ValueError if the layer would attend to earlier tokens in a cache, which queries leave out."""
        cache = next((self.others[key] for key in CACHES if self.others.get(key) is not None), None)
        index = next((m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)), None)
        if cache is None or index is None or not hasattr(cache, "get_seq_length"):
            return
        if length := int(cache.get_seq_length(index)):
            raise ValueError(
                f"The key-value cache of the layer {name!r} holds {length} earlier positions. Queries run without "
                "the cache, and would be those of another function. Train on whole sequences, without a filled cache."
            )

    def _flat(self) -> dict[str, Any]:
        """All arguments by name, those of ``**kwargs`` included."""
        flat = {}
        for key, value in self._bound.arguments.items():
            kind = self._bound.signature.parameters[key].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                flat |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL and key == self._first:
                flat |= {f"{key}[{index}]": item for index, item in enumerate(value) if index}
            else:
                flat[key] = value
        return flat

    @staticmethod
    def _is_variadic(signature: inspect.Signature, name: str) -> bool:
        return name in signature.parameters and (signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL)


def forward_signature(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a bound forward, or (*args, **kwargs) where it has none."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        parameter = inspect.Parameter
        return inspect.Signature(
            [parameter("args", parameter.VAR_POSITIONAL), parameter("kwargs", parameter.VAR_KEYWORD)]
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
