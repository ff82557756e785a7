"""The error and the target at a model's output, for layers that are taught by them directly.

    model forward begins ──► a new signal, which every layer that runs in it notes
    model forward ends   ──► its output hands d loss / d output to that signal, in the backward

A signal belongs to one forward of one model, so that two models, two columns through one model before one backward,
and mini-batches that are replayed one by one do not mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor, nn
from torch.nn.functional import one_hot

from st_cached_extras.zbp.research.opzo import OPZO, opzo_update
from st_cached_extras.zbp.research.signal import Signal
from st_cached_extras.zbp.state import ZBPLayer

TARGET_KEY = "feedback_target"


@dataclass(eq=False)
class _Running:
    """A forward that has begun; arguments and random state only where it is to be run again."""

    signal: Signal
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    random_state: RandContext | None = None


class ErrorTap:
    """Watches the output of a model for its layers with an estimated backward.

    Where a layer has mode opzo and ``opzo_alpha`` is set, it also runs the perturbed forward that teaches the feedback
    matrix, after every forward with gradients.

    Args:
        model: whose output the loss is computed from. Layers that are wrapped later are found too.
        output: where the output is, if the model returns a dict; of a tuple it is the first entry.

    Example::

        apply_zbp(model, [-1], ZBPConfig(mode="drtp"))
        ErrorTap.of(model).watch(loss)
    """

    def __init__(self, model: nn.Module, output: str = "sentence_embedding") -> None:
        self.output = output
        self._running: list[_Running] = []  # innermost last
        self._next_target: Tensor | None = None
        self._teaching = False
        for name, block in _layers(model).items():
            if block.zbp.tap is not None:
                raise ValueError(f"The layer {name!r} has an ErrorTap already: use ErrorTap.of(model), or close it.")
        self._attach(_layers(model))
        model.error_tap = self
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    @classmethod
    def of(cls, model: nn.Module, output: str | None = None) -> ErrorTap:
        """The tap that watches the model, or a new one; ``output`` moves it there."""
        tap = getattr(model, "error_tap", None)
        if tap is None:
            return cls(model, "sentence_embedding" if output is None else output)
        tap.output = tap.output if output is None else output
        tap._attach(_layers(model))
        return tap

    def set_target(self, target: Tensor) -> None:
        """The target of the next forward with gradients, and of that one alone.

        Args:
            target: class indexes in the shape of the output without its last axis (negative ones mean none), or
                numbers in the shape of the output.
        """
        self._next_target = target

    def watch(self, loss: nn.Module) -> ErrorTap:
        """Take the labels of every batch from a loss that is called as ``loss(sentence_features, labels)``.

        They travel in the features, so that mini-batches of a cached loss get those of their rows.
        """
        self._handles.append(loss.register_forward_pre_hook(self._hand_on_labels, with_kwargs=True))
        return self

    def close(self, model: nn.Module) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        for block in _layers(model).values():
            if block.zbp.tap is self:
                block.zbp.tap = None
        del model.error_tap

    @property
    def signal(self) -> Signal | None:
        """Of the forward that runs now."""
        return self._running[-1].signal if self._running else None

    def _attach(self, blocks: dict[str, ZBPLayer]) -> None:
        for block in blocks.values():
            block.zbp.tap = self

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, target = _without_target(args)
        running = _Running(Signal(target=target))
        self._running.append(running)
        if not torch.is_grad_enabled() or self._teaching:
            return args, kwargs
        blocks = _layers(model)
        self._attach(blocks)
        if self._next_target is not None:
            running.signal.target, self._next_target = self._next_target, None
        if any(block.zbp.mode == OPZO and block.zbp.config.opzo_alpha is not None for block in blocks.values()):
            # Copies, as modules may write their outputs into the features that they are given.
            running.args, running.kwargs = tuple(map(_shallow_copy, args)), kwargs
            running.random_state = RandContext(*_tensors_of(args, kwargs))
        return args, kwargs

    def _end(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running = self._running.pop()
        y = None if output is None else self._find_output(output)  # None if the forward raised
        if y is None or not y.requires_grad:
            return
        signal = running.signal
        if signal.target is not None:
            signal.target = _target_like(signal.target, y)
        y.register_hook(signal.receive)
        if running.random_state is not None:
            self._teach(model, y.detach(), running)

    def _teach(self, model: nn.Module, y: Tensor, running: _Running) -> None:
        self._teaching = True
        try:
            with running.random_state:
                opzo_update(model, lambda: self._find_output(model(*running.args, **running.kwargs)), y)
        finally:
            self._teaching = False

    def _find_output(self, output: Any) -> Tensor | None:
        if isinstance(output, Mapping):
            output = output.get(self.output)
        elif isinstance(output, (tuple, list)):
            output = output[0] if output else None
        return output if isinstance(output, Tensor) else None

    def _hand_on_labels(self, loss: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        features, labels = args[0], args[1] if len(args) > 1 else kwargs.get("labels")
        if labels is None:
            raise ValueError(
                f"ErrorTap.watch wants a labelled loss, and {type(loss).__name__} was called without labels. Give the "
                "dataset a column 'label', or use mode='dfa', which needs none."
            )
        return ([{**column, TARGET_KEY: labels} for column in features], *args[1:]), kwargs


def _target_like(target: Tensor, y: Tensor) -> Tensor:
    """A target in the shape and dtype of an output."""
    if target.is_floating_point():
        if target.shape == y.shape:
            return target.to(y.device, y.dtype)
    elif target.shape == y.shape[:-1]:
        largest = int(target.max()) if target.numel() else -1
        if largest >= y.shape[-1]:
            raise ValueError(
                f"The target of mode='drtp' has the class {largest}, and the model's output has {y.shape[-1]} "
                "features: one a class is needed. Give the target as numbers in the shape of the output instead."
            )
        hot = one_hot(target.clamp_min(0).long(), y.shape[-1])
        return (hot * (target >= 0)[..., None]).to(y.device, y.dtype)
    raise ValueError(
        f"The target of mode='drtp' has the shape {tuple(target.shape)} and the dtype {target.dtype}; the model's "
        f"output has the shape {tuple(y.shape)}. Expected are class indexes of shape {tuple(y.shape[:-1])}, or "
        "floating-point numbers in the shape of the output."
    )


def _without_target(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | None]:
    """Arguments of a forward without the target among its features, and that."""
    if not args or not isinstance(args[0], Mapping) or TARGET_KEY not in args[0]:
        return args, None
    features = {key: value for key, value in args[0].items() if key != TARGET_KEY}
    return (features, *args[1:]), args[0][TARGET_KEY]


def _layers(model: nn.Module) -> dict[str, ZBPLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ZBPLayer)}


def _shallow_copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        values = value.values() if isinstance(value, Mapping) else [value]
        found += [item for item in values if isinstance(item, Tensor)]
    return found
