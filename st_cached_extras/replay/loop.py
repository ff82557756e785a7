"""The second pass of every producer: each mini-batch with a graph, its cotangents injected, the last one synchronised.

One loop serves the losses and :class:`FeatureGradientReplay`: what differs is only how a mini-batch is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from tqdm.auto import tqdm

from st_cached_extras.distributed.engines import Engine
from st_cached_extras.distributed.world import World
from st_cached_extras.replay.cotangents import surrogate

Replay = Callable[[bool], list[tuple[Tensor, Tensor]]]
"""Runs one mini-batch again, given whether it is the last of its step: [(features with a graph, cotangents), ...]."""


def replay_mini_batches(
    replays: Sequence[Replay], scale: Tensor, *, engine: Engine, world: World, progress: tqdm | None = None
) -> None:
    """Run every replay and inject its cotangents, one mini-batch alive at a time.

    Ranks with fewer mini-batches than others begin with replays of zero cotangents, so that all run equally many; and
    none begins its last, synchronising backward before all have come that far without an error.

    Args:
        replays: the mini-batches of this rank; the last one must reach a trainable parameter.
        scale: scalar that multiplies every cotangent.
        engine: differentiates, and synchronises gradients with the last.
        world: the ranks that replay together.
        progress: a bar to move.
    """
    most = world.max_count(len(replays))
    if not most:
        return
    error = None
    try:
        if not replays:
            raise ValueError(
                "No row of this rank reaches a trainable parameter, and rows of other ranks do: gradients cannot be "
                "averaged. Mix the data, so that every rank's batch holds rows that train."
            )
        for _ in range(most - len(replays)):
            _inject(replays[-1](False), 0.0 * scale, engine, last=False)
        for replay in replays[:-1]:
            _inject(replay(False), scale, engine, last=False)
            if progress is not None:
                progress.update()
    except Exception as caught:
        error = caught
    world.raise_together(error)  # before the last forward, because an engine may synchronise buffers in it
    last = []
    try:
        last = replays[-1](True)
    except Exception as caught:
        error = caught
    world.raise_together(error)
    _inject(last, scale, engine, last=True)


def _inject(pairs: list[tuple[Tensor, Tensor]], scale: Tensor, engine: Engine, last: bool) -> None:
    # Where only some rows reach a trainable parameter, a mini-batch may have none of them.
    surrogates = [surrogate(features, cotangent, scale) for features, cotangent in pairs if features.requires_grad]
    if surrogates:
        engine.backward(sum(surrogates[1:], surrogates[0]), last=last)
