"""Several losses on one embedding pass, over batches that do not fit the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from torch import Tensor, nn

from st_cached_extras._compat import uncompiled
from st_cached_extras.losses.cached_loss import CachedLoss
from st_cached_extras.objectives.base import Objective
from st_cached_extras.objectives.composite import Composite, of_component
from st_cached_extras.replay.loss import ReplayLoss
from st_cached_extras.replay.selection import stacked_rows


class CachedCompositeLoss(ReplayLoss):
    """A weighted sum of losses that all look at the same embeddings, each logged by its name.

    A batch is embedded twice, however many losses there are: once without a graph for all of them together, once with
    a graph and the sum of their derivatives.

    Args:
        model: the SentenceTransformer to train.
        losses: by name, a component and its weight. A component is

            - an :class:`~st_cached_extras.objectives.Objective`, given the columns as anchor, positive, negative_1,
              ... and the labels as they are;
            - one of this package's losses, constructed with the same model: its objective, what it extracts from the
              model's outputs with its heads, and how it reads columns and labels. Its own arguments about
              mini-batches, ranks and selected rows do not matter: those of the composite rule;
            - a loss of sentence-transformers, constructed with the same model, as :class:`CachedLoss` takes it; but
              not GISTEmbedLoss, whose labels are its guide's embeddings.
        mini_batch_size: rows that are embedded at once: this bounds the memory.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens (rows x longest row) instead.
        gather_across_devices: every component is one global loss over the rows of all ranks.
        show_progress_bar: show a progress bar over the mini-batches of each pass.
        sort_by_length: put rows of like length into one mini-batch.
        trim_left_padding: also cut off leading padding that a whole mini-batch shares; only for models with relative
            (rotary) positions.
        kept_graphs: share of the mini-batches whose graphs are kept from the first pass: time for memory.
        differentiated_samples: embed only so many rows (an int, or a share as a float) a second time, drawn anew at
            every step and weighted so that the expected gradient is that of all rows; None for all.
        selection_seed: seed of those draws.
        defer_reduction: under FSDP2, ZeRO-2 and ZeRO-3, reduce gradients once a backward and not for every mini-batch;
            every rank then holds the gradients of the whole model.

    Raises:
        TypeError: ``model`` is not a SentenceTransformer, or a component is none of the above.
        ValueError: no components, a name that modules may not have, a weight that is not finite, a component of
            another model, or an argument out of its range.

    References:
        - Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup:
          https://huggingface.co/papers/2101.06983

    Requirements:
        1. Columns and labels that suit all components: all of them see all columns and the same labels.

    Inputs:
        Those of the components.

    Recommendations:
        - The Trainer logs every component, weighted, and the total. What components report beside their value is in
          ``loss.metrics`` as "name/metric".

    Relations:
        - With :class:`~sentence_transformers.losses.MatryoshkaLoss` around it, also trained at smaller dimensions,
          unless a component extracts features of its own; then the first forward says so.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
            from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
            from st_cached_extras import CachedCompositeLoss
            from st_cached_extras.objectives import InfoNCE

            model = SentenceTransformer("microsoft/mpnet-base")
            train_dataset = Dataset.from_dict({
                "query": ["Is it nice outside?", "How did he get there?"],
                "positive": ["It's so sunny.", "He took the car."],
                "negative": ["It's raining.", "He likes trains."],
                "label": [[0.9, 0.1], [0.8, 0.3]],
            })
            losses = {"contrastive": (InfoNCE(), 1.0), "kl": (DistillKLDivLoss(model, temperature=0.1), 0.5)}
            loss = CachedCompositeLoss(model, losses, mini_batch_size=64)
            trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    objective: Composite

    def __init__(
        self,
        model: SentenceTransformer,
        losses: Mapping[str, tuple[Objective | nn.Module, float]],
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        sort_by_length: bool = True,
        trim_left_padding: bool = False,
        kept_graphs: float = 0.0,
        differentiated_samples: int | float | None = None,
        selection_seed: int = 0,
        defer_reduction: bool = False,
    ) -> None:
        self._check_model(model)
        _check_components(losses)
        components = {name: _as_replay_loss(name, loss, model) for name, (loss, _) in losses.items()}
        super().__init__(
            model,
            Composite({name: (loss.objective, losses[name][1]) for name, loss in components.items()}),
            mini_batch_size=mini_batch_size,
            mini_batch_num_tokens=mini_batch_num_tokens,
            sort_by_length=sort_by_length,
            trim_left_padding=trim_left_padding,
            gather_across_devices=gather_across_devices,
            kept_graphs=kept_graphs,
            differentiated_samples=differentiated_samples,
            selection_seed=selection_seed,
            defer_reduction=defer_reduction,
            show_progress_bar=show_progress_bar,
        )
        self.components = nn.ModuleDict(components)
        self._shapes: list[torch.Size] = []  # of one row, of each extractor

    # ------------------------------------------------------------------------------- from loss to objective

    def extract(self, outputs: Mapping[str, Any]) -> Tensor:
        """What each component extracts, flattened and side by side [n, ΣD]; what several share, once."""
        extracted = [self.components[names[0]].extract(outputs) for names in self._sharing()]
        self._shapes = [features.shape[1:] for features in extracted]
        return extracted[0] if len(extracted) == 1 else torch.cat([x.flatten(1) for x in extracted], dim=1)

    def to_features(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """The features of every component, as "component.name"."""
        features = {}
        for names, own_columns in zip(self._sharing(), self._split(columns), strict=True):
            for name in names:
                features |= of_component(name, self.components[name].to_features(own_columns))
        return features

    def to_targets(self, labels: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The same labels for every component, which reads them in its own way."""
        by_component, references = {}, {}
        for name, component in self.components.items():
            by_component[name], reference = component.to_targets(labels)
            references |= of_component(name, reference or {})
        return by_component, references

    def to_rows(self, rows: Tensor, features: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """By component, whose features may hold several columns, one after the other."""
        by_component = {}
        for name, feature in features.items():
            by_component[name.split(".", 1)[0]] = stacked_rows(rows, len(feature) // count, len(feature))
        return by_component

    def update_balance(self, metrics: Mapping[str, Tensor]) -> None:
        """Every component adapts to its own metrics."""
        for name, component in self.components.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): x for key, x in metrics.items() if key.startswith(prefix)}
            component.update_balance(own)

    def _sharing(self) -> list[list[str]]:
        """The components by what they extract: those that take the sentence embedding as it is share it."""
        plain = [name for name, loss in self.components.items() if type(loss).extract is ReplayLoss.extract]
        others = [[name] for name in self.components if name not in plain]
        return [plain, *others] if plain else others

    def _split(self, columns: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per extractor, its part of every column."""
        if len(self._sharing()) == 1:
            return [list(columns)]
        widths = [shape.numel() for shape in self._shapes]
        if columns[0].shape[1] != sum(widths):
            raise ValueError(
                f"{type(self).__name__} packed features of {len(widths)} kinds into {sum(widths)} numbers per row and "
                f"got back {columns[0].shape[1]}. MatryoshkaLoss truncates them, which means nothing where components "
                "extract features of their own: use it with components that take the sentence embedding alone."
            )
        parts = [column.split(widths, dim=1) for column in columns]
        return [
            [part.unflatten(1, shape) if len(shape) > 1 else part for part in of_extractor]
            for shape, of_extractor in zip(self._shapes, zip(*parts, strict=True), strict=True)
        ]

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card: of every component, and of the caching."""
        own = super().get_config_dict()
        components = {}
        for name, component in self.components.items():
            config = {key: value for key, value in component.get_config_dict().items() if key not in own}
            kind = type(component.objective if isinstance(component, _ObjectiveLoss) else component).__name__
            components[name] = {"weight": self.objective.weights[name], "type": kind, **config}
        return {"components": components, **own}

    @property
    def citation(self) -> str:
        """BibTeX of the caching and of the components."""
        cited = [super().citation.strip()]
        for component in self.components.values():
            for loss in (component, getattr(component, "loss", None)):
                entry = getattr(loss, "citation", "").strip().removeprefix(cited[0]).strip()
                if entry and entry not in cited:
                    cited.append(entry)
        return "\n\n".join(cited) + "\n"


class _ObjectiveLoss(ReplayLoss):
    """An objective as a component: the columns by their default names, the labels as they are."""

    def to_targets(self, labels: Tensor | None) -> tuple[Tensor | None, None]:
        return labels, None

    def get_config_dict(self) -> dict[str, Any]:
        options = getattr(self.objective, "options", dict)()
        return {**options, **super().get_config_dict()}


def _check_components(losses: Mapping[str, tuple[Any, float]]) -> None:
    if not isinstance(losses, Mapping) or not losses:
        raise ValueError(
            f'losses: found {losses!r}, expected at least one component by name, such as {{"contrastive": '
            "(InfoNCE(), 1.0)}."
        )
    for name, component in losses.items():
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
            raise ValueError(
                f"losses: found the name {name!r}, expected a short name without a dot that is no attribute of a "
                "torch.nn.ModuleDict. It is what the Trainer logs the component by."
            )
        if not isinstance(component, (tuple, list)) or len(component) != 2:
            raise TypeError(f"losses[{name!r}]: found {component!r}, expected (objective or loss, weight).")
        weight = component[1]
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"losses[{name!r}]: found the weight {weight!r}, expected a finite number.")


def _as_replay_loss(name: str, loss: Any, model: SentenceTransformer) -> ReplayLoss:
    """A component in the form that says how columns, labels and outputs of the model are read."""
    if isinstance(loss, Objective):
        return _ObjectiveLoss(model, loss)
    if isinstance(loss, CachedCompositeLoss):
        raise TypeError(f"losses[{name!r}]: a composite inside a composite. Give its components to this one.")
    component = loss if isinstance(loss, ReplayLoss) else CachedLoss(loss)
    if isinstance(getattr(component, "loss", None), GISTEmbedLoss):
        raise TypeError(
            f"losses[{name!r}]: {type(component.loss).__name__} replaces the labels of the batch by its guide's "
            "embeddings, so it cannot share them with other components. Use it alone, in a CachedLoss."
        )
    if uncompiled(component.model) is not uncompiled(model):
        raise ValueError(
            f"losses[{name!r}]: {type(loss).__name__} was constructed with another model. All components look at the "
            "embeddings of one: construct them with it."
        )
    return component
