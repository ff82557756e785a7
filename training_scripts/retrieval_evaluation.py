"""How often the right clip is found for a caption: sentence-transformers' metrics, with ranks and intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_cached_extras.cards import Retrieved


class CaptionToVideoEvaluator(InformationRetrievalEvaluator):
    """Retrieves the clips of a dataset by its captions, and keeps the rank of the right one for each caption.

    Clips are decoded and embedded a batch at a time, once per call. A caption that comes several times is one query
    with several right answers, ranked by the best of them.

    Args:
        clips: Columns "caption" and "video".
        name: Prefix of the metrics, such as "novel_cosine_accuracy@5".
        batch_size: Clips or captions embedded at once.

    Attributes:
        ranks: After a call, the rank of the right clip per caption, int of shape [captions], 0 is the best.
        ranks_before: Those of the first call.
        first_step: The step of the first call: 0, or that from which a run was resumed.
        order: After a call, the clips from best to worst per caption, int of shape [captions, clips].
    """

    def __init__(self, clips: Dataset, name: str, batch_size: int = 32) -> None:
        self.clips = clips
        self.captions: list[str] = []
        self.right: dict[str, set[str]] = {}
        self.ranks_before: np.ndarray | None = None
        self.first_step = 0
        for row, caption in enumerate(clips["caption"]):
            if caption not in self.right:
                self.captions.append(caption)
            self.right.setdefault(caption, set()).add(str(row))
        super().__init__(
            queries={caption: caption for caption in self.captions},
            corpus={str(row): str(row) for row in range(len(clips))},  # embedded here, from the dataset
            relevant_docs=self.right,
            accuracy_at_k=[1, 5, 10],
            precision_recall_at_k=[1, 5, 10],
            batch_size=batch_size,
            name=name,
        )

    def __call__(
        self,
        model: SentenceTransformer,
        output_path: str | None = None,
        epoch: float = -1,
        steps: int = -1,
        **kwargs: Any,
    ) -> dict[str, float]:
        options = {"convert_to_tensor": True, "show_progress_bar": False, "batch_size": self.batch_size}
        batches = self.clips.select_columns("video").iter(self.batch_size)
        videos = torch.cat([model.encode_document(batch["video"], **options) for batch in batches])
        captions = model.encode_query(self.captions, **options)
        self.order = model.similarity(captions, videos).argsort(dim=1, descending=True, stable=True).cpu().numpy()
        self.ranks = np.array(
            [np.flatnonzero(right)[0] for right in map(self._right_in_order, range(len(self.order)))]
        )
        if self.ranks_before is None:
            self.ranks_before, self.first_step = self.ranks, steps
        return super().__call__(model, output_path, epoch, steps, corpus_embeddings=videos, **kwargs)

    def retrieved(self, captions: int, clips: int) -> list[Retrieved]:
        """The best clips of some captions, spread evenly over the set: what `retrieval_figure` draws."""
        chosen = np.linspace(0, len(self.captions) - 1, min(captions, len(self.captions))).round().astype(int)
        return [
            Retrieved(
                self.captions[query],
                [self.clips[int(row)]["video"] for row in self.order[query, :clips]],
                self._right_in_order(query)[:clips].tolist(),
            )
            for query in chosen
        ]

    def _right_in_order(self, query: int) -> np.ndarray:
        """Whether each clip is right, from best to worst, bool of shape [clips]."""
        right = [int(row) for row in self.right[self.captions[query]]]
        return np.isin(self.order[query], right)


def recall(ranks: np.ndarray, k: int) -> float:
    """Share of captions whose right clip is among the k best."""
    return float((ranks < k).mean())


def mean_reciprocal_rank(ranks: np.ndarray) -> float:
    return float((1 / (ranks + 1)).mean())


def bootstrap_interval(hits: np.ndarray, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of a mean over captions, by drawing the captions again with replacement.

    When every caption is hit, or none, each draw is the same and the interval has no width: it then says nothing
    of captions beyond these.
    """
    rng = np.random.default_rng(seed)
    means = rng.choice(np.asarray(hits, float), size=(draws, len(hits))).mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
