"""On two ranks: gradients are equal, queries are counted exactly, and each rank has its own probes."""

import pytest

from st_cached_extras.testing.ranks import run_on_ranks
from tests.zbp import ranks


@pytest.mark.parametrize(
    ("mode", "control", "each"), [("cd", None, 6), ("cd", "fit", 8), ("fd", None, 4), ("jvp", None, 3)]
)
def test_gradients_are_equal_on_both_ranks_and_queries_exact(mode, control, each):
    first, second = run_on_ranks(ranks.step_under_ddp, 2, mode, control, False)
    assert first["checksum"] == second["checksum"]
    assert max(first["error"], second["error"]) <= 1e-6
    assert first["ranks differ"] > 1e-3, "ranks with equal gradients prove nothing"
    assert first["stats"] == second["stats"]  # summed over ranks
    assert first["stats"]["queries"] == 2 * 2 * each  # two ranks, two columns
    assert first["stats"]["backward_calls"] == 4


def test_a_cached_loss_replays_through_the_estimates():
    first, second = run_on_ranks(ranks.step_under_ddp, 2, "cd", None, True)
    assert first["checksum"] == second["checksum"]
    assert max(first["error"], second["error"]) <= 1e-6
    assert first["stats"]["queries"] == 2 * 2 * 2 * 6  # two mini-batches a column


def test_ranks_draw_their_own_probes():
    first, second = run_on_ranks(ranks.probes_of_ranks, 2)
    assert len(first) == len(second) and first != second


def test_layers_sharded_by_fsdp2_get_the_gradients_of_whole_ones():
    for found in run_on_ranks(ranks.step_under_fsdp, 2):
        assert found["share"] == pytest.approx(0.5, abs=0.05)
        assert found["error"] <= 1e-5 and found["queries"] == 6
