"""Evaluation: how often the right answer is found, before and after, and how sure that is."""

from st_cached_extras.evaluation.ranks import bootstrap_interval, chance_of_ranks, rank_statistics, ranks_of_right
from st_cached_extras.evaluation.retrieval import RetrievalEvaluator, RetrievalResult

__all__ = [
    "RetrievalEvaluator",
    "RetrievalResult",
    "bootstrap_interval",
    "chance_of_ranks",
    "rank_statistics",
    "ranks_of_right",
]
