"""EncoderBalance: who gets weight and how much, floors from real data, and its state."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from st_cached_extras.objectives.mmd import EncoderBalance, MultiEncoderMMD, NystromReference

FLOORS = {"a": 0.1, "b": 0.2, "c": 0.3}


def test_the_weights_are_a_softmax_of_the_excess_over_the_mean_excess():
    balance = EncoderBalance(FLOORS, temperature=0.5)
    weights = balance.update({"a": 0.2, "b": 0.5, "c": 0.5})
    powers = [math.exp(x / (0.5 * 0.2)) for x in (0.1, 0.3, 0.2)]
    assert list(weights.values()) == pytest.approx([3 * power / sum(powers) for power in powers])
    scaled = EncoderBalance({name: 7 * floor for name, floor in FLOORS.items()}, temperature=0.5)
    assert scaled.update({"a": 1.4, "b": 3.5, "c": 3.5}) == pytest.approx(weights)


def test_satisfied_encoders_get_nothing_and_the_total_stays():
    balance = EncoderBalance(FLOORS, total=5.0, ema=0.0)
    weights = balance.update({"a": 0.05, "b": 0.4, "c": 0.3})
    assert weights == pytest.approx({"a": 0.0, "b": 5.0, "c": 0.0})
    assert balance.update(dict.fromkeys(FLOORS, 0.0)) == pytest.approx(dict.fromkeys(FLOORS, 5 / 3))


def test_the_temperature_follows_the_violators_alone():
    weights = EncoderBalance(FLOORS, temperature=0.5).update({"a": 0.2, "b": 0.5, "c": 0.1})
    powers = [math.exp(x / (0.5 * 0.2)) for x in (0.1, 0.3)]
    assert list(weights.values()) == pytest.approx([3 * power / sum(powers) for power in powers] + [0.0])


def test_huge_excesses_do_not_overflow():
    weights = EncoderBalance(FLOORS, temperature=1e-3).update({"a": 1e6, "b": 1.0, "c": 1.0})
    assert weights == pytest.approx({"a": 3.0, "b": 0.0, "c": 0.0})


def test_scores_are_averaged_over_updates_and_come_as_metrics_too():
    balance, other = EncoderBalance(FLOORS, ema=0.75), EncoderBalance(FLOORS)
    balance.update({"mmd/a": torch.tensor(0.5), "mmd/b": torch.tensor(0.5), "mmd/c": torch.tensor(0.5)})
    weights = balance.update({"a": 0.9, "b": 0.5, "c": 0.5})
    assert weights == pytest.approx(other.update({"a": 0.6, "b": 0.5, "c": 0.5}))


def test_its_state_goes_on_where_it_stopped():
    balance, resumed = EncoderBalance(FLOORS), EncoderBalance(FLOORS)
    resumed.load_replay_state(balance.replay_state())
    assert resumed.weights == dict.fromkeys(FLOORS, 1.0)
    balance.update({"a": 0.5, "b": 0.4, "c": 0.9})
    resumed.load_replay_state(copy.deepcopy(balance.replay_state()))
    scores = {"a": 0.2, "b": 0.9, "c": 0.4}
    assert resumed.update(scores) == balance.update(scores)


def test_floors_are_what_held_out_real_data_score():
    generator = torch.Generator().manual_seed(0)
    reference = NystromReference.fit(torch.randn(500, 4, generator=generator), landmarks=100)
    mmd = MultiEncoderMMD({"x": reference})
    batches = [{"x": torch.randn(50, 4, generator=generator)} for _ in range(40)]
    balance = EncoderBalance.from_real_data(mmd, batches, temperature=3.0)
    expected = (1 - reference.k_rr[0]) / 50
    assert balance.floors["x"] == pytest.approx(expected, rel=0.3) and balance.temperature == 3.0
    shifted = mmd.value_and_cotangents({"x": batches[0]["x"] + 1}).metrics["mmd/x"]
    assert shifted > 3 * balance.floors["x"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(floors={}), ["floors", "one or more"]),
        (dict(floors={"a": math.nan}), ["floors", "nan"]),
        (dict(total=0.0), ["total", "0.0", "positive"]),
        (dict(temperature=-1.0), ["temperature", "-1.0"]),
        (dict(ema=1.0), ["ema", "1.0", "not including 1"]),
    ],
)
def test_bad_options_say_what_was_found_expected_and_the_way_out(options, words):
    with pytest.raises(ValueError) as caught:
        EncoderBalance(**({"floors": FLOORS} | options))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("scores", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": math.nan}])
def test_missing_or_non_finite_scores_are_named_and_change_nothing(scores):
    balance = EncoderBalance(FLOORS)
    with pytest.raises(ValueError, match="scores: missing or not finite for c"):
        balance.update(scores)
    assert balance.weights == dict.fromkeys(FLOORS, 1.0)
