"""InfoNCE with in-batch negatives over batches that do not fit the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import cos_sim
from torch import Tensor

from st_cached_extras.objectives.infonce import InfoNCE
from st_cached_extras.replay.loss import ReplayLoss

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]


class CachedInfoNCELoss(ReplayLoss):
    """Contrastive loss with in-batch negatives (InfoNCE) whose memory is that of one mini-batch.

    A drop-in for :class:`~sentence_transformers.losses.CachedMultipleNegativesRankingLoss`: same arguments, same
    value, same gradients. Two things differ underneath. Mini-batches hold rows of like length, so that hardly any
    padding is computed; and the loss stage evaluates its derivatives in closed form, without an autograd graph.

    For each anchor, its own positive is the right answer, and every other document of the batch is a negative. More
    negatives make a better embedder, hence the large batch: embed it in mini-batches without a graph, derive the
    loss with respect to the embeddings, and embed each mini-batch again with a graph and those derivatives
    (GradCache, https://huggingface.co/papers/2101.06983).

    Args:
        model: the SentenceTransformer to train.
        scale: similarities are multiplied by it: the inverse temperature. ``scale=20`` is a temperature of 0.05.
        similarity_fct: similarity between two sets of embeddings, [n, D] x [m, D] -> [n, m]. ``cos_sim`` (default)
            and ``dot_score`` are derived in closed form, anything else by autograd, chunk by chunk.
        mini_batch_size: rows that are embedded at once: this bounds the memory. The batch size does not.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens (rows x longest row) instead.
        gather_across_devices: count the documents of all ranks as negatives, in one global loss.
        directions: which similarities enter the loss:

            - "query_to_doc": each anchor against all documents (always needed: it holds the positive);
            - "query_to_query": each anchor against all other anchors;
            - "doc_to_query": each positive against all anchors;
            - "doc_to_doc": each positive against all documents of other rows.
        partition_mode: "joint" for one softmax over all directions, "per_direction" for the mean of one loss per
            direction (only for "query_to_doc" and "doc_to_query").
        show_progress_bar: show a progress bar over the mini-batches of each pass.
        hardness_mode: add ``hardness_strength`` x similarity to the logits of "in_batch_negatives",
            "hard_negatives" or "all_negatives", so that harder ones weigh more; None (default) for none.
        hardness_strength: see ``hardness_mode``; not negative.
        sort_by_length: put rows of like length into one mini-batch.
        trim_left_padding: also cut off leading padding that a whole mini-batch shares; only for models with relative
            (rotary) positions.
        kept_graphs: share of the mini-batches whose graphs are kept from the first pass: time for memory.
        differentiated_samples: embed only so many rows (an int, or a share as a float) a second time, drawn anew at
            every step and weighted so that the expected gradient is that of all rows; None for all.
        selection_seed: seed of those draws.
        defer_reduction: under FSDP2, ZeRO-2 and ZeRO-3, reduce gradients once a backward and not for every mini-batch;
            every rank then holds the gradients of the whole model.
        learnable_scale: train the scale from the given one on (its logarithm, ``loss.objective.log_scale``). Save it
            with :class:`~st_cached_extras.ReplaySentenceTransformerTrainer`.
        labels_as_groups: labels are group ids, and rows of one group are never each other's negatives. Without it,
            labels are ignored, as in sentence-transformers.
        margin: how far the similarity of the positive must exceed those of the negatives (additive margin softmax).

    Raises:
        TypeError: ``model`` is not a SentenceTransformer, or an argument is of the wrong type.
        ValueError: an argument is out of its range, or the model embeds its inputs with a StaticEmbedding.

    References:
        - Representation Learning with Contrastive Predictive Coding: https://huggingface.co/papers/1807.03748
        - Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup:
          https://huggingface.co/papers/2101.06983
        - Improving Multilingual Sentence Embedding using Bi-directional Dual Encoder with Additive Margin Softmax:
          https://huggingface.co/papers/1902.08564

    Requirements:
        1. (anchor, positive) pairs, (anchor, positive, negative) triplets, or n-tuples with more negatives.

    Inputs:
        +-------------------------------------------------+--------------------------------------------+
        | Inputs                                          | Labels                                     |
        +=================================================+============================================+
        | (anchor, positive) pairs                        | none, or group ids with `labels_as_groups` |
        +-------------------------------------------------+--------------------------------------------+
        | (anchor, positive, negative) triplets           | none, or group ids with `labels_as_groups` |
        +-------------------------------------------------+--------------------------------------------+
        | (anchor, positive, negative_1, ..., negative_n) | none, or group ids with `labels_as_groups` |
        +-------------------------------------------------+--------------------------------------------+

    Recommendations:
        - Use ``BatchSamplers.NO_DUPLICATES``, so that no negative is a duplicate of the anchor or the positive. Where
          several rows share an answer without sharing a text, give them one group id and ``labels_as_groups=True``.
        - Set ``per_device_train_batch_size`` as high as the task profits from, and ``mini_batch_size`` as high as the
          memory allows.

    Relations:
        - Equal to :class:`~sentence_transformers.losses.MultipleNegativesRankingLoss` in value and gradients, with
          memory for much larger batches.
        - With :class:`~sentence_transformers.losses.MatryoshkaLoss` around it, also trained at smaller dimensions.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
            from st_cached_extras import CachedInfoNCELoss

            model = SentenceTransformer("microsoft/mpnet-base")
            train_dataset = Dataset.from_dict({
                "anchor": ["It's nice weather outside today.", "He drove to work."],
                "positive": ["It's so sunny.", "He took the car to the office."],
            })
            loss = CachedInfoNCELoss(model, mini_batch_size=64)
            trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    objective: InfoNCE

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        show_progress_bar: bool = False,
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        *,
        sort_by_length: bool = True,
        trim_left_padding: bool = False,
        kept_graphs: float = 0.0,
        differentiated_samples: int | float | None = None,
        selection_seed: int = 0,
        defer_reduction: bool = False,
        learnable_scale: bool = False,
        labels_as_groups: bool = False,
        margin: float = 0.0,
    ) -> None:
        objective = InfoNCE(
            scale=scale,
            similarity_fct=similarity_fct,
            directions=directions,
            partition_mode=partition_mode,
            hardness_mode=hardness_mode,
            hardness_strength=hardness_strength,
            learnable_scale=learnable_scale,
            labels_as_groups=labels_as_groups,
            margin=margin,
        )
        super().__init__(
            model,
            objective,
            mini_batch_size=mini_batch_size,
            mini_batch_num_tokens=mini_batch_num_tokens,
            sort_by_length=sort_by_length,
            trim_left_padding=trim_left_padding,
            gather_across_devices=gather_across_devices,
            kept_graphs=kept_graphs,
            differentiated_samples=differentiated_samples,
            selection_seed=selection_seed,
            defer_reduction=defer_reduction,
            show_progress_bar=show_progress_bar,
        )

    @property
    def scale(self) -> float:
        """The inverse temperature; if it is learned, as it stands now."""
        return self.objective.scale

    @property
    def temperature(self) -> float:
        """The inverse scale."""
        return 1.0 / self.scale

    def to_targets(self, labels: Tensor | None) -> tuple[Tensor | None, None]:
        """The labels if they are group ids, else nothing."""
        return labels if self.objective.labels_as_groups else None, None

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card."""
        return {**self.objective.options(), **super().get_config_dict()}

    @property
    def citation(self) -> str:
        """BibTeX of InfoNCE and of the caching."""
        return (
            super().citation.rstrip()
            + """

@misc{oord2019representationlearningcontrastivepredictive,
    title={Representation Learning with Contrastive Predictive Coding},
    author={Aaron van den Oord and Yazhe Li and Oriol Vinyals},
    year={2019},
    eprint={1807.03748},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""
        )
