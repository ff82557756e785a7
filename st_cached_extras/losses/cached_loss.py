"""Any dense loss of sentence-transformers that computes from embeddings, over batches that do not fit the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import uses_gradient_cache
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, GISTEmbedLoss, MatryoshkaLoss
from torch import Tensor, nn

from st_cached_extras._compat import uncompiled
from st_cached_extras.distributed.engines import engine_of
from st_cached_extras.distributed.world import World
from st_cached_extras.losses.guide import embed_with_guide
from st_cached_extras.objectives.adapter import LossObjective, computes_from_embeddings, loss_options
from st_cached_extras.replay.loss import ReplayLoss


class CachedLoss(ReplayLoss):
    """Makes a loss of sentence-transformers cached: same value, same gradients, the memory of one mini-batch.

    The embeddings of the whole batch are collected without a graph; the loss is evaluated on them as it is, under
    autograd; and each mini-batch is embedded again with a graph and its derivatives. For losses whose value depends on
    all rows together, such as CoSENT, AnglE and the batch-mined triplets, this is the way to a large batch; for the
    others gradient accumulation gives the same, and what remains is that rows of like length share a mini-batch.

    The loss stage itself is not chunked: a loss that compares all rows with all needs the memory for that, B x B
    numbers a few times over. :class:`CachedInfoNCELoss`, :class:`CachedSigmoidLoss` and :class:`CachedSupConLoss`
    need one chunk of them.

    Args:
        loss: the loss, constructed with the model to train. It is used as it is and stays usable.
        mini_batch_size: rows that are embedded at once: this bounds the memory.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens (rows x longest row) instead.
        gather_across_devices: evaluate the loss on the rows of all ranks, as one process with the whole batch would.
            Every rank evaluates the whole, since nothing is known of how the loss treats its rows.
        show_progress_bar: show a progress bar over the mini-batches of each pass.
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
        TypeError: ``loss`` is no module, its model is no SentenceTransformer, or it cannot be evaluated on embeddings.
        ValueError: the loss caches already, wraps others, gathers by itself, holds another model where the Trainer
            would replace it, or an argument is out of its range.

    References:
        - Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup:
          https://huggingface.co/papers/2101.06983

    Requirements:
        1. The columns and labels that the loss itself requires.

    Inputs:
        Those of the loss.

    Recommendations:
        - To train at several dimensions, put :class:`~sentence_transformers.losses.MatryoshkaLoss` around this loss,
          not inside. A loss whose own layer fixes the dimension (SoftmaxLoss, EmbedDistillLoss with a projection)
          fails at the first forward under it, cached or not.

    Relations:
        - Works for every dense loss of sentence-transformers that computes from embeddings, and for any other loss
          with a method ``compute_loss_from_embeddings(embeddings, labels)``.
        - GISTEmbedLoss is given its guide's embeddings, which are computed once per batch, in mini-batches.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
            from sentence_transformers.sentence_transformer.losses import CoSENTLoss
            from st_cached_extras import CachedLoss

            model = SentenceTransformer("microsoft/mpnet-base")
            train_dataset = Dataset.from_dict({
                "sentence1": ["It's nice weather outside today.", "He drove to work."],
                "sentence2": ["It's so sunny.", "She walked to the store."],
                "score": [1.0, 0.3],
            })
            loss = CachedLoss(CoSENTLoss(model), mini_batch_size=64)
            trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    objective: LossObjective

    def __init__(
        self,
        loss: nn.Module,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        sort_by_length: bool = True,
        trim_left_padding: bool = False,
        kept_graphs: float = 0.0,
        differentiated_samples: int | float | None = None,
        selection_seed: int = 0,
        defer_reduction: bool = False,
    ) -> None:
        check_cacheable(loss)
        model = model_of(loss)
        check_other_models(loss, model)
        super().__init__(
            model,
            LossObjective(loss),
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
        self._embedding_dimension = uncompiled(model).get_embedding_dimension()
        self._width: int | None = None  # of the embeddings whose loss is being calculated

    @property
    def loss(self) -> nn.Module:
        """The loss that is cached. The model card names and cites it by this name."""
        return self.objective.loss

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """See :meth:`ReplayLoss.forward`. A loss that returns several values by name does so here, too."""
        if isinstance(self.loss, GISTEmbedLoss):
            sentence_features = list(sentence_features)
            labels = self._guidance(sentence_features)
        return super().forward(sentence_features, labels)

    def _guidance(self, columns: list[Mapping[str, Any]]) -> Tensor | None:
        guidance, error = None, None
        try:
            guidance = embed_with_guide(self.loss, columns, self.mini_batch_size)
        except Exception as caught:
            error = caught
        world = engine_of(self.model).world if torch.is_grad_enabled() or self.gather_across_devices else World()
        world.raise_together(error)
        return guidance

    def to_features(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """See :meth:`ReplayLoss.to_features`."""
        self._width = columns[0].shape[1]
        return super().to_features(columns)

    def to_targets(self, labels: Tensor | None) -> tuple[Tensor | None, None]:
        """The labels as they are: what they mean is for the loss to say.

        But labels that are embeddings of the model's dimension are truncated where the embeddings were, as
        :class:`~sentence_transformers.losses.MatryoshkaLoss` does it for losses without a cache.
        """
        truncated = (
            isinstance(labels, Tensor)
            and labels.ndim in (2, 3)
            and labels.shape[-1] == self._embedding_dimension
            and not isinstance(self.loss, GISTEmbedLoss)
        )
        return labels[..., : self._width] if truncated else labels, None

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card: that of the loss, and that of the caching."""
        return {"loss": type(self.loss).__name__, **loss_options(self.loss), **super().get_config_dict()}


def check_cacheable(loss: Any) -> None:
    """Raise, saying why and what to do instead, unless a loss can be cached as it is."""
    name = type(loss).__name__
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a loss that was constructed with the model to train, got {loss!r}.")
    if isinstance(loss, (MatryoshkaLoss, AdaptiveLayerLoss)):
        way_out = (
            f"Put the cache inside: MatryoshkaLoss(model, CachedLoss({type(loss.loss).__name__}(model)), ...)."
            if isinstance(loss, MatryoshkaLoss)
            else "It needs the outputs of the model's layers in one forward with a graph: use it without a cache."
        )
        raise ValueError(
            f"{name} cannot be cached: it patches the forward of the model around another loss. {way_out}"
        )
    if uses_gradient_cache(loss):
        raise ValueError(f"{name} caches already: use it as it is.")
    if getattr(loss, "gather_across_devices", False):
        raise ValueError(
            f"{name} was constructed with gather_across_devices=True, but whoever caches it sees to that. Construct "
            "it without, and give gather_across_devices=True to the cached loss."
        )
    if not computes_from_embeddings(loss):
        raise TypeError(
            f"{name} cannot be cached: it has no method compute_loss_from_embeddings(embeddings, labels), so its "
            "value comes from forward passes of its own, not from embeddings that are already there. Losses with a "
            "second trained model or a decoder (ContrastiveTensionLoss, DenoisingAutoEncoderLoss) are of this kind: "
            "use them without a cache. In a loss of your own, move what follows the embedding into such a method."
        )


def model_of(loss: nn.Module) -> SentenceTransformer:
    """The model that a loss trains.

    Raises:
        TypeError: it holds none, or several, and none of them as ``model``.
    """
    models = [child for child in loss.children() if isinstance(uncompiled(child), BaseModel)]
    model = getattr(loss, "model", models[0] if len(models) == 1 else None)
    if model is None:
        raise TypeError(
            f"{type(loss).__name__} holds {len(models)} models, none of them as its attribute 'model', so which one "
            "it trains is not known. Keep the model to train in self.model, and any other one under another name."
        )
    return model


def check_other_models(loss: nn.Module, model: nn.Module) -> None:
    """Raise a ValueError if a model other than the trained one stands where the Trainer puts the trained one.

    ``SentenceTransformerTrainer`` replaces every child called ``model``, however deep, if it is a SentenceTransformer:
    a teacher of that name would silently become the student.
    """
    for path, child in loss.named_modules(remove_duplicate=False):
        inside = isinstance(uncompiled(child), BaseModel) and uncompiled(child) is not uncompiled(model)
        if inside and path.rsplit(".", 1)[-1] == "model":
            raise ValueError(
                f"{type(loss).__name__} holds another model under the name {path!r}. SentenceTransformerTrainer puts "
                "the trained model into every attribute of that name: call it differently, 'teacher' or 'guide'."
            )
