"""The losses of the recipes by name: ours, and every loss of sentence-transformers that can be cached."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as st_losses
from torch import nn

from st_cached_extras.losses import (
    CachedInfoNCELoss,
    CachedLoss,
    CachedMultiEncoderMMDLoss,
    CachedSigmoidLoss,
    CachedSupConLoss,
)
from st_cached_extras.objectives.adapter import CALLED_WHOLE
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.recipes.errors import UsageError

if TYPE_CHECKING:
    from st_cached_extras.recipes.arguments import LossArguments

LOSSES: dict[str, Callable[..., nn.Module]] = {}
"""What makes each loss: called with the model, the arguments of caching and those of ``--loss_options``."""


def register_loss(name: str) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Make a function the loss ``name`` of all recipes; its docstring is what ``--loss list`` says."""

    def register(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        LOSSES[name] = make
        return make

    return register


@register_loss("infonce")
def _infonce(model: SentenceTransformer, caching: dict[str, Any], **options: Any) -> nn.Module:
    """anchor, positive, any negatives: every other row of the batch is a negative"""
    return CachedInfoNCELoss(model, **caching, **options)


@register_loss("symmetric")
def _symmetric(model: SentenceTransformer, caching: dict[str, Any], **options: Any) -> nn.Module:
    """anchor, positive: infonce in both directions, as CLIP is trained"""
    directions = ("query_to_doc", "doc_to_query")
    return CachedInfoNCELoss(
        model, **{"directions": directions, "partition_mode": "per_direction"}, **caching, **options
    )


@register_loss("sigmoid")
def _sigmoid(model: SentenceTransformer, caching: dict[str, Any], **options: Any) -> nn.Module:
    """anchor, positive: every pair of rows is judged by itself (SigLIP), with learned scale and bias"""
    return CachedSigmoidLoss(model, **caching, **options)


@register_loss("supcon")
def _supcon(model: SentenceTransformer, caching: dict[str, Any], **options: Any) -> nn.Module:
    """one or more columns and a label: rows of one label are each other's positives"""
    return CachedSupConLoss(model, **caching, **options)


@register_loss("mmd")
def _mmd(model: SentenceTransformer, caching: dict[str, Any], *, references: dict[str, str], **options: Any):
    """any columns: their law is that of '{"references": {name: file of fit_reference.py}}'; a companion, not alone"""
    summaries = {name: NystromReference.load(path) for name, path in references.items()}
    return CachedMultiEncoderMMDLoss(model, MultiEncoderMMD(summaries), **caching, **options)


def losses_of_sentence_transformers() -> dict[str, type[nn.Module]]:
    """Its losses by class name that compute from embeddings, need the model alone, and do not cache by themselves."""
    return {
        name: cls
        for name, cls in vars(st_losses).items()
        if inspect.isclass(cls)
        and (hasattr(cls, "compute_loss_from_embeddings") or issubclass(cls, CALLED_WHOLE))
        and not name.startswith("Cached")
    }


def make_loss(model: SentenceTransformer, arguments: LossArguments, index: int = 0) -> nn.Module:
    """The loss that the arguments name.

    Args:
        model: the model to train.
        arguments: names, options and caching.
        index: which of several losses.

    Raises:
        UsageError: an unknown name, or options that the loss does not take.
    """
    name, options = arguments.loss[index], _options(arguments, index)
    caching = {
        "mini_batch_size": arguments.mini_batch_size,
        "mini_batch_num_tokens": arguments.mini_batch_num_tokens,
        "kept_graphs": arguments.kept_graphs,
        "differentiated_samples": _count_or_share(arguments.differentiated_samples),
        "gather_across_devices": arguments.gather_across_devices,
    }
    others = losses_of_sentence_transformers()
    try:
        if name in LOSSES:
            loss = LOSSES[name](model, caching, **options)
        elif name in others:
            if "guide" in options:  # of GISTEmbedLoss: an id or path
                options = {**options, "guide": SentenceTransformer(options["guide"])}
            loss = CachedLoss(others[name](model, **options), **caching)
        else:
            raise UsageError(f"There is no loss {name!r}; the losses are {', '.join([*LOSSES, *others])}.")
        if arguments.matryoshka_dims:
            loss = st_losses.MatryoshkaLoss(model, loss, arguments.matryoshka_dims)
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        given = json.dumps(_options(arguments, index))
        raise UsageError(f"--loss {name} cannot be made with --loss_options {given}: {error}") from error
    return loss


def describe_losses() -> str:
    """The names of all losses, with the columns that each wants."""
    width = max(map(len, LOSSES))
    lines = [f"  {name:{width}}  {(make.__doc__ or '').strip().splitlines()[0]}" for name, make in LOSSES.items()]
    others = ", ".join(losses_of_sentence_transformers())
    return "\n".join(["Losses of st-cached-extras:", *lines, "", f"Cached losses of sentence-transformers: {others}"])


def _options(arguments: LossArguments, index: int) -> dict[str, Any]:
    given = arguments.loss_options or ["{}"]
    if len(given) not in (1, len(arguments.loss)):
        raise UsageError(
            f"--loss_options has {len(given)} values for {len(arguments.loss)} loss(es): give one for each."
        )
    text = given[index if len(given) > 1 else 0]
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--loss_options must be JSON, such as '{{\"scale\": 30}}', got {text!r}: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"--loss_options must be a JSON object, such as '{{\"scale\": 30}}', got {text!r}.")
    return options


def _count_or_share(value: float | None) -> int | float | None:
    return value if value is None or value < 1 else int(value)
