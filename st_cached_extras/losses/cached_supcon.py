"""Supervised contrastive loss over batches that do not fit the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import cos_sim
from torch import Tensor

from st_cached_extras.objectives.supcon import SupCon
from st_cached_extras.replay.loss import ReplayLoss


class CachedSupConLoss(ReplayLoss):
    """Contrastive loss whose positives are the rows of the same class (SupCon), in the memory of one mini-batch.

    Every embedding of the batch is an anchor: of all others, those of its class should be near and the rest far. One
    column with classes trains a classifier's embeddings; several columns are views of their row, positives of each
    other, with classes or without. A row of which no other row has the class contributes nothing as an anchor; how
    many there were stands in ``loss.metrics["rows_without_positives"]``.

    The embeddings of the whole batch are collected without a graph, the derivative comes in closed form, chunk by
    chunk, and each mini-batch is embedded again with a graph (GradCache, https://huggingface.co/papers/2101.06983).

    Args:
        model: the SentenceTransformer to train.
        scale: similarities are multiplied by it: the inverse temperature. ``scale=10`` is a temperature of 0.1.
        similarity_fct: similarity between two sets of embeddings, [n, D] x [m, D] -> [n, m]. ``cos_sim`` (default)
            and ``dot_score`` are derived in closed form, anything else by autograd, chunk by chunk.
        mini_batch_size: rows that are embedded at once: this bounds the memory. The batch size does not.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens (rows x longest row) instead.
        gather_across_devices: compare the rows of all ranks, in one global loss.
        show_progress_bar: show a progress bar over the mini-batches of each pass.
        learnable_scale: train the scale from the given one on (its logarithm, ``loss.objective.log_scale``). Save it
            with :class:`~st_cached_extras.ReplaySentenceTransformerTrainer`.
        sort_by_length: put rows of like length into one mini-batch.
        trim_left_padding: also cut off leading padding that a whole mini-batch shares; only for models with relative
            (rotary) positions.
        kept_graphs: share of the mini-batches whose graphs are kept from the first pass: time for memory.
        differentiated_samples: embed only so many rows (an int, or a share as a float) a second time, drawn anew at
            every step and weighted so that the expected gradient is that of all rows; None for all.
        selection_seed: seed of those draws.
        defer_reduction: under FSDP2, ZeRO-2 and ZeRO-3, reduce gradients once a backward and not for every mini-batch;
            every rank then holds the gradients of the whole model.

    Raises:
        TypeError: ``model`` is not a SentenceTransformer, or an argument is of the wrong type.
        ValueError: an argument is out of its range, or the model embeds its inputs with a StaticEmbedding.

    References:
        - Supervised Contrastive Learning: https://huggingface.co/papers/2004.11362
        - Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup:
          https://huggingface.co/papers/2101.06983

    Requirements:
        1. Classes as labels, or at least two columns.
        2. Batches in which classes recur.

    Inputs:
        +---------------------------------+---------------------------------------------------------------------+
        | Inputs                          | Labels                                                              |
        +=================================+=====================================================================+
        | one column                      | class (any number), or a list of 0 and 1 per row, one for each of   |
        |                                 | several classes: rows that share one are positives                  |
        +---------------------------------+---------------------------------------------------------------------+
        | several columns, views of a row | the same, or none: then the other views of the row are its positives |
        +---------------------------------+---------------------------------------------------------------------+

    Recommendations:
        - Use ``BatchSamplers.GROUP_BY_LABEL``, so that every class has several rows in its batch.

    Relations:
        - :class:`CachedInfoNCELoss` with ``labels_as_groups=True`` keeps one positive per row and only takes the rows
          of its group out of the negatives.
        - With :class:`~sentence_transformers.losses.MatryoshkaLoss` around it, also trained at smaller dimensions.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
            from st_cached_extras import CachedSupConLoss

            model = SentenceTransformer("microsoft/mpnet-base")
            train_dataset = Dataset.from_dict({
                "sentence": ["The match ended in a draw.", "Rates rise again.", "She won the final.", "Shares fell."],
                "label": [0, 1, 0, 1],
            })
            loss = CachedSupConLoss(model, mini_batch_size=64)
            trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    objective: SupCon

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 10.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        learnable_scale: bool = False,
        sort_by_length: bool = True,
        trim_left_padding: bool = False,
        kept_graphs: float = 0.0,
        differentiated_samples: int | float | None = None,
        selection_seed: int = 0,
        defer_reduction: bool = False,
    ) -> None:
        super().__init__(
            model,
            SupCon(scale=scale, similarity_fct=similarity_fct, learnable_scale=learnable_scale),
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

    def to_targets(self, labels: Tensor | None) -> tuple[Tensor | None, None]:
        """The labels are the classes."""
        return labels, None

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card."""
        return {**self.objective.options(), **super().get_config_dict()}

    @property
    def citation(self) -> str:
        """BibTeX of SupCon and of the caching."""
        return (
            super().citation.rstrip()
            + """

@inproceedings{khosla2020supervised,
    title={Supervised Contrastive Learning},
    author={Prannay Khosla and Piotr Teterwak and Chen Wang and Aaron Sarna and Yonglong Tian and Phillip Isola and
        Aaron Maschinot and Ce Liu and Dilip Krishnan},
    booktitle={Advances in Neural Information Processing Systems},
    year={2020}
}
"""
        )
