"""The plan partitions the rows, keeps to its budgets, and sorts only what may be sorted."""

import cProfile
import random
from itertools import pairwise

import pytest
import torch

from st_cached_extras.replay.plan import MOST_ROWS_WITHIN_BUDGET, plan_mini_batches, plan_selected_first
from st_cached_extras.replay.rows import FeatureRows


def random_case(seed):
    generator = random.Random(seed)
    count = generator.randint(1, 60)
    return count, [generator.randint(1, 30) for _ in range(count)]


def planned(count, lengths, *, patches=None, **settings):
    lengths, patches = (None if values is None else torch.tensor(values) for values in (lengths, patches))
    return plan_mini_batches(count, lengths, patches=patches, **settings)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sort_by_length", [True, False])
@pytest.mark.parametrize("budget", [None, 1, 64, 10_000])
def test_every_row_is_planned_once(seed, sort_by_length, budget):
    count, lengths = random_case(seed)
    plan = planned(count, lengths, mini_batch_size=7, mini_batch_num_tokens=budget, sort_by_length=sort_by_length)
    assert sorted(row for rows in plan for row in rows.tolist()) == list(range(count))
    assert all(len(rows) for rows in plan)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_budget_every_mini_batch_but_the_last_is_full(seed):
    count, lengths = random_case(seed)
    sizes = [len(rows) for rows in planned(count, lengths, mini_batch_size=7)]
    assert sizes[:-1] == [7] * (len(sizes) - 1) and sizes[-1] <= 7


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sort_by_length", [True, False])
def test_rows_times_longest_stays_within_the_budget_and_no_mini_batch_could_take_the_next_row(seed, sort_by_length):
    count, lengths = random_case(seed)
    plan = planned(count, lengths, mini_batch_size=1, mini_batch_num_tokens=64, sort_by_length=sort_by_length)
    cost = lambda rows: len(rows) * max(lengths[row] for row in rows)  # noqa: E731
    batches = [rows.tolist() for rows in plan]
    assert all(cost(rows) <= 64 or len(rows) == 1 for rows in batches)
    assert all(cost([*rows, after[0]]) > 64 for rows, after in pairwise(batches))


def test_longest_rows_come_first_and_equal_ones_keep_their_order():
    plan = planned(6, [3, 9, 3, 1, 9, 3], mini_batch_size=2)
    assert [rows.tolist() for rows in plan] == [[1, 4], [0, 2], [5, 3]]


def test_rows_without_lengths_stay_in_order():
    plan = planned(5, None, mini_batch_size=2)
    assert [rows.tolist() for rows in plan] == [[0, 1], [2, 3], [4]]


def test_a_token_budget_without_lengths_is_refused():
    with pytest.raises(ValueError, match="mini_batch_num_tokens=64 needs the length"):
        planned(5, None, mini_batch_size=2, mini_batch_num_tokens=64)


def test_flattened_rows_keep_their_order_and_fill_the_budget_with_their_sum():
    plan = planned(6, [3, 9, 3, 1, 9, 3], mini_batch_size=1, mini_batch_num_tokens=13, is_padded=False)
    assert [rows.tolist() for rows in plan] == [[0, 1], [2, 3, 4], [5]]
    plan = planned(5, [1, 2, 3, 4, 5], mini_batch_size=2, is_padded=False)
    assert [rows.tolist() for rows in plan] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_padded", [True, False])
def test_visual_patches_count_beside_the_tokens(seed, is_padded):
    count, lengths = random_case(seed)
    patches = [random.Random(seed + row).choice([0, 0, 4, 40]) for row in range(count)]
    plan = planned(count, lengths, mini_batch_size=1, mini_batch_num_tokens=64, is_padded=is_padded, patches=patches)

    def cost(rows):
        own = [lengths[row] for row in rows]
        return (len(rows) * max(own) if is_padded else sum(own)) + sum(patches[row] for row in rows)

    batches = [rows.tolist() for rows in plan]
    assert sorted(row for rows in batches for row in rows) == list(range(count))
    assert all(cost(rows) <= 64 or len(rows) == 1 for rows in batches)
    assert all(cost([*rows, after[0]]) > 64 for rows, after in pairwise(batches))


@pytest.mark.parametrize("is_padded", [True, False])
def test_a_budget_never_puts_thousands_of_short_rows_together(is_padded):
    count = 2 * MOST_ROWS_WITHIN_BUDGET + 1
    plan = planned(count, [1] * count, mini_batch_size=2, mini_batch_num_tokens=10**6, is_padded=is_padded)
    assert [len(rows) for rows in plan] == [MOST_ROWS_WITHIN_BUDGET] * 2 + [1]


@pytest.mark.parametrize("budget", [None, 4096])
def test_planning_and_taking_rows_run_no_python_for_each_row(budget):
    """Calls of functions, Python's and torch's, go with the mini-batches and not with the rows."""
    calls = []
    for rows in (512, 8192):
        lengths = torch.randint(1, 65, (rows,), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(64) < lengths[:, None]).long()
        profile = cProfile.Profile()
        profile.enable()
        column = FeatureRows({"input_ids": torch.ones_like(mask), "attention_mask": mask})
        selected = torch.arange(0, rows, 2)
        sizes = {"mini_batch_size": rows // 16, "mini_batch_num_tokens": budget and budget * rows // 512}
        plan, _ = plan_selected_first(rows, column.lengths, selected, **sizes)
        for mini_batch in plan:
            column.take(mini_batch)
        profile.disable()
        calls.append(sum(entry.callcount for entry in profile.getstats()) / len(plan))
    assert calls[1] < 1.5 * calls[0]
