"""The two passes over a batch: every mini-batch without a graph, later each with one and with its cotangents injected.

Both must compute the same numbers, so what a forward depends on besides inputs and weights, the random state and
autocast, is captured around the first and restored around the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor
from tqdm.auto import tqdm

from st_cached_extras.distributed.engines import Engine
from st_cached_extras.distributed.world import RankError, World
from st_cached_extras.levers import LEVERS
from st_cached_extras.replay.axes import to_device
from st_cached_extras.replay.columns import Column
from st_cached_extras.replay.embedding_rows import embedding_gradients_by_rows
from st_cached_extras.replay.loop import replay_mini_batches


class NonFiniteFeaturesError(ValueError):
    """Embeddings with NaN or infinity; the message names the column and the rows."""


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


class Passes:
    """Both passes of one forward and its backward.

    Args:
        engine: runs the model and knows when gradients are synchronised.
        extract: the features [n, D] in the model's outputs for a mini-batch.
        world: the ranks that must run equally many mini-batches and fail together.
        show_progress_bar: show one bar per pass.
    """

    def __init__(
        self, engine: Engine, extract: Callable[[Mapping[str, Any]], Tensor], world: World, show_progress_bar: bool
    ) -> None:
        self._engine = engine
        self._extract = extract
        self._world = world
        self._show_progress_bar = show_progress_bar
        # Engines that reduce gradients wait for autograd to hand them each one.
        self._is_plain = type(engine) is Engine
        parameter = next(engine.model.parameters(), None)
        self._autocast = AutocastState.capture(torch.device("cpu") if parameter is None else parameter.device)

    @torch.no_grad()
    def collect(self, columns: Sequence[Column], with_replay: bool, kept_graphs: float = 0.0) -> None:
        """First pass: embed every mini-batch, each embedding written once, in row order.

        Args:
            columns: filled with embeddings and, with a replay to come, random states.
            with_replay: whether a backward will replay the mini-batches.
            kept_graphs: share of the mini-batches, the first ones of the plan, that run with a graph which the
                second pass uses instead of running them again.

        Raises:
            NonFiniteFeaturesError: on every rank (there as a :class:`RankError`) if any embedding is not finite.
        """
        counts = self._world.max_counts([len(column.plan) for column in columns])
        to_keep = round(kept_graphs * sum(column.differentiated for column in columns)) if with_replay else 0
        error = None
        try:
            with (
                self._engine.naming_failures(),
                self._embedding_gradients(),
                self._progress(sum(len(column.plan) for column in columns), "Collect") as progress,
            ):
                for column, count in zip_longest(columns, counts):
                    if column is None:  # other ranks have more columns
                        self._pad(columns[0], count)
                        continue
                    self._pad(column, count - len(column.plan))
                    kept_here = min(to_keep, column.differentiated)
                    self._collect_column(column, with_replay, kept_here, progress)
                    to_keep -= kept_here
            _check_finite(columns)
        except RankError:
            raise
        except Exception as caught:
            error = caught
        self._world.raise_together(error)

    def _pad(self, column: Column, count: int) -> None:
        """Keep ranks company that have ``count`` more mini-batches of this column: some engines wait for them."""
        for _ in range(count):
            self._engine.collect(column.rows.take(column.plan[0]))

    def _collect_column(self, column: Column, with_replay: bool, to_keep: int, progress: tqdm) -> None:
        before = None
        for index, rows in enumerate(column.plan):
            features = column.rows.take(rows)
            replayed = with_replay and index < column.differentiated
            if replayed and before is None:
                before = RandContext(*features.values())
            # Whether a mini-batch reaches a trainable parameter is autograd's to say, and not the parameters': towers
            # may be frozen, or train for some rows only. Mini-batches are run with a graph, to look, until one does.
            look = replayed and column.trainable is None
            with_graph = look or index < to_keep
            if with_graph:
                # Not with weights that autocast has already cast without a graph.
                torch.clear_autocast_cache()
            with torch.set_grad_enabled(with_graph):
                embeddings = self._extract(self._engine.collect(features))
            if index == 0:
                column.embeddings = _row_buffer(column.rows.count, embeddings)
            column.embeddings.index_copy_(
                0, to_device(rows, embeddings.device), embeddings.detach().to(column.embeddings.dtype)
            )
            if look and embeddings.requires_grad:
                column.trainable = index
            if index < to_keep and embeddings.requires_grad:
                column.kept[index] = embeddings
            if replayed:
                after = RandContext(*features.values())
                drew = not _same_state(before, after)
                column.random_states.append(before if drew else None)
                before = after if drew else before
            progress.update()
        # Nor may such weights serve whatever the caller computes next under the same autocast.
        torch.clear_autocast_cache()

    @torch.enable_grad()
    def replay(self, columns: Sequence[Column], cotangents: Sequence[Tensor], grad_output: Tensor) -> None:
        """Second pass: embed every mini-batch with a graph and inject its cotangents; frozen columns not at all.

        Args:
            columns: as :meth:`collect` left them.
            cotangents: per column, d loss / d embeddings [B, D].
            grad_output: scalar that multiplies every cotangent.
        """
        groups = []
        for column, cotangent in zip(columns, cotangents, strict=True):
            if column.trainable is None:
                groups.append([])
                continue
            replays = [partial(self._embed_again, column, index, cotangent) for index in range(column.differentiated)]
            # The last backward synchronises the gradients, so it must have some: those of the mini-batch that is
            # known to be trainable.
            replays.append(replays.pop(column.trainable))
            groups.append(replays)
        with self._embedding_gradients(), self._progress(sum(map(len, groups)), "Replay") as progress:
            replay_mini_batches(groups, grad_output, engine=self._engine, world=self._world, progress=progress)

    def _embed_again(self, column: Column, index: int, cotangent: Tensor, last: bool) -> list[tuple[Tensor, Tensor]]:
        rows = column.plan[index]
        embeddings = column.kept.pop(index, None)
        if embeddings is None:
            features = column.rows.take(rows)
            with column.random_states[index] or nullcontext(), self._autocast.restore():
                embeddings = self._extract(self._engine.replay(features, last=last))
        return [(embeddings, cotangent.index_select(0, to_device(rows, cotangent.device)))]

    def _embedding_gradients(self) -> AbstractContextManager[None]:
        by_rows = self._is_plain and LEVERS.embedding_rows
        return embedding_gradients_by_rows(self._engine.model) if by_rows else nullcontext()

    def _progress(self, total: int, description: str) -> tqdm:
        return tqdm(total=total, desc=f"{description} mini-batches", disable=not self._show_progress_bar, leave=False)


def _same_state(first: RandContext, second: RandContext) -> bool:
    """Whether no random number was drawn between two snapshots on the same devices."""
    pairs = [(first.fwd_cpu_state, second.fwd_cpu_state), (first.fwd_mps_state, second.fwd_mps_state)]
    pairs += zip(first.fwd_gpu_states, second.fwd_gpu_states, strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def _row_buffer(count: int, embeddings: Tensor) -> Tensor:
    """Room for the embeddings of all rows. Their cotangents have the same dtype, so fp16, below whose range they may
    fall, is widened; bf16, which has the range of fp32, stays as it is until a chunk of scores is computed."""
    stays = embeddings.dtype == torch.bfloat16
    dtype = embeddings.dtype if stays else torch.promote_types(embeddings.dtype, torch.float32)
    return torch.empty((count, *embeddings.shape[1:]), dtype=dtype, device=embeddings.device)


def _check_finite(columns: Sequence[Column]) -> None:
    # One host synchronisation in the good case: a sum is non-finite whenever a term is.
    if torch.stack([column.embeddings.sum() for column in columns]).isfinite().all():
        return
    bad_rows = {
        column.name: (~column.embeddings.isfinite().flatten(1).all(dim=1)).nonzero().flatten().tolist()
        for column in columns
    }
    if found := "; ".join(f"column {name}: row(s) {_abbreviated(rows)}" for name, rows in bad_rows.items() if rows):
        raise NonFiniteFeaturesError(
            f"The model's embeddings contain NaN or infinity ({found}). Look at these rows of the batch, lower the "
            "learning rate, or train in bf16 or fp32 if fp16 overflows."
        )


def _abbreviated(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:8]))
    return f"{shown}, ... ({len(rows)} in all)" if len(rows) > 8 else shown
