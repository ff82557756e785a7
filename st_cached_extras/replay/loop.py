"""The second pass of every producer: each mini-batch with a graph, its cotangents injected, the last one synchronised.

One loop serves the losses and :class:`FeatureGradientReplay`: what differs is only how a mini-batch is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from tqdm.auto import tqdm

from st_cached_extras.distributed.engines import Engine
from st_cached_extras.distributed.world import RankError, World
from st_cached_extras.replay.cotangents import surrogate

Replay = Callable[[bool], list[tuple[Tensor, Tensor]]]
"""Runs one mini-batch again, given whether it is the last of its step: [(features with a graph, cotangents), ...]."""


def replay_mini_batches(
    groups: Sequence[Sequence[Replay]],
    scale: Tensor,
    *,
    engine: Engine,
    world: World,
    progress: tqdm | None = None,
) -> None:
    """Run every replay and inject its cotangents, one mini-batch alive at a time.

    Of every group, ranks with fewer mini-batches than others begin with replays of zero cotangents, so that all run
    equally many, and run the same part of the model at the same time. None begins its last, synchronising backward
    before all have come that far without an error.

    Args:
        groups: the mini-batches of this rank, those together that run the same part of the model; the last one of all
            must reach a trainable parameter.
        scale: scalar that multiplies every cotangent.
        engine: differentiates, and synchronises gradients with the last.
        world: the ranks that replay together.
        progress: a bar to move.
    """
    counts = world.max_counts([len(group) for group in groups])
    if not any(counts):
        return
    error, last, steps = None, [], []
    try:
        steps = _equally_many(groups, counts, engine)
    except ValueError as caught:
        error = caught
    world.raise_together(error)
    try:
        with engine.naming_failures():
            for replay, factor in steps[:-1]:
                _inject(replay(False), factor * scale, engine, last=False)
                if progress is not None and factor:
                    progress.update()
    except RankError:
        raise
    except Exception as caught:
        error = caught
    world.raise_together(error)  # before the last forward, because an engine may synchronise buffers in it
    replay, factor = steps[-1]
    try:
        with engine.naming_failures():
            last = replay(True)
    except RankError:
        raise
    except Exception as caught:
        error = caught
    world.raise_together(error)
    with engine.naming_failures():
        _inject(last, factor * scale, engine, last=True)


def _equally_many(
    groups: Sequence[Sequence[Replay]], counts: Sequence[int], engine: Engine
) -> list[tuple[Replay, float]]:
    """The replays, each with the factor of its cotangents, of which every rank has equally many of each group."""
    own = [replay for group in groups for replay in group]
    if not own:
        raise ValueError(
            "No row of this rank reaches a trainable parameter, and rows of other ranks do: gradients cannot be "
            "averaged. Mix the data, so that every rank's batch holds rows that train."
        )
    steps: list[tuple[Replay, float]] = []
    for index, count in enumerate(counts):
        group = groups[index] if index < len(groups) else []
        if count and not group and engine.shards:
            raise ValueError(
                f"Input column {index} of this rank reaches no trainable parameter, and that of other ranks does. "
                "Where parameters or gradients are sharded, all ranks must run the same parts of the model: mix the "
                "data, so that every rank's batch holds rows that train, or use DistributedDataParallel."
            )
        stand_in = group[-1] if group else own[-1]
        steps += [(stand_in, 0.0)] * (count - len(group))
        steps += [(replay, 1.0) for replay in group]
    return steps


def _inject(pairs: list[tuple[Tensor, Tensor]], scale: Tensor, engine: Engine, last: bool) -> None:
    surrogates = [surrogate(features, cotangent, scale) for features, cotangent in pairs if features.requires_grad]
    if surrogates:
        engine.backward(sum(surrogates[1:], surrogates[0]), last=last)
    elif engine.shards:
        raise ValueError(
            "A mini-batch reaches no trainable parameter, and others do. Where parameters or gradients are sharded, "
            "ranks would wait for each other: train all parts of the model that rows go through, or use "
            "DistributedDataParallel."
        )
    # Elsewhere, where only some rows reach a trainable parameter, a mini-batch may have none of them.
