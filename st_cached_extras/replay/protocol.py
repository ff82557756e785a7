"""Feature-gradient replay for any producer of features: a video generator, a custom loop, several frozen encoders.

The producer runs twice. Without a graph it fills a batch (:meth:`FeatureGradientReplay.add`); the objective is derived
with respect to the features alone (:meth:`~FeatureGradientReplay.finalize`); then only the mini-batches with selected
rows run again, with a graph, and receive their cotangents (:meth:`~FeatureGradientReplay.replay`). Memory is that of
one mini-batch, and of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from st_cached_extras.distributed.engines import Engine, engine_of
from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective
from st_cached_extras.replay.collection import Collection, to_cpu
from st_cached_extras.replay.loop import replay_mini_batches
from st_cached_extras.replay.selection import draw_rows

Selection = Literal["rows", "mini_batches", "suffix"]
SELECTIONS = ("rows", "mini_batches", "suffix")


class ReplayStateError(RuntimeError):
    """A call in the wrong state; nothing has changed."""


class MiniBatchError(RuntimeError):
    """A producer failed while it ran a mini-batch again; the message names the mini-batch, the cause is attached."""


@dataclass(frozen=True)
class FeatureGradientReplayResult:
    """What :meth:`FeatureGradientReplay.finalize` found.

    Attributes:
        loss: scalar, the objective over all ranks.
        optimized_loss: ``loss`` x loss_scale, whose gradient the replay injects.
        local_cotangents: per entry of ``replay_batch_indices``, d loss / d features of that mini-batch by branch, zero
            where a row is not selected; without selection weight, world factor and loss scale.
        parameter_cotangents: d loss / d parameter of the objective's own parameters, by name.
        selection_weight: B/b, or M/m where whole mini-batches are drawn: keeps the expected gradient right.
        world_factor: number of ranks, because engines average gradients over them.
        loss_scale: as given.
        replay_batch_indices: the mini-batches to run again, as :meth:`FeatureGradientReplay.add` numbered them.
        replay_sample_ids: their sample ids, one tuple per mini-batch; empty without ids.
        local_samples, global_samples: rows of this rank and of all.
        differentiated_samples: selected rows of this rank.
        reference_samples: current-reference rows of this rank.
        world_size: number of ranks.
        metrics: what the objective says of itself, detached scalars by name.
        metadata: all of the numbers above and the selection's seed and step, as plain numbers and strings.
    """

    loss: Tensor
    optimized_loss: Tensor
    local_cotangents: tuple[dict[str, Tensor], ...]
    parameter_cotangents: dict[str, Tensor]
    selection_weight: float
    world_factor: int
    loss_scale: float
    replay_batch_indices: tuple[int, ...]
    replay_sample_ids: tuple[tuple[str, ...], ...]
    local_samples: int
    global_samples: int
    differentiated_samples: int
    reference_samples: int
    world_size: int
    metrics: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def cotangent_factor(self) -> float:
        """Selection weight x world factor x loss scale."""
        return self.selection_weight * self.world_factor * self.loss_scale

    @property
    def synchronized_cotangents(self) -> tuple[dict[str, Tensor], ...]:
        """``local_cotangents`` x ``cotangent_factor``: a trainer whose engine averages over ranks multiplies nothing
        more. Computed anew at each access."""
        factor = self.cotangent_factor
        return tuple({name: factor * x for name, x in of_batch.items()} for of_batch in self.local_cotangents)


class FeatureGradientReplay:
    """The replay protocol as an object: collecting → finalized → (commit or discard) → collecting again, empty.

    A call in the wrong state raises :class:`ReplayStateError` and changes nothing; so does anything that fails: a
    mini-batch that does not fit is not added, and a replay that a producer's error interrupted can be run again
    (after zeroing the gradients).

    Args:
        objective: what is computed from the features of all ranks together.
        target_local_samples: B, rows of this rank's batch.
        differentiated_local_samples: b, rows of it that are differentiated, 1 to B.
        loss_scale: multiplies the injected gradient.
        selection: which rows: "rows" draws them anew for every batch, uniformly; "suffix" takes the last b, which is
            right only if the producer's order is random; "mini_batches" draws whole mini-batches, about b/B of them.
            Masks given to :meth:`add` replace either.
        require_sample_id_alignment: with a reference, demand sample ids of both sides, in step.
        seed: seed of the draws, which depend on it, on the number of committed batches and on the rank.
        process_group: the ranks of the objective; None for all.

    Attributes:
        selected_rows: int64 [b] ascending, known before the first :meth:`add`, so that a producer can plan; None for
            "mini_batches".
        step: committed batches.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        target_local_samples: int,
        differentiated_local_samples: int,
        loss_scale: float = 1.0,
        selection: Selection = "rows",
        require_sample_id_alignment: bool = True,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (
            ("target_local_samples", target_local_samples),
            ("differentiated_local_samples", differentiated_local_samples),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a number of rows, got {value!r} of type {type(value).__name__}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1 row, got {value}.")
        if differentiated_local_samples > target_local_samples:
            raise ValueError(
                f"differentiated_local_samples must be at most target_local_samples, got "
                f"{differentiated_local_samples} of {target_local_samples}."
            )
        if selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {SELECTIONS}, got {selection!r}.")
        self.objective = objective
        self.target_local_samples = target_local_samples
        self.differentiated_local_samples = differentiated_local_samples
        self.loss_scale = loss_scale
        self.selection = selection
        self.require_sample_id_alignment = require_sample_id_alignment
        self.seed = seed
        self.step = 0
        self.world = World.current(process_group)
        self._begin()

    def _begin(self) -> None:
        self._result: FeatureGradientReplayResult | None = None
        self._collection = Collection(
            self.objective,
            self.target_local_samples,
            self.differentiated_local_samples,
            self.require_sample_id_alignment,
        )
        self.selected_rows: Tensor | None = None
        if self.selection == "suffix":
            first = self.target_local_samples - self.differentiated_local_samples
            self.selected_rows = torch.arange(first, self.target_local_samples)
        elif self.selection == "rows":
            self.selected_rows = self._draw(self.target_local_samples, self.differentiated_local_samples)

    def _draw(self, count: int, drawn: int) -> Tensor:
        return draw_rows(count, drawn, seed=self.seed, step=self.step, rank=self.world.rank)

    # ------------------------------------------------------------------------------------------- first pass

    def add(
        self,
        features: Mapping[str, Tensor],
        reference_features: Mapping[str, Tensor] | None = None,
        *,
        selected: Tensor | None = None,
        sample_ids: Sequence[str] | None = None,
        reference_sample_ids: Sequence[str] | None = None,
    ) -> int:
        """Add the features of one mini-batch; copied, detached.

        Args:
            features: by branch, [n, ...] each, the same n, device and floating-point dtypes; finite.
            reference_features: current-reference features of the same branches, [t, ...], if the objective uses them.
            selected: bool [n], which of these rows are differentiated, in place of the constructor's selection; for
                all mini-batches of a batch or for none.
            sample_ids: one id per row.
            reference_sample_ids: one id per reference row.

        Returns:
            The mini-batch's index, which :meth:`replay` hands back to its function.

        Raises:
            ReplayStateError: the batch is finalized.
            TypeError, ValueError: the mini-batch does not fit; the message names the branch, and nothing was added.
        """
        self._expect("add", finalized=False)
        return self._collection.add(features, reference_features, selected, sample_ids, reference_sample_ids)

    def finalize(self) -> FeatureGradientReplayResult:
        """Evaluate the objective on the whole batch of all ranks. A second call returns the same object.

        Raises:
            ValueError: the batch is not complete (on several ranks a :class:`RankError` on all, naming ranks).
        """
        if self._result is not None:
            return self._result
        collection, error = self._collection, None
        try:
            collection.check_complete()
            batches, rows, weight = self._select(collection)
        except ValueError as caught:
            error = caught
        self.world.raise_together(error)

        result = self.objective.value_and_cotangents(
            collection.features,
            reference=collection.reference,
            # On all ranks or on none: objectives gather them.
            rows=rows.to(collection.device) if self.world.agree(len(rows) < collection.count) else None,
            world=self.world,
        )
        cotangents = collection.per_mini_batch(result.cotangents, rows, batches)
        counts = self.world.row_counts(collection.count)
        metadata = {
            "loss": float(result.loss),
            "optimized_loss": float(result.loss) * self.loss_scale,
            "selection": "mask" if collection.has_masks else self.selection,
            "selection_seed": self.seed,
            "selection_step": self.step,
            "selection_weight": weight,
            "world_factor": self.world.size,
            "world_size": self.world.size,
            "loss_scale": self.loss_scale,
            "local_samples": collection.count,
            "global_samples": sum(counts),
            "differentiated_samples": len(rows),
            "reference_samples": collection.reference_count,
        }
        self._result = FeatureGradientReplayResult(
            loss=result.loss,
            optimized_loss=result.loss * self.loss_scale,
            local_cotangents=cotangents,
            parameter_cotangents=result.parameter_cotangents,
            selection_weight=weight,
            world_factor=self.world.size,
            loss_scale=self.loss_scale,
            replay_batch_indices=batches,
            replay_sample_ids=tuple(collection.sample_ids[batch] for batch in batches) if collection.has_ids else (),
            local_samples=collection.count,
            global_samples=sum(counts),
            differentiated_samples=len(rows),
            reference_samples=collection.reference_count,
            world_size=self.world.size,
            metrics=result.metrics,
            metadata=metadata,
        )
        return self._result

    def _select(self, collection: Collection) -> tuple[tuple[int, ...], Tensor, float]:
        """The mini-batches to replay, the differentiated rows, and their weight."""
        if self.selection == "mini_batches" and not collection.has_masks:
            number = len(collection.bounds)
            drawn = max(1, round(number * self.differentiated_local_samples / self.target_local_samples))
            batches = tuple(self._draw(number, drawn).tolist())
            rows = torch.cat([torch.arange(*collection.bounds[batch]) for batch in batches])
            return batches, rows, number / drawn
        rows = collection.masked_rows() if collection.has_masks else self.selected_rows
        return collection.mini_batches_of(rows), rows, collection.count / len(rows)

    # ------------------------------------------------------------------------------------------ second pass

    def replay(self, fn: Callable[[int], Mapping[str, Tensor]], *, model: nn.Module | None = None) -> None:
        """Run the selected mini-batches again, with a graph, and inject their cotangents.

        Args:
            fn: given the index of a mini-batch, returns the same features as were added, with a graph. Whatever random
                numbers it uses must be those of the first pass.
            model: the module whose gradients are synchronised over ranks (e.g. the one that DDP wraps), so that they
                are once, with the last mini-batch; None if nothing wraps it, or the caller sees to it.

        Raises:
            ReplayStateError: the batch is not finalized.
            MiniBatchError: ``fn`` failed, or its features do not fit those added; the cause is attached.
        """
        self._expect("replay", finalized=True)
        result = self._result
        engine = Engine(self.objective) if model is None else engine_of(model)
        replays = [
            partial(self._run_again, fn, engine, batch, cotangents)
            for batch, cotangents in zip(result.replay_batch_indices, result.local_cotangents, strict=True)
        ]
        with torch.enable_grad():
            scale = torch.tensor(result.cotangent_factor, dtype=result.loss.dtype, device=self._collection.device)
            replay_mini_batches([replays], scale, engine=engine, world=self.world)
        parameters = dict(self.objective.named_parameters())
        for name, cotangent in result.parameter_cotangents.items():
            gradient = (cotangent * self.loss_scale).to(parameters[name])
            torch.autograd.backward(parameters[name], gradient)

    def _run_again(
        self,
        fn: Callable[[int], Mapping[str, Tensor]],
        engine: Engine,
        batch: int,
        cotangents: Mapping[str, Tensor],
        last: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        try:
            with engine.deferring(last):
                features = fn(batch)
            self._collection.check_replayed(features, batch)
        except Exception as error:
            raise MiniBatchError(
                f"Mini-batch {batch} could not be run again: {type(error).__name__}: {error}. The batch is still "
                "there: zero the gradients and replay it, or discard it."
            ) from error
        return [(features[name], x.to(features[name].device, non_blocking=True)) for name, x in cotangents.items()]

    # --------------------------------------------------------------------------------------------- the rest

    def offload_to_cpu(self) -> None:
        """Move features and cotangents to the CPU, into pinned memory where there is an accelerator. All or nothing.

        The objective computes where the features lie, so call it between :meth:`finalize` and :meth:`replay`.
        """
        collection, result = self._collection.on_cpu(), self._result
        if result is not None:
            moved = tuple({name: to_cpu(x) for name, x in of_batch.items()} for of_batch in result.local_cotangents)
            result = replace(result, local_cotangents=moved)
        if self._collection.count and self._collection.device.type != "cpu":
            torch.accelerator.synchronize()  # the copies run on their own: nobody may read before they are done
        self._collection, self._result = collection, result

    def commit(self) -> None:
        """The batch is done: count it, and begin the next, with another draw."""
        self._expect("commit", finalized=True)
        self.step += 1
        self._begin()

    def discard(self) -> None:
        """Drop the batch, finalized or not, and begin again with the same draw."""
        self._begin()

    def replay_state(self) -> dict[str, Tensor]:
        """What a resumed run needs to draw the rows that an uninterrupted one would."""
        return {"step": torch.tensor(self.step)}

    def load_replay_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`replay_state` returned. Only while nothing is collected."""
        if self._collection.count or self._result is not None:
            raise ReplayStateError("load_replay_state wants an empty batch: commit or discard this one first.")
        self.step = int(state["step"])
        self._begin()

    def _expect(self, call: str, *, finalized: bool) -> None:
        if (self._result is not None) != finalized:
            found, way = (
                ("finalized", "commit() or discard() it first")
                if not finalized
                else ("still being collected", "finalize() it first")
            )
            raise ReplayStateError(f"{call}() is not possible: the batch is {found}; {way}.")
