"""Rows over ranks, on real gloo process groups: uneven counts, sums, agreement, errors and groups."""

import time

import pytest
import torch
import torch.distributed as dist

from st_cached_extras.distributed.world import ProcessGroupWorld, RankError, World
from st_cached_extras.testing.ranks import RankFailure, run_on_ranks


def rows_of(rank, count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 3, 2, generator=generator, dtype=torch.float64).to(dtype)


def check_rows(counts_per_case):
    world = World.current()
    results = []
    for counts in counts_per_case:
        counts = counts[: world.size]
        local = rows_of(world.rank, counts[world.rank])
        assert world.row_counts(len(local)) == counts
        assert world.max_count(len(local)) == max(counts)
        several = [len(local), world.rank, 7][: 3 - world.rank % 2]  # ranks with an odd number have one count less
        assert world.max_counts(several) == [max(counts), world.size - 1, 7]
        everyone = torch.cat([rows_of(rank, count) for rank, count in enumerate(counts)])
        assert torch.equal(world.gather_rows(local, counts), everyone)
        assert torch.equal(world.gather_rows(local[:, :, 0], counts), everyone[:, :, 0]), (
            "rows that are not contiguous are gathered too"
        )
        # Each rank contributes (rank + 1) times the same rows: their sum is known.
        own = world.reduce_scatter_rows(everyone * (world.rank + 1), counts)
        factor = sum(range(1, world.size + 1))
        begin = sum(counts[: world.rank])
        assert torch.allclose(own, factor * everyone[begin : begin + counts[world.rank]], rtol=1e-12)
        results.append(float(own.sum()))
    one = torch.ones(2)
    assert world.all_reduce(one).tolist() == [world.size] * 2 and one.tolist() == [1, 1]
    assert world.agree(world.rank == world.size - 1) and not world.agree(False)
    return results


def check_errors():
    world = World.current()
    world.raise_together(None)
    messages = []
    for failing in ({1}, {0, 1}):
        try:
            world.raise_together(ValueError(f"bad row {world.rank}") if world.rank in failing else None)
        except RankError as error:
            messages.append(str(error))
            assert isinstance(error.__cause__, ValueError) == (world.rank in failing)
    return messages


def check_groups():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    world = World.current(group)
    return world.size, world.rank, world.row_counts(10 * dist.get_rank())


def die_on_rank_one():
    world = ProcessGroupWorld()
    if world.rank == 1:
        raise SystemExit
    world.all_reduce(torch.ones(1))


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_gathered_and_scattered_with_uneven_counts(size):
    run_on_ranks(check_rows, size, [[4, 4, 4], [5, 2, 3], [1, 6, 0], [0, 1, 2]])


def test_an_error_on_one_rank_is_raised_on_all_with_rank_and_cause():
    first, second = run_on_ranks(check_errors, 3)[2]
    assert first == "Training stopped on all ranks, because of rank 1: ValueError: bad row 1"
    assert "rank 0: ValueError: bad row 0; rank 1: ValueError: bad row 1" in second


def test_a_process_group_is_a_world_of_its_own():
    assert run_on_ranks(check_groups, 3) == [None, (2, 0, [10, 20]), (2, 1, [10, 20])]


def test_a_dead_rank_ends_in_an_error_and_not_in_a_wait():
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?i)timed out|timeout|connection|closed"):
        run_on_ranks(die_on_rank_one, 2, collective_timeout=5.0)
    assert time.monotonic() - begin < 60


def test_one_process_is_its_own_world():
    world = World.current()
    rows = rows_of(0, 3)
    assert type(world) is World and (world.size, world.rank) == (1, 0)
    assert world.row_counts(3) == [3]
    assert world.gather_rows(rows, [3]) is rows and world.reduce_scatter_rows(rows, [3]) is rows
    with pytest.raises(KeyError):
        world.raise_together(KeyError("itself"))
