"""How well a model finds the right answers to queries, and the right queries to answers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor

from st_cached_extras.cards.figures import Retrieved
from st_cached_extras.evaluation.ranks import (
    bootstrap_interval,
    chance_of_ranks,
    rank_statistics,
    ranks_of_right,
)

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024  # of the table of scores


@dataclass(frozen=True)
class RetrievalResult:
    """What one evaluation found.

    Attributes:
        steps: training steps that were done, -1 if nobody said.
        ranks: by direction, the rank of the best right answer for each query, int64 of shape [queries], 0 is the best.
    """

    steps: int
    ranks: dict[str, np.ndarray]


class RetrievalEvaluator(BaseEvaluator):
    """Retrieves one column of a dataset by another, both ways, and keeps the ranks before and after training.

    Each row is a query and a right answer to it: texts, images or clips. A text that comes several times is one query
    (or one answer) with several right answers, found when any of them is; images and clips are told apart by their
    rows. A wrong answer with the same score as the right one counts as better than it.

    Rows are read and embedded a batch at a time. Hand it to the Trainer as ``evaluator``, with ``eval_on_start=True``
    to know what the model could do before, and call ``trainer.evaluate()`` after training. Its metrics are

        {name}_{query column}_to_{answer column}_{recall@1, recall@5, recall@10, mrr, median_rank}

    and the same with the columns the other way round. ``recall@k`` is the share of queries with a right answer among
    the k best, ranks in ``median_rank`` begin with 1, and the mean reciprocal rank of answers to queries is the metric
    by which the best model is chosen.

    Args:
        pairs: the rows; clips and images are decoded on access.
        query_column: column that goes through ``model.encode_query``.
        answer_column: column that goes through ``model.encode_document``.
        name: prefix of the metrics, such as the split; what is no letter or digit becomes an underscore.
        batch_size: rows that are read and embedded at once.
        ks: which recalls.

    Attributes:
        first: the result before training: the first one, or, in a run that goes on from a checkpoint, the one that was
            written down at its beginning, in the folder that the Trainer gives. None before the first call.
        last: the result of the last call.
        answers_of: by direction, how many answers the right one is found among.

    Raises:
        ValueError: there are no rows, no such columns, or one column for both.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer
            from st_cached_extras.evaluation import RetrievalEvaluator

            pairs = Dataset.from_dict({"query": ["cat", "dog"], "answer": ["It purrs.", "It barks."]})
            evaluator = RetrievalEvaluator(pairs, name="animals")
            metrics = evaluator(SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2"))
            print(metrics["animals_query_to_answer_recall@1"])
    """

    def __init__(
        self,
        pairs: Dataset,
        query_column: str = "query",
        answer_column: str = "answer",
        name: str = "held_out",
        batch_size: int = 32,
        *,
        ks: Sequence[int] = (1, 5, 10),
    ) -> None:
        super().__init__()
        for argument, column in (("query_column", query_column), ("answer_column", answer_column)):
            if column not in pairs.column_names:
                raise ValueError(f"{argument}: found {column!r}, expected one of {pairs.column_names}.")
        if query_column == answer_column:
            raise ValueError(f"query_column and answer_column are both {query_column!r}, expected two columns.")
        if len(pairs) == 0:
            raise ValueError("pairs: found no rows, expected at least one.")
        self.pairs, self.batch_size, self.ks = pairs, batch_size, tuple(ks)
        self.name = "".join(letter if letter.isalnum() else "_" for letter in name)
        self.queries = _Items.of(pairs, query_column)
        self.answers = _Items.of(pairs, answer_column)
        self.forward = f"{query_column}_to_{answer_column}"
        self.backward = f"{answer_column}_to_{query_column}"
        self.answers_of = {self.forward: len(self.answers), self.backward: len(self.queries)}
        self.right_of = {
            self.forward: _unique_pairs(self.queries.of_row, self.answers.of_row),
            self.backward: _unique_pairs(self.answers.of_row, self.queries.of_row),
        }
        self.statistics = rank_statistics(self.ks)
        self.primary_metric = f"{self.name}_{self.forward}_mrr"
        self.first: RetrievalResult | None = None
        self.last: RetrievalResult | None = None
        self.best: dict[str, np.ndarray] = {}

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        queries = self._embed(model.encode_query, self.queries)
        answers = self._embed(model.encode_document, self.answers)
        ranks = {}
        for direction, rows, columns in ((self.forward, queries, answers), (self.backward, answers, queries)):
            ranks[direction], self.best[direction] = self._retrieve(direction, rows, columns, model.similarity)
        self.last = RetrievalResult(steps, ranks)
        self._remember_first(output_path)
        metrics = self.prefix_name_to_metrics(self.metrics(self.last), self.name)
        logger.info("%s: %s", self.name, metrics)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def metrics(self, result: RetrievalResult) -> dict[str, float]:
        """The statistics of a result, by "direction_statistic"."""
        return {
            f"{direction}_{name}": float(statistic(ranks))
            for direction, ranks in result.ranks.items()
            for name, statistic in self.statistics.items()
        }

    def chance(self, direction: str) -> dict[str, float]:
        """What answers in random order would score, by statistic."""
        queries, _ = self.right_of[direction]
        return chance_of_ranks(np.bincount(queries), self.answers_of[direction], self.ks)

    def chance_of_recall(self, direction: str, max_k: int) -> np.ndarray:
        """The recall at 1, 2, ... of answers in random order, [max_k], or as far as there are answers."""
        ks = range(1, min(max_k, self.answers_of[direction]) + 1)
        queries, _ = self.right_of[direction]
        chance = chance_of_ranks(np.bincount(queries), self.answers_of[direction], ks)
        return np.array([chance[f"recall@{k}"] for k in ks])

    def rows(self) -> list[dict[str, Any]]:
        """The table of the first and the last result, with 95 % intervals over queries, beside chance."""
        if self.first is None or self.last is None:
            raise RuntimeError("There are no results yet: call the evaluator, or trainer.evaluate(), first.")
        before = "Before" if self.first.steps <= 0 else f"Step {self.first.steps}"
        rows = []
        for direction, last in self.last.ranks.items():
            chance = self.chance(direction)
            for name, statistic in self.statistics.items():
                first = self.first.ranks[direction]
                rows.append(
                    {
                        "Split": self.name.replace("_", " "),
                        "Retrieval": direction.replace("_", " "),
                        "Metric": name.replace("recall", "R").replace("mrr", "MRR").replace("_", " "),
                        "Chance": chance[name],
                        before: with_interval(first, statistic),
                        "After": with_interval(last, statistic),
                    }
                )
        return rows

    def retrieved(self, queries: int, answers: int) -> list[Retrieved]:
        """The best answers to some queries, spread evenly over them: what `retrieval_figure` draws."""
        right = set(zip(*(side.tolist() for side in self.right_of[self.forward]), strict=True))
        chosen = np.linspace(0, len(self.queries) - 1, min(queries, len(self.queries))).round().astype(int)
        return [
            Retrieved(
                self.queries.value(query),
                [self.answers.value(answer) for answer in self.best[self.forward][query, :answers]],
                [(query, answer) in right for answer in self.best[self.forward][query, :answers].tolist()],
            )
            for query in chosen.tolist()
        ]

    def get_config_dict(self) -> dict[str, Any]:
        return {direction: {"answers": answers} for direction, answers in self.answers_of.items()}

    def _embed(self, encode: Callable[..., Tensor], items: _Items) -> Tensor:
        """[items, D] in fp32: in half precision, scores would tie that differ."""
        options = {"batch_size": self.batch_size, "convert_to_tensor": True, "show_progress_bar": False}
        if items.texts is not None:
            return encode(items.texts, **options).float()
        return torch.cat([encode(batch, **options).float() for batch in items.batches(self.batch_size)])

    def _retrieve(
        self, direction: str, queries: Tensor, answers: Tensor, similarity: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks [queries], and the best answers [queries, max(ks)], in chunks of the table of scores."""
        query_of_pair, answer_of_pair = self.right_of[direction]
        ranks, best = [], []
        for begin in range(0, len(queries), ROWS_AT_ONCE):
            scores = similarity(queries[begin : begin + ROWS_AT_ONCE], answers)  # [chunk, answers]
            here = (query_of_pair >= begin) & (query_of_pair < begin + ROWS_AT_ONCE)
            right = torch.zeros(scores.shape, dtype=torch.bool)
            right[query_of_pair[here] - begin, answer_of_pair[here]] = True
            ranks.append(ranks_of_right(scores, right.to(scores.device)).cpu())
            best.append(scores.topk(min(max(self.ks), scores.shape[1]), dim=1).indices.cpu())
        return torch.cat(ranks).numpy(), torch.cat(best).numpy()

    def _remember_first(self, output_path: str | None) -> None:
        """Keep what the model could do before training, and write it down for a run that goes on from here."""
        path = None if output_path is None else Path(output_path) / f"retrieval_{self.name}_first.json"
        pairs = hashlib.sha256(repr((self.queries.texts, self.answers.texts, self.answers_of)).encode()).hexdigest()
        if self.first is None and self.last.steps > 0 and path is not None and path.is_file():
            written = json.loads(path.read_text())
            if written["pairs"] == pairs:
                ranks = {direction: np.array(ranks) for direction, ranks in written["ranks"].items()}
                self.first = RetrievalResult(written["steps"], ranks)
        if self.first is None:
            self.first = self.last
        if self.last.steps == 0 and path is not None:
            ranks = {direction: ranks.tolist() for direction, ranks in self.last.ranks.items()}
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps({"pairs": pairs, "steps": 0, "ranks": ranks}))
            os.replace(unfinished, path)


def with_interval(ranks: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> str:
    """A statistic of ranks with its 95 % interval, as "0.500 (0.375 to 0.625)"."""
    low, high = bootstrap_interval(ranks, statistic)
    return f"{float(statistic(ranks)):.3f} ({low:.3f} to {high:.3f})"


@dataclass(frozen=True)
class _Items:
    """The different values of a column: texts by what they say, anything else by its row."""

    pairs: Dataset
    column: str
    texts: list[str] | None
    of_row: np.ndarray  # the item of each row, [rows]

    @staticmethod
    def of(pairs: Dataset, column: str) -> _Items:
        feature = pairs.features[column]
        if not (isinstance(feature, Value) and feature.dtype in ("string", "large_string")):
            return _Items(pairs.select_columns(column), column, None, np.arange(len(pairs)))
        index: dict[str, int] = {}
        of_row = np.array([index.setdefault(text, len(index)) for text in pairs[column]])
        return _Items(pairs, column, list(index), of_row)

    def __len__(self) -> int:
        return len(self.of_row) if self.texts is None else len(self.texts)

    def value(self, item: int) -> Any:
        return self.pairs[int(item)][self.column] if self.texts is None else self.texts[item]

    def batches(self, size: int) -> Any:
        return (list(batch[self.column]) for batch in self.pairs.iter(size))


def _unique_pairs(queries: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    both = np.unique(np.stack([queries, answers]), axis=1)
    return both[0], both[1]
