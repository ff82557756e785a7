"""The pairwise sigmoid loss of SigLIP over batches that do not fit the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import cos_sim
from torch import Tensor

from st_cached_extras.objectives.sigmoid import Sigmoid
from st_cached_extras.replay.loss import ReplayLoss


class CachedSigmoidLoss(ReplayLoss):
    """Contrastive loss that asks of every pair by itself whether it belongs together, in the memory of one mini-batch.

    The loss of SigLIP, equal to that of transformers' ``SiglipModel``: with y = 1 for the pairs of the dataset and −1
    for all other pairs of an anchor and a document of the batch, the mean over anchors of Σ −log σ(y (scale · sim +
    bias)). Unlike InfoNCE it has no softmax: a row may have any number of positives, and small batches cost less.
    Scale and bias are learned; without a bias the many negatives would dominate the first steps.

    The embeddings of the whole batch are collected without a graph, the derivative comes in closed form, chunk by
    chunk, and each mini-batch is embedded again with a graph (GradCache, https://huggingface.co/papers/2101.06983).

    Args:
        model: the SentenceTransformer to train.
        scale: the factor of the similarities at the start.
        bias: what is added to every scaled similarity, at the start.
        similarity_fct: similarity between two sets of embeddings, [n, D] x [m, D] -> [n, m]. ``cos_sim`` (default)
            and ``dot_score`` are derived in closed form, anything else by autograd, chunk by chunk.
        mini_batch_size: rows that are embedded at once: this bounds the memory. The batch size does not.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens (rows x longest row) instead.
        gather_across_devices: the pairs are those of all ranks' anchors and documents, in one global loss.
        show_progress_bar: show a progress bar over the mini-batches of each pass.
        learnable_scale: train the scale (its logarithm, ``loss.objective.log_scale``). Save it with
            :class:`~st_cached_extras.ReplaySentenceTransformerTrainer`.
        learnable_bias: train the bias (``loss.objective.logit_bias``); saved likewise.
        positives: how many columns after the anchor are positives of their row; the rest are hard negatives.
        labels_as_groups: labels are group ids, and the positives of a row are positives of every row of its group.
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
        - Sigmoid Loss for Language Image Pre-Training: https://huggingface.co/papers/2303.15343
        - Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup:
          https://huggingface.co/papers/2101.06983

    Requirements:
        1. (anchor, positive) pairs, or more columns: positives first, then hard negatives.

    Inputs:
        +-----------------------------------------------------------+--------------------------------------------+
        | Inputs                                                    | Labels                                     |
        +===========================================================+============================================+
        | (anchor, positive) pairs                                  | none, or group ids with `labels_as_groups` |
        +-----------------------------------------------------------+--------------------------------------------+
        | (anchor, positive, negative_1, ..., negative_n)           | none, or group ids with `labels_as_groups` |
        +-----------------------------------------------------------+--------------------------------------------+
        | (anchor, positive_1, ..., positive_p, negative_1, ...),   | none, or group ids with `labels_as_groups` |
        | with `positives=p`                                        |                                            |
        +-----------------------------------------------------------+--------------------------------------------+

    Recommendations:
        - Use ``BatchSamplers.NO_DUPLICATES``, so that no negative is a duplicate of the positive.
        - Scale and bias may want a higher learning rate than the model: ``learning_rate_mapping={"log_scale": 1e-2,
          "logit_bias": 1e-2}`` in the training arguments.

    Relations:
        - :class:`CachedInfoNCELoss` compares each positive with the negatives of its row instead.
        - With :class:`~sentence_transformers.losses.MatryoshkaLoss` around it, also trained at smaller dimensions.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer
            from st_cached_extras import CachedSigmoidLoss, ReplaySentenceTransformerTrainer

            model = SentenceTransformer("microsoft/mpnet-base")
            train_dataset = Dataset.from_dict({
                "anchor": ["It's nice weather outside today.", "He drove to work."],
                "positive": ["It's so sunny.", "He took the car to the office."],
            })
            loss = CachedSigmoidLoss(model, mini_batch_size=64)
            trainer = ReplaySentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    objective: Sigmoid

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 10.0,
        bias: float = -10.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        learnable_scale: bool = True,
        learnable_bias: bool = True,
        positives: int = 1,
        labels_as_groups: bool = False,
        sort_by_length: bool = True,
        trim_left_padding: bool = False,
        kept_graphs: float = 0.0,
        differentiated_samples: int | float | None = None,
        selection_seed: int = 0,
        defer_reduction: bool = False,
    ) -> None:
        objective = Sigmoid(
            scale=scale,
            bias=bias,
            similarity_fct=similarity_fct,
            learnable_scale=learnable_scale,
            learnable_bias=learnable_bias,
            positives=positives,
            labels_as_groups=labels_as_groups,
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

    def to_targets(self, labels: Tensor | None) -> tuple[Tensor | None, None]:
        """The labels if they are group ids, else nothing."""
        return labels if self.objective.labels_as_groups else None, None

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card."""
        return {**self.objective.options(), **super().get_config_dict()}

    @property
    def citation(self) -> str:
        """BibTeX of SigLIP and of the caching."""
        return (
            super().citation.rstrip()
            + """

@misc{zhai2023sigmoidlosslanguageimage,
    title={Sigmoid Loss for Language Image Pre-Training},
    author={Xiaohua Zhai and Basil Mustafa and Alexander Kolesnikov and Lucas Beyer},
    year={2023},
    eprint={2303.15343},
    archivePrefix={arXiv},
    primaryClass={cs.CV}
}
"""
        )
