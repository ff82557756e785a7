"""Ranks flatter nobody; statistics, chance and intervals are those of slow, obvious counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from st_cached_extras.evaluation import bootstrap_interval, chance_of_ranks, rank_statistics, ranks_of_right


def sorted_rank(scores: list[float], right: list[bool]) -> int:
    """By sorting, wrong answers first where scores tie."""
    order = sorted(range(len(scores)), key=lambda answer: (-scores[answer], right[answer]))
    return next(place for place, answer in enumerate(order) if right[answer])


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_those_of_sorted_answers_with_ties_and_several_right_ones(seed):
    generator = torch.Generator().manual_seed(seed)
    queries, answers = 17, 3 + 4 * seed
    scores = torch.randint(0, 5, (queries, answers), generator=generator) / 4  # many ties
    right = torch.rand(queries, answers, generator=generator) < 0.3
    right[torch.arange(queries), torch.randint(0, answers, (queries,), generator=generator)] = True
    truth = [sorted_rank(s, r) for s, r in zip(scores.tolist(), right.tolist(), strict=True)]
    assert ranks_of_right(scores, right).tolist() == truth


def test_equal_scores_and_scores_that_are_no_numbers_come_last():
    right = torch.eye(4, dtype=torch.bool)
    assert ranks_of_right(torch.zeros(4, 4), right).tolist() == [3] * 4
    assert ranks_of_right(torch.full((4, 4), torch.nan), right).tolist() == [3] * 4
    scores = torch.eye(4)
    scores[0, 0] = torch.nan
    assert ranks_of_right(scores, right).tolist() == [3, 0, 0, 0]


def test_statistics_of_ranks():
    statistics = rank_statistics((1, 5))
    ranks = np.array([0, 0, 4, 5, 9])
    found = {name: float(statistic(ranks)) for name, statistic in statistics.items()}
    expected = {"recall@1": 0.4, "recall@5": 0.6, "mrr": (1 + 1 + 1 / 5 + 1 / 6 + 1 / 10) / 5, "median_rank": 5.0}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("right", [[1, 1], [2, 1, 1], [3], [1, 4, 2], [6]])
def test_chance_is_the_mean_over_all_orders_of_the_answers(right):
    answers = 6
    pooled = []
    for count in right:
        is_right = [True] * count + [False] * (answers - count)
        pooled += [[is_right[i] for i in order].index(True) for order in itertools.permutations(range(answers))]
    ranks = np.array(pooled)
    truth = {name: float(statistic(ranks)) for name, statistic in rank_statistics((1, 3, 10)).items()}
    # Where half of the orders are at most at a rank, the median of a sample lies between it and the next.
    truth["median_rank"] = float(np.sort(ranks)[(len(ranks) - 1) // 2] + 1)
    assert chance_of_ranks(np.array(right), answers, (1, 3, 10)) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("hits, queries", [(5, 20), (40, 64), (199, 200)])
def test_the_interval_of_a_recall_is_that_of_a_binomial(hits, queries):
    ranks = np.array([0] * hits + [7] * (queries - hits))
    low, high = bootstrap_interval(ranks, rank_statistics((1,))["recall@1"], seed=3)
    p = hits / queries
    mass = np.cumsum([math.comb(queries, k) * p**k * (1 - p) ** (queries - k) for k in range(queries + 1)])
    # 2 000 draws are off by .0035 in probability (one standard deviation): within one query of the quantile.
    assert abs(low * queries - np.searchsorted(mass, 0.025)) <= 1
    assert abs(high * queries - np.searchsorted(mass, 0.975)) <= 1


def test_intervals_hold_the_statistic_repeat_and_shrink_with_more_queries():
    rng = np.random.default_rng(0)
    small, large = rng.integers(0, 30, 40), rng.integers(0, 30, 40 * 16)
    for statistic in rank_statistics((1, 5)).values():
        low, high = bootstrap_interval(large, statistic)
        assert low <= statistic(large) <= high
        assert (low, high) == bootstrap_interval(large, statistic)
    mrr = rank_statistics(())["mrr"]
    widths = [np.diff(bootstrap_interval(ranks, mrr))[0] for ranks in (small, large)]
    assert 2.5 < widths[0] / widths[1] < 6  # about the square root of 16
