"""Cached losses under FSDP2 and DeepSpeed, against the same steps in one process. One launch per engine."""

import math

import pytest

from st_cached_extras.testing.ranks import RankFailure, run_on_ranks
from tests.distributed import engine_cases
from tests.distributed.engine_cases import UNEVEN, Case

PARAMETERS, CHANGE, BF16 = 1e-6, 2e-5, 5e-2
DEFERRED = {"mini_batch_size": 3, "defer_reduction": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SELECTED = {"mini_batch_size": 3, "differentiated_samples": 4}
BUDGET = {"mini_batch_num_tokens": 40}

CASES: dict[str, Case] = {
    "fsdp2 even": Case("fsdp2"),
    "fsdp2 accumulated, deferred": Case("fsdp2", rows=UNEVEN, accumulation=2, family="sigmoid", loss=DEFERRED),
    "fsdp2 selected, LoRA": Case("fsdp2", rows=UNEVEN, gather=False, loss=SELECTED, variant="lora"),
    "fsdp2 towers, deferred": Case("fsdp2", rows=UNEVEN, towers="both", family="composite", loss=DEFERRED),
    "fsdp2 frozen tower": Case("fsdp2", rows=UNEVEN, towers="frozen", family="cosent"),
    "zero1 accumulated": Case("zero1", rows=UNEVEN, accumulation=2, family="supcon", loss=BUDGET),
    "zero2 accumulated, checkpointing": Case("zero2", rows=UNEVEN, accumulation=2, variant="checkpointing"),
    "zero2 deferred": Case("zero2", rows=UNEVEN, towers="both", loss=DEFERRED),
    "zero2 overlapped": Case(
        "zero2", rows=UNEVEN, gather=False, family="composite", loss=BUDGET, options={"overlap_comm": True}
    ),
    "zero3 accumulated": Case("zero3", rows=UNEVEN, accumulation=2, family="sigmoid"),
    "zero3 deferred, checkpointing": Case(
        "zero3", rows=UNEVEN, family="cosent", loss=DEFERRED, variant="checkpointing"
    ),
    "zero3 selected, LoRA": Case("zero3", rows=UNEVEN, gather=False, loss=SELECTED, variant="lora"),
    "zero3 towers": Case("zero3", rows=UNEVEN, towers="both", family="composite"),
    "zero3 offloaded, deferred": Case("zero3", rows=UNEVEN, towers="both", loss=DEFERRED, options=OFFLOAD),
}

REDUCTIONS_OF_A_STEP = {
    "fsdp2 even": "every mini-batch",
    "fsdp2 accumulated, deferred": "once",
    "zero1 accumulated": "once",
    "zero2 accumulated, checkpointing": "every mini-batch",
    "zero3 accumulated": "every mini-batch",
    "zero3 deferred, checkpointing": "once",
}


def of_engine(engine):
    return {name: case for name, case in CASES.items() if case.engine == engine}


ENGINES = ("fsdp2", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def of_engines():
    """What every rank answered, by engine."""
    return {engine: run_on_ranks(engine_cases.check_engine, 2, engine, of_engine(engine)) for engine in ENGINES}


@pytest.fixture(scope="module")
def results(of_engines):
    """Every rank's results by case."""
    ranks = [{}, {}]
    for answers in of_engines.values():
        for found, answer in zip(ranks, answers, strict=True):
            found.update(answer["cases"])
    return ranks


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_one_process(results, name):
    for of_rank in results:
        found = of_rank[name]
        assert found["parameters"][0] <= PARAMETERS, found
        assert max(found["change"] + found["own change"]) <= CHANGE, (
            found
        )  # the second step begins where rounding left the first
        assert found["engine"] == ("FSDP2Engine" if name.startswith("fsdp2") else "ZeROEngine")
    assert results[0][name]["checksum"] == results[1][name]["checksum"]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_its_share_of_the_parameters(results, name):
    expected = 0.5 if CASES[name].engine in ("fsdp2", "zero3") else 1.0
    assert all(of_rank[name]["share"] == pytest.approx(expected, abs=0.01) for of_rank in results)


@pytest.mark.parametrize("name", REDUCTIONS_OF_A_STEP)
def test_gradients_are_reduced_for_every_mini_batch_or_once(results, name):
    case, counted = CASES[name], results[0][name]["reductions"]
    size = case.loss.get("mini_batch_size", 0)
    mini_batches = 2 * math.ceil(max(case.rows[:2]) / size) if size else None
    for of_batch in counted[case.accumulation - 1 :: case.accumulation]:
        number = of_batch.get("reduce_scatter_single") or of_batch["all_reduce"]
        once = 3 if case.engine == "fsdp2" else 4  # modules that are sharded; buckets
        assert number == (once if REDUCTIONS_OF_A_STEP[name] == "once" else once * mini_batches)


@pytest.mark.parametrize("engine", ENGINES)
def test_feature_collectives_do_not_grow_with_the_number_of_mini_batches(of_engines, engine):
    for answer in of_engines[engine]:
        counts = answer["collectives"]
        assert counts[2] == counts[5] == counts[64] == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_in_bf16_equals_one_process_within_its_noise(of_engines, engine):
    for answer in of_engines[engine]:
        assert answer["bf16"] <= BF16
        assert answer["bf16 mutant"] > 0.4  # a half of the gradient is missing


def test_what_would_be_wrong_is_refused_on_all_ranks():
    for towers, first_version, stage_0 in run_on_ranks(engine_cases.refusals, 2):
        assert "RankError" in towers and "Set defer_reduction=True" in towers
        assert "ValueError" in first_version and "fsdp_version: 2" in first_version
        assert "ValueError" in stage_0 and "ZeRO stage 0" in stage_0


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
@pytest.mark.parametrize("broken", ["rows", "embeddings", "producer"])
def test_an_error_on_one_rank_is_raised_on_all_and_names_it(engine, broken):
    with pytest.raises(RankFailure) as failure:
        run_on_ranks(engine_cases.fail_on_one_rank, 2, engine, broken, collective_timeout=15)
    cause = {
        "rows": "rank 1: ValueError: Every input column must hold the same positive number of rows",
        "embeddings": "rank 1: NonFiniteFeaturesError",
        "producer": "rank 1: OutOfMemoryError: no room for this mini-batch",
    }[broken]
    ranks = str(failure.value).split("rank 1: Traceback")
    assert len(ranks) == 2
    assert all("RankError: Training stopped" in of_rank and f"because of {cause}" in of_rank for of_rank in ranks)


def test_a_generator_under_an_engine_equals_one_process():
    for engine in ("fsdp2", "zero2", "zero3"):
        for found in run_on_ranks(engine_cases.replay_protocol, 2, engine):
            assert found <= CHANGE, (engine, found)
