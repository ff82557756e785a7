"""Feature-gradient replay behind the interface that ``SentenceTransformerTrainer`` expects of a loss.

The method is GradCache (Gao et al. 2021, arXiv 2101.06983): embed every mini-batch without a graph, derive the
objective with respect to the embeddings alone, then embed each mini-batch again with a graph and inject its
derivatives. Which rows share a mini-batch is planned by length, and the derivatives come in closed form.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import CachedLossMixin, has_static_embedding_input
from torch import Tensor, nn

from st_cached_extras._compat import is_compiled, uncompiled
from st_cached_extras.distributed.engines import Engine, engine_of
from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult
from st_cached_extras.objectives.parameters import own_parameters
from st_cached_extras.replay.columns import Column, column_names, read_columns
from st_cached_extras.replay.cotangents import attach_cotangents, inject
from st_cached_extras.replay.media import media_tokens_of
from st_cached_extras.replay.passes import Passes
from st_cached_extras.replay.plan import plan_selected_first
from st_cached_extras.replay.selection import check_differentiated, count_differentiated, draw_rows, stacked_rows

logger = logging.getLogger(__name__)

COMPILED_MULTIPLE = 8
"""Of tokens in a mini-batch of a compiled model, so that it is compiled for few lengths."""


class ReplayLoss(CachedLossMixin, nn.Module):
    """Base of the cached losses: feature dicts in, parameter gradients out, memory of one mini-batch.

    A subclass hands over an :class:`~st_cached_extras.objectives.Objective` and, where columns or labels mean
    something other than anchor, positive and negatives, overrides :meth:`to_features` or :meth:`to_targets`. What it
    computes from the model's outputs of one mini-batch, with projection heads of its own for instance, belongs into
    :meth:`extract`, which is replayed with the model.

    Every trainable parameter that the loss owns is trained: those of the objective by its closed form, those of heads
    by the replays. Over ranks their gradients are averaged, once per backward.

    Attributes:
        metrics: what the objective reported beside the loss at the last forward, detached scalars by name.

    Args:
        model: the SentenceTransformer to train.
        objective: what is computed from the embeddings.
        mini_batch_size: rows that are embedded at once: this bounds the memory. The batch size does not.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens instead, counted as what is
            computed: rows x longest row. Use it to keep the memory of short and long rows level.
        sort_by_length: put rows of like length into one mini-batch, so that hardly any padding is computed. The
            gradients are the same; with dropout, rows draw other masks than in the order given.
        trim_left_padding: also cut off leading padding that a whole mini-batch shares, on left-padded inputs. Exact
            for models with relative (rotary) positions, wrong for absolute ones.
        gather_across_devices: compute one global objective over the rows of all ranks. By default, as in ST, the
            loss is the mean over ranks of each rank's own.
        kept_graphs: share of the mini-batches whose graphs are kept from the first pass, so that they are not embedded
            again: time for memory. At 1 the memory is that of a step without a cache. For models that no engine wraps.
        differentiated_samples: embed only so many rows of each rank's batch a second time (an int, or a share as a
            float), drawn anew at every training step; their gradients are weighted so that the expected gradient is
            that of all rows. None for all.
        selection_seed: seed of those draws, which depend on it, on the step and on the rank.
        defer_reduction: under FSDP2, ZeRO-2 and ZeRO-3, reduce gradients over ranks once a backward and not for every
            mini-batch: less communication, and every rank holds the gradients of the whole model meanwhile.
        show_progress_bar: show a progress bar over the mini-batches of each pass.

    Raises:
        TypeError: ``model`` is not a SentenceTransformer, or a size is not an integer.
        ValueError: a size is not positive, or the model embeds its inputs with a StaticEmbedding.
    """

    state_is_saved: bool = False  # set by ReplayTrainerMixin, which saves what the loss owns
    _has_warned: bool = False

    def __init__(
        self,
        model: SentenceTransformer,
        objective: Objective,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        sort_by_length: bool = True,
        trim_left_padding: bool = False,
        gather_across_devices: bool = False,
        kept_graphs: float = 0.0,
        differentiated_samples: int | float | None = None,
        selection_seed: int = 0,
        defer_reduction: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__()
        self._check_model(model)
        _check_positive_integer("mini_batch_size", mini_batch_size)
        if mini_batch_num_tokens is not None:
            _check_positive_integer("mini_batch_num_tokens", mini_batch_num_tokens)
        self.model = model
        self.objective = objective
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.sort_by_length = sort_by_length
        self.trim_left_padding = trim_left_padding
        self._media_tokens = media_tokens_of(model)
        self.gather_across_devices = gather_across_devices
        if isinstance(kept_graphs, bool) or not isinstance(kept_graphs, (int, float)) or not 0 <= kept_graphs <= 1:
            raise ValueError(f"kept_graphs must be a share between 0 and 1, got {kept_graphs!r}.")
        self.kept_graphs = kept_graphs
        check_differentiated("differentiated_samples", differentiated_samples)
        self.differentiated_samples = differentiated_samples
        self.selection_seed = selection_seed
        self.selection_step = 0
        self._rows: Tensor | None = None  # of the batch whose loss is being calculated
        self.metrics: dict[str, Tensor] = {}
        self._component_names: tuple[str, ...] = ()
        self.defer_reduction = defer_reduction
        self.show_progress_bar = show_progress_bar

    def _check_model(self, model: Any) -> None:
        if not isinstance(uncompiled(model), SentenceTransformer):
            raise TypeError(
                f"{type(self).__name__} trains SentenceTransformer models, got model={type(model).__name__}. For "
                "sparse, cross-encoder and multi-vector models use the cached losses of sentence-transformers."
            )
        if has_static_embedding_input(model):
            raise ValueError(
                f"{type(self).__name__} cannot cache a model that embeds its inputs with a StaticEmbedding: its "
                "inputs have no row axis to cut into mini-batches, and its activations are small already. Use the "
                "plain loss of sentence-transformers, e.g. MultipleNegativesRankingLoss."
            )

    # ------------------------------------------------------------------------------- from loss to objective

    def to_features(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """Name the embedded columns for the objective: anchor, positive, negative_1, negative_2, ...

        Args:
            columns: what :meth:`extract` gave for all rows of each input column, [B, D] each. Whatever is computed
                from them here is differentiated, for all rows at once.
        """
        return dict(zip(column_names(len(columns)), columns, strict=True))

    def to_targets(self, labels: Tensor | None) -> tuple[Tensor | None, Mapping[str, Tensor] | None]:
        """What the objective receives of the dataset's labels: (labels, reference). By default nothing, as in ST's
        ranking losses."""
        return None, None

    def to_rows(self, rows: Tensor, features: Mapping[str, Tensor], count: int) -> Any:
        """The rows of the features that come from selected ``rows`` (int64 [b]) of the batch's ``count``."""
        return rows

    def update_balance(self, metrics: Mapping[str, Tensor]) -> None:
        """Called once per training forward with what the objective reported; a loss that adapts overrides it."""

    def extract(self, outputs: Mapping[str, Any]) -> Tensor:
        """The features [n, D] of one mini-batch, from the model's outputs for it; run again in the replay."""
        return outputs["sentence_embedding"]

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that the loss owns: none of the model, nor of any other model that it holds."""
        return own_parameters(self)

    # ---------------------------------------------------------------------------------------- the objective

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Evaluate the objective on embeddings.

        Args:
            reps: per column, its embeddings as a list of tensors [n, D] in row order.
            labels: the labels of the rows, as the data collator made them.
            with_backward: add the cotangents to the ``.grad`` of ``reps`` and return a value that is detached from
                them (but differentiable in the loss's own parameters). Otherwise, with gradients enabled, the value
                is differentiable in both.

        Returns:
            The loss, a scalar; of an objective with components, all of them, [number of components]. Their sum is the
            loss, and its derivative is attached to the first.
        """
        columns = [mini_batches[0] if len(mini_batches) == 1 else torch.cat(mini_batches) for mini_batches in reps]
        features = self.to_features(columns)
        labels, reference = self.to_targets(labels)
        rows = self._rows if with_backward else None
        result = self.objective.value_and_cotangents(
            {name: feature.detach() for name, feature in features.items()},
            labels=labels,
            reference=reference,
            rows=None if rows is None else self.to_rows(rows, features, len(columns[0])),
            world=engine_of(self.model).world if self.gather_across_devices else None,
        )
        self.metrics, self._component_names = result.metrics, tuple(result.components)
        value, *others = result.components.values() or (result.loss,)
        if torch.is_grad_enabled():
            value = self._attach(value, result, features, reps if with_backward else None)
        return torch.stack([value, *others]) if result.components else value

    def _attach(
        self, value: Tensor, result: ObjectiveResult, features: Mapping[str, Tensor], leaves: list[list[Tensor]] | None
    ) -> Tensor:
        """``value`` with the derivatives of ``result``; those by the features go into ``leaves``, if given."""
        self._check_every_column_is_used(features, result)
        tensors = list(features.values())
        cotangents = [self._of_all_rows(result.cotangents.pop(name), feature) for name, feature in features.items()]
        if leaves is not None:
            flat = [embeddings for mini_batches in leaves for embeddings in mini_batches]
            tensors, cotangents = inject(tensors, cotangents, flat, list(self.own_parameters().values()))
            self._check_every_column_has_a_gradient(leaves)
        for name, parameter in self.objective.named_parameters():
            if parameter.requires_grad and name in result.parameter_cotangents:
                tensors.append(parameter)
                cotangents.append(result.parameter_cotangents[name])
        return attach_cotangents(value, tensors, cotangents) if tensors else value

    def _of_all_rows(self, cotangent: Tensor, feature: Tensor) -> Tensor:
        """Cotangents of the selected rows, [k·b, D], among zeros for the others, [k·B, D]: k columns, stacked."""
        if len(cotangent) == len(feature):
            return cotangent
        rows = stacked_rows(self._rows, len(cotangent) // len(self._rows), len(feature)).to(cotangent.device)
        return cotangent.new_zeros(feature.shape).index_copy_(0, rows, cotangent)

    def _check_every_column_is_used(self, features: Mapping[str, Tensor], result: ObjectiveResult) -> None:
        if unused := [name for name in features if name not in result.cotangents]:
            raise ValueError(
                f"{type(self.objective).__name__} did not use the input column(s) {', '.join(unused)}: it returned no "
                f"cotangents for them, only for {', '.join(result.cotangents)}. Every column is embedded twice, so "
                "remove the unused ones from the dataset, e.g. with dataset.remove_columns(...)."
            )

    def _check_every_column_has_a_gradient(self, reps: list[list[Tensor]]) -> None:
        unused = [
            name
            for name, mini_batches in zip(column_names(len(reps)), reps, strict=True)
            if any(embeddings.grad is None for embeddings in mini_batches)
        ]
        if unused:
            raise ValueError(
                f"{type(self).__name__}.to_features did not use the input column(s) {', '.join(unused)}. Every column "
                "is embedded twice, so remove the unused ones from the dataset, e.g. with dataset.remove_columns(...)."
            )

    # -------------------------------------------------------------------------------------------- the passes

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss of one batch; its backward replays the mini-batches.

        Args:
            sentence_features: one feature dict per input column.
            labels: labels of the rows, or None.

        Returns:
            The loss, a scalar in fp32 or higher; of an objective with components, each by its name. Their sum is the
            loss: the backward of the first one replays for all, and the others are detached.
        """
        return self.forward_cached(sentence_features, labels)

    def forward_cached(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Collect the embeddings, evaluate the objective, and leave the replay to the backward of the result."""
        engine = engine_of(self.model, defer_reduction=self.defer_reduction, inside_backward=True)
        with_replay = torch.is_grad_enabled()
        # An evaluation of local losses asks nothing of the other ranks, which may not be evaluating; unless they must,
        # because they hold shards of the model.
        world = engine.world if with_replay or self.gather_across_devices or engine.shards else World()
        columns, selected = self._plan(sentence_features, world, with_replay)
        passes = Passes(engine, self.extract, world, self.show_progress_bar)
        if self.kept_graphs and type(engine) is not Engine:
            raise ValueError(
                f"kept_graphs={self.kept_graphs} is for models that no engine wraps, and this one is wrapped in "
                f"{type(engine.model).__name__}, which wants to see every backward follow its own forward. Set "
                "kept_graphs=0."
            )
        passes.collect(columns, with_replay, self.kept_graphs)
        if self.gather_across_devices:
            self._check_agreement(columns, labels, world)
        reps = [[column.embeddings] for column in columns]
        if not with_replay:
            return self._by_name(self.calculate_loss(reps, labels))

        self._warn_if_state_is_not_saved()
        for column in columns:
            column.embeddings.requires_grad_()
        self._rows = selected
        try:
            value = self.calculate_loss(reps, labels, with_backward=True)
        finally:
            self._rows = None
        self.update_balance(self.metrics)
        selection_weight = 1.0 if selected is None else columns[0].rows.count / len(selected)
        weight = self.world_factor * selection_weight
        own = list(self.own_parameters().values())
        gradients: Sequence[Tensor | None] = [None] * len(own)
        if value.requires_grad:
            gradients = torch.autograd.grad(value.sum(), own, allow_unused=True)
        complete = set(self.objective.parameters())  # the others have seen this rank's selected rows alone
        known = [
            (parameter, gradient if parameter in complete else gradient * weight)
            for parameter, gradient in zip(own, gradients, strict=True)
            if gradient is not None
        ]

        cotangents = [column.embeddings.grad for column in columns]
        for column in columns:
            column.embeddings = torch.empty(0)  # the replay needs the cotangents alone
        value = value.detach()
        # Not a leaf: DeepSpeed takes that for a mere number.
        loss = (value[0] if value.ndim else value).requires_grad_().clone()
        loss.register_hook(
            partial(
                self._replay,
                passes=passes,
                columns=columns,
                cotangents=cotangents,
                weight=weight,
                own=own,
                known=known,
                engine=engine,
            )
        )
        return self._by_name([loss, *value[1:]]) if value.ndim else loss

    def _by_name(self, value: Tensor | list[Tensor]) -> Tensor | dict[str, Tensor]:
        """A scalar as it is, several values by the names of the objective's components."""
        if isinstance(value, Tensor) and not value.ndim:
            return value
        return dict(zip(self._component_names, value, strict=True))

    def _check_agreement(self, columns: list[Column], labels: Tensor | None, world: World) -> None:
        """Let what may fail on one rank alone fail before the objective's collectives, and on all."""
        error, described = None, ""
        try:
            with torch.no_grad():
                features = self.to_features([column.embeddings for column in columns])
            self.to_targets(labels)
            shapes = {name: [str(feature.dtype), *feature.shape[1:]] for name, feature in features.items()}
            described = f"{self.objective!r} of {shapes}"
        except Exception as caught:
            error = caught
        world.raise_together(error)
        world.check_equal("The objective and its features", described)

    def _warn_if_state_is_not_saved(self) -> None:
        if self.state_is_saved or self._has_warned:
            return
        if owned := [*self.own_parameters(), *self.replay_state()]:
            self._has_warned = True
            logger.warning(
                f"{type(self).__name__} has state of its own ({', '.join(owned)}), which the checkpoints of "
                "SentenceTransformerTrainer do not hold: a resumed run starts them anew. Use "
                "ReplaySentenceTransformerTrainer, or mix ReplayTrainerMixin into your trainer."
            )

    @property
    def world_factor(self) -> int:
        """What the cotangents are multiplied by before they are injected.

        Engines average parameter gradients over ranks. The gathered objective is one global mean, of which each rank
        replays its part, so the average wants the number of ranks as a factor; the mean of local losses wants none.
        """
        return engine_of(self.model).world.size if self.gather_across_devices else 1

    def _plan(
        self, sentence_features: Iterable[dict[str, Any]], world: World, with_replay: bool
    ) -> tuple[list[Column], Tensor | None]:
        """The columns, each with its plan, and the selected rows, or None for all; an error is raised on all ranks."""
        columns, selected, error = [], None, None
        try:
            rows = read_columns(
                sentence_features,
                trim_left_padding=self.trim_left_padding,
                length_multiple=COMPILED_MULTIPLE if is_compiled(self.model) else 1,
                media_tokens=self._media_tokens,
            )
            count = next(iter(rows.values())).count
            if with_replay and self.differentiated_samples is not None:
                selected = self.select_rows(count, world.rank)
                self.selection_step += 1
            columns = [
                Column(
                    name,
                    column,
                    *plan_selected_first(
                        column.count,
                        column.lengths,
                        selected,
                        patches=column.patches,
                        is_padded=column.is_padded,
                        mini_batch_size=self.mini_batch_size,
                        mini_batch_num_tokens=self.mini_batch_num_tokens,
                        sort_by_length=self.sort_by_length,
                    ),
                )
                for name, column in rows.items()
            ]
        except Exception as caught:
            error = caught
        world.raise_together(error)
        return columns, selected

    def select_rows(self, count: int, rank: int) -> Tensor:
        """The rows of this rank's batch of ``count`` that are differentiated at this step: int64 [b], ascending."""
        drawn = count_differentiated(self.differentiated_samples, count)
        return draw_rows(count, drawn, seed=self.selection_seed, step=self.selection_step, rank=rank)

    def replay_state(self) -> dict[str, Tensor]:
        """What a resumed run needs to draw the rows that an uninterrupted one would: the step of the selection."""
        if self.differentiated_samples is None:
            return {}
        return {"selection_step": torch.tensor(self.selection_step)}

    def load_replay_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`replay_state` returned."""
        if "selection_step" in state:
            self.selection_step = int(state["selection_step"])

    def _replay(
        self,
        grad_output: Tensor,
        passes: Passes,
        columns: list[Column],
        cotangents: list[Tensor],
        weight: float,
        own: list[nn.Parameter],
        known: list[tuple[nn.Parameter, Tensor]],
        engine: Engine,
    ) -> None:
        """Run by the backward of the loss, with what that backward multiplies the loss by.

        Args:
            own: the parameters of the loss, which no engine averages; some have gradients from the replays.
            known: those whose gradients were known before them.
        """
        passes.replay(columns, cotangents, grad_output * weight)
        for parameter, cotangent in known:
            torch.autograd.backward(parameter, (cotangent * grad_output).to(parameter.dtype))
        engine.average_gradients(_reached(own, engine.world))

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card."""
        return {
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
            "sort_by_length": self.sort_by_length,
            "trim_left_padding": self.trim_left_padding,
            "gather_across_devices": self.gather_across_devices,
            "kept_graphs": self.kept_graphs,
            "differentiated_samples": self.differentiated_samples,
            "defer_reduction": self.defer_reduction,
        }

    @property
    def citation(self) -> str:
        return """
@misc{gao2021scaling,
    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},
    year={2021},
    eprint={2101.06983},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""


def _reached(parameters: list[nn.Parameter], world: World) -> list[nn.Parameter]:
    """Those that have a gradient on any rank. The others keep None, so that no optimizer decays them."""
    if not parameters or world.size == 1:
        return parameters
    reached = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device)
    reached = world.all_reduce(reached.int()).tolist()
    return [parameter for parameter, ranks in zip(parameters, reached, strict=True) if ranks]


def _check_positive_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer, got {value!r} of type {type(value).__name__}.")
    if value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value}. It is the number of rows embedded at once.")
