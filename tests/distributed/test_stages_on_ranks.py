"""Staged replay under every engine, against one process; an error in one rank's second pass."""

import pytest

from st_cached_extras.testing.ranks import RankFailure, run_on_ranks
from tests.distributed import stage_cases

CHANGE = 5e-6


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_accumulated_steps_of_uneven_rows_equal_one_process(engine):
    assert max(run_on_ranks(stage_cases.staged_generator, 2, engine)) <= CHANGE


def test_a_stage_that_changed_on_one_rank_is_named_on_all():
    ranks = run_on_ranks(stage_cases.break_parity_under_ddp, 2, collective_timeout=20)
    stages = ["decoder", "decoder", "generator", "before"]
    for messages in ranks:
        for message, stage in zip(messages, stages, strict=True):
            assert message.startswith("RankError") and "rank 1" in message and "ParityError" in message, message
            assert f"Stage {stage!r} computed something else" in message and "rank 0:" not in message


def test_a_stage_that_changed_on_one_rank_is_named_where_all_wait_in_every_mini_batch():
    with pytest.raises(RankFailure) as failure:
        run_on_ranks(stage_cases.break_parity, 2, "fsdp2", "decoder", 1, collective_timeout=15)
    ranks = str(failure.value).split("rank 1: Traceback")
    assert len(ranks) == 2
    assert all("because of rank 1: ParityError: Stage 'decoder'" in of_rank for of_rank in ranks), failure.value


def test_deepspeed_around_a_frozen_stage_is_refused():
    for message in run_on_ranks(stage_cases.refusal, 2):
        assert "Stage 'decoder' is frozen, and wrapped by DeepSpeed" in message
