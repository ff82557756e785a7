"""Ranks of right answers, and what can be said from them: statistics, intervals, and what chance would give.

A query's rank is the number of wrong answers that its best right answer does not beat: 0 where a right answer comes
first. A wrong answer with the same score counts as ahead, so a model that gives everything the same score is last, not
first, and so is one whose scores are not numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Statistic = Callable[[np.ndarray], np.ndarray]  # over the last axis


def ranks_of_right(scores: Tensor, right: Tensor) -> Tensor:
    """The rank of each query's best right answer.

    Args:
        scores: [queries, answers], larger is better.
        right: [queries, answers] in bool, at least one a query.

    Returns:
        int64 of shape [queries], on the device of the scores.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
    return ((scores >= best) & ~right).sum(dim=1)


def rank_statistics(ks: Sequence[int]) -> dict[str, Statistic]:
    """What is said of ranks, by name, each over the last axis.

    "recall@k" is the share of queries with a right answer among the k best, "mrr" the mean of 1 / (rank + 1), and
    "median_rank" the median of rank + 1.
    """

    def recall(k: int) -> Statistic:
        return lambda ranks: (ranks < k).mean(axis=-1)

    return {
        **{f"recall@{k}": recall(k) for k in ks},
        "mrr": lambda ranks: (1 / (ranks + 1)).mean(axis=-1),
        "median_rank": lambda ranks: np.median(ranks, axis=-1) + 1,
    }


def bootstrap_interval(
    ranks: np.ndarray, statistic: Statistic, *, draws: int = 2_000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a statistic of ranks, by drawing the queries again with replacement (percentile bootstrap).

    It is over queries, not over seeds of training. Where every draw is the same, as when all queries are answered
    right, it has no width, and then says nothing of queries beyond these.

    Args:
        ranks: [queries].
        statistic: one of `rank_statistics`.
        draws: how often the queries are drawn.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    at_once = max(1, 2_000_000 // len(ranks))  # bounds the memory
    values = [
        statistic(ranks[rng.integers(len(ranks), size=(min(at_once, draws - begin), len(ranks)))])
        for begin in range(0, draws, at_once)
    ]
    low, high = np.quantile(np.concatenate(values), (0.025, 0.975))
    return float(low), float(high)


def chance_of_ranks(right: np.ndarray, answers: int, ks: Sequence[int]) -> dict[str, float]:
    """What answers in random order would score in each of `rank_statistics`: the expectation, and the median.

    Args:
        right: how many right answers each query has, [queries].
        answers: how many answers there are.
        ks: as in `rank_statistics`.
    """
    # P(rank ≥ j) with r right among N: the first j of a random order are wrong, Π_{i<j} (N − r − i) / (N − i).
    i = np.arange(answers)
    at_least = np.zeros(answers + 1)
    for r, queries in zip(*np.unique(right, return_counts=True), strict=True):
        product = np.cumprod(np.clip(answers - r - i, 0, None) / (answers - i))
        at_least += queries / len(right) * np.concatenate([[1.0], product])
    exactly = at_least[:-1] - at_least[1:]  # P(rank = j), [answers]
    return {
        **{f"recall@{k}": float(1 - at_least[min(k, answers)]) for k in ks},
        "mrr": float((exactly / (i + 1)).sum()),
        "median_rank": float(np.argmax(1 - at_least[1:] >= 0.5 - 1e-12) + 1),
    }
