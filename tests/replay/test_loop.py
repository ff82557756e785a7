"""The replay loop: equally many replays on every rank, one synchronising one, and errors that all ranks share."""

import pytest
import torch
from torch import nn

from st_cached_extras.distributed.engines import Engine
from st_cached_extras.distributed.world import World
from st_cached_extras.replay.cotangents import surrogate
from st_cached_extras.replay.loop import replay_mini_batches
from st_cached_extras.testing.thread_world import run_ranks


class CountingEngine(Engine):
    """An engine that writes down every backward."""

    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(2))
        self.backwards = []

    def backward(self, surrogate, *, last):
        self.backwards.append(last)
        super().backward(surrogate, last=last)


def run(counts, world):
    engine, ran = CountingEngine(), []

    def replay(last):
        ran.append(last)
        return [(engine.weight * 1.0, torch.ones(2))]

    replay_mini_batches([[replay] * counts[world.rank]], torch.tensor(0.5), engine=engine, world=world)
    return ran, engine


@pytest.mark.parametrize("counts", [[1, 4], [3, 3], [2, 5, 1]])
def test_short_ranks_replay_as_often_as_the_others_and_their_gradients_stay(counts):
    results, _ = run_ranks(len(counts), lambda world: run(counts, world))
    for count, (ran, engine) in zip(counts, results, strict=True):
        assert len(ran) == len(engine.backwards) == max(counts)
        assert ran == engine.backwards == [False] * (max(counts) - 1) + [True]
        assert engine.weight.grad.tolist() == [0.5 * count] * 2


def test_a_rank_without_replays_is_an_error_on_all_and_no_replays_anywhere_are_none():
    def without(world):
        with pytest.raises((RuntimeError, ValueError), match="No row of this rank reaches a trainable parameter"):
            run([2, 0], world)

    run_ranks(2, without)
    results, _ = run_ranks(2, lambda world: run([0, 0], world))
    assert all(ran == [] for ran, _ in results)


def test_several_features_of_one_mini_batch_are_injected_together():
    engine = CountingEngine()
    other = nn.Parameter(torch.zeros(2))
    pairs = [(engine.weight * 1.0, torch.ones(2)), (other * 2.0, torch.ones(2)), (torch.zeros(2), torch.ones(2))]
    replay_mini_batches([[lambda last: pairs]], torch.tensor(1.0), engine=engine, world=World())
    assert engine.backwards == [True]
    assert engine.weight.grad.tolist() == [1, 1] and other.grad.tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_scale_lifts_cotangents_that_half_precision_cannot_hold(dtype):
    features = torch.ones(2, dtype=dtype, requires_grad=True)
    surrogate(features, torch.full((2,), 2.0**-30), torch.tensor(2.0**20)).backward()
    assert features.grad.tolist() == [2.0**-10] * 2
