"""Cached losses under DistributedDataParallel, against the same step in one process. One launch per world size."""

import pytest

from st_cached_extras.testing.ranks import run_on_ranks
from tests.distributed import ddp_cases

PARAMETERS, CHANGE = 1e-6, 2e-5


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def results(request):
    return run_on_ranks(ddp_cases.check_cases, request.param, list(ddp_cases.CASES))


@pytest.mark.parametrize("case", ddp_cases.CASES)
def test_a_step_equals_one_process(results, case):
    for of_rank in results:
        found = of_rank[case]
        assert found["parameters"] <= PARAMETERS, found
        assert found["change"] <= CHANGE, found
        assert found["loss"] <= 1e-5 and found["loss spread"] <= 1e-6, found


@pytest.mark.parametrize("case", ddp_cases.CASES)
def test_ranks_hold_equal_parameters(results, case):
    assert len({of_rank[case]["checksum"] for of_rank in results}) == 1


@pytest.mark.parametrize("case", [name for name, case in ddp_cases.CASES.items() if "static_graph" not in case.ddp])
def test_gradients_are_reduced_once_a_step(results, case):
    assert all(of_rank[case]["reductions"] == 1 for of_rank in results)


def test_without_the_world_factor_or_with_it_where_it_does_not_belong_the_step_is_wrong():
    for without, always in run_on_ranks(ddp_cases.check_mutants, 2):
        assert without == pytest.approx(0.5, abs=1e-3) and always == pytest.approx(1.0, abs=1e-3)


def test_feature_collectives_do_not_grow_with_the_number_of_mini_batches():
    for counts in run_on_ranks(ddp_cases.count_collectives, 2):
        assert counts["features"][2] == counts["features"][5] == counts["features"][64]
        assert counts["features"][2] == {"all_gather": 1, "reduce_scatter": 1}
        assert counts["plain reductions"] == 1


def test_an_error_on_one_rank_is_raised_on_all_and_training_goes_on():
    for embeddings, rows, producer, replay in run_on_ranks(ddp_cases.check_errors, 2):
        assert "RankError" in embeddings and "rank 1: NonFiniteFeaturesError" in embeddings and "row(s)" in embeddings
        assert "rank 1: ValueError: Every input column must hold the same positive number of rows" in rows
        assert "rank 1: OutOfMemoryError: no room for this mini-batch" in producer
        assert "rank 1: OutOfMemoryError: no room for this mini-batch" in replay


def test_ranks_whose_losses_differ_are_named():
    for message in run_on_ranks(ddp_cases.check_disagreement, 2):
        assert "RankError" in message and "rank 0" in message and "rank 1" in message and "scale=21.0" in message


def test_an_evaluation_of_local_losses_waits_for_nobody():
    first, second = run_on_ranks(ddp_cases.local_evaluation_on_one_rank, 2, collective_timeout=10)
    assert first > 0 and second is None


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_computes_its_own_rows_against_all_and_no_more(size):
    for counted, products in run_on_ranks(ddp_cases.count_operations, size):
        assert 0.99 * products <= counted <= 1.1 * products


def test_a_learned_scale_is_the_same_on_all_ranks_and_in_one_process():
    (first, truth), (second, _) = run_on_ranks(ddp_cases.train_the_scale, 2)
    assert first == second
    assert first == pytest.approx(truth, rel=1e-5)
    assert abs(first[-1] - 20.0) > 0.1


def test_two_losses_that_share_an_accumulated_step_each_average_their_own():
    for first, second, *truths in run_on_ranks(ddp_cases.two_losses_in_one_step, 2):
        assert [first, second] == pytest.approx(truths, rel=1e-4)


def test_an_error_where_no_mini_batch_is_run_is_raised_on_all_too():
    causes = ["no iterator here", "no to_features here", "no to_targets here", "No row of this rank"]
    for messages in run_on_ranks(ddp_cases.errors_between_collecting_and_replaying, 2):
        for message, cause in zip(messages, causes, strict=True):
            assert "RankError" in message and "rank 1" in message and cause in message, messages
