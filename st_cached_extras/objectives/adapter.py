"""Any loss of sentence-transformers that computes from embeddings, as an objective: its derivatives by autograd.

The loss sees whole columns of embeddings as leaves, so that only its own graph, and none of the model, is alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss, GISTEmbedLoss, SoftmaxLoss
from sentence_transformers.util import fullname
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult, compute_dtype
from st_cached_extras.objectives.checks import check_columns, check_rows
from st_cached_extras.objectives.parameters import own_parameters

CALLED_WHOLE = (EmbedDistillLoss, GISTEmbedLoss, SoftmaxLoss)
"""Losses that compute in their forward, from what their model returns: they are given a model that returns it."""


class LossObjective(Objective):
    """A loss of sentence-transformers, evaluated under autograd on embeddings that are already there.

    The value is that of the plain loss on all rows of the world at once. Nothing is known of how such a loss treats
    its rows, so every rank evaluates the whole: right for any loss, but not shared work.

    Args:
        loss: a loss with ``compute_loss_from_embeddings(embeddings, labels)`` that returns a scalar or several by
            name, or a :class:`SoftmaxLoss`, :class:`EmbedDistillLoss` (:class:`MSELoss`) or :class:`GISTEmbedLoss`.
            Labels are what it takes, per row; for the last one, the guide's embeddings [B, number of columns, D].

    Raises:
        TypeError: a loss that does not compute from embeddings.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        if not computes_from_embeddings(loss):
            raise TypeError(
                f"loss: {type(loss).__name__} has no method compute_loss_from_embeddings(embeddings, labels), so it "
                "cannot be evaluated on embeddings that are already there. Give it one that returns what its forward "
                "computes once the columns are embedded."
            )
        self.loss = loss

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.loss).__name__}, {loss_options(self.loss)})"

    def value_and_cotangents(
        self,
        features: Mapping[str, Tensor],
        *,
        labels: Tensor | None = None,
        reference: Mapping[str, Tensor] | None = None,
        rows: Tensor | None = None,
        world: World | None = None,
    ) -> ObjectiveResult:
        """Evaluate the loss and d loss / d features.

        Args:
            features: "anchor", "positive", "negative_1", ..., the columns in the loss's order, each [B, D].
            labels: [B, ...], whatever the loss reads, of any dtype; None if it reads none.
            reference: ignored.
            rows: int64 [b], local rows whose cotangents are wanted; None for all.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            An :class:`ObjectiveResult` without cotangents for columns that the loss did not use, with components
            where the loss returns several values.

        Raises:
            TypeError: features that are not floating point, or rows that are not int64.
            ValueError: names or row counts that do not fit, or a value that does not depend on the embeddings.
        """
        names = check_columns(features)
        count = len(features[names[0]])
        check_rows(rows, count)
        world = World() if world is None else world
        dtype = compute_dtype(features)
        counts = world.row_counts(count) if world.size > 1 else [count]
        columns = _gather([features[name] for name in names], counts, world)
        labels = labels if labels is None or world.size == 1 else _gather_labels(labels, counts, world)
        parameters = own_parameters(self)
        with torch.enable_grad(), torch.autocast(columns[0].device.type, enabled=False):
            leaves = [column.to(dtype).detach().requires_grad_() for column in columns]
            components = self._components(leaves, labels)
            loss = sum(components.values())
            inputs = [*leaves, *parameters.values()]
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)

        own = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
        cotangents = {
            name: gradient[own] if rows is None else gradient[own][rows.to(gradient.device)]
            for name, gradient in zip(names, gradients, strict=False)
            if gradient is not None
        }
        parameter_cotangents = {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients[len(names) :], strict=True)
        }
        return ObjectiveResult(
            loss.detach(),
            {name: cotangents[name] for name in features if name in cotangents},
            parameter_cotangents,
            components={name: value.detach() for name, value in components.items() if name},
        )

    def _components(self, embeddings: list[Tensor], labels: Tensor | None) -> dict[str, Tensor]:
        """The values by their names; a single one has none."""
        try:
            if isinstance(self.loss, CALLED_WHOLE):
                value = self._call_whole(embeddings, labels)
            else:
                value = self.loss.compute_loss_from_embeddings(embeddings, labels)
        except Exception as error:
            raise ValueError(
                f"{type(self.loss).__name__} cannot be evaluated on {len(embeddings)} column(s) of embeddings "
                f"{', '.join(str(tuple(x.shape)) for x in embeddings)} with labels {_described(labels)}: "
                f"{type(error).__name__}: {error} Give it columns, labels and dimensions that the plain loss takes."
            ) from error
        components = value if isinstance(value, dict) else {"": value}
        for name, part in components.items():
            if not isinstance(part, Tensor) or part.ndim or not part.requires_grad:
                found = _described(part) + ("" if getattr(part, "requires_grad", True) else " without a graph")
                raise ValueError(
                    f"{type(self.loss).__name__} returned {found}{f' as {name}' if name else ''}, expected "
                    "a scalar that autograd can follow to the embeddings. Check what compute_loss_from_embeddings "
                    "returns and that it computes without detach() and no_grad()."
                )
        return components

    def _call_whole(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        columns = [{"sentence_embedding": embedding} for embedding in embeddings]
        stand_ins: dict[str, Any] = {"model": _Returning("sentence_embedding")}
        if isinstance(self.loss, GISTEmbedLoss):
            for column, guidance in zip(columns, labels.unbind(1), strict=True):
                column["guidance"] = guidance.to(column["sentence_embedding"].dtype)
            # The guide has read the texts already, whatever its tokenizer.
            stand_ins |= {"guide": _Returning("guidance"), "must_retokenize": False}
        with _replaced(self.loss, **stand_ins):
            return self.loss(columns, labels)


class _Returning(nn.Module):
    """A model whose embeddings are in its inputs."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.key]}


@contextmanager
def _replaced(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Run the body with other values of some attributes."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def computes_from_embeddings(loss: Any) -> bool:
    """Whether a loss can be evaluated on embeddings without its model."""
    return isinstance(loss, CALLED_WHOLE) or callable(getattr(loss, "compute_loss_from_embeddings", None))


def loss_options(loss: nn.Module) -> dict[str, Any]:
    """The configuration of any loss as plain JSON types: objects by their names, which are the same in every run."""
    return _plain(loss.get_config_dict()) if hasattr(loss, "get_config_dict") else {}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in value]
    return getattr(value, "__name__", None) or fullname(value)


def _gather(columns: Sequence[Tensor], counts: list[int], world: World) -> list[Tensor]:
    """The columns [B, D] of all ranks in one collective, [N, D] each."""
    if world.size == 1:
        return list(columns)
    stacked = world.gather_rows(torch.cat(list(columns), dim=1), counts)
    return list(stacked.split([column.shape[1] for column in columns], dim=1))


def _gather_labels(labels: Tensor, counts: list[int], world: World) -> Tensor:
    if labels.dtype != torch.bool:
        return world.gather_rows(labels, counts)
    return world.gather_rows(labels.to(torch.uint8), counts).bool()  # not every backend moves bools


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "None" if value is None else f"of type {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)}"
