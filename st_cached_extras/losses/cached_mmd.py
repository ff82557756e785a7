"""Distribution matching of an embedder against frozen encoders, over batches that do not fit the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_cached_extras.distributed.engines import engine_of
from st_cached_extras.objectives.mmd import MultiEncoderMMD
from st_cached_extras.objectives.mmd.segments import pool_segments
from st_cached_extras.replay.loss import ReplayLoss, stacked_rows


class CachedMultiEncoderMMDLoss(ReplayLoss):
    """Pulls the law of a model's embeddings towards those of frozen encoders, in the memory of one mini-batch.

    The squared maximum mean discrepancy (MMD) between the embeddings of a batch and each encoder's reference, summed
    over encoders. It looks at the embeddings as a cloud of points: which input lies where in the cloud it does not
    see. So it is a companion to a loss on pairs, such as distillation with few of them, and not a loss to train with
    alone; and beside a contrastive loss it can cost retrieval accuracy while it closes the gap between two modalities.
    ``docs/mmd.md`` has the measurements.

    The estimate wants large batches, which the replay makes possible: the embeddings of the whole batch are collected
    without a graph, the derivative comes in closed form, and mini-batches are embedded again with it. The frozen
    encoders are not run: their references are files (``training_scripts/fit_reference.py``).

    Args:
        model: the SentenceTransformer to train.
        mmd: what is computed from the embeddings, with a reference per encoder.
        heads: by encoder, a module that maps the model's output [n, D] (tokens: [n, segments, D]) to the encoder's
            space; trained with the model. Encoders without one are compared with the output as it is.
        outputs: which output of the model is compared: "sentence_embedding" or "token_embeddings"; one for all
            encoders, one each in their order, or a mapping from encoder to output.
        token_segments: into how many parts of its tokens each row is averaged, for "token_embeddings", because the
            number of tokens varies; the references are of features of so many parts.
        mini_batch_size: rows that are embedded at once: this bounds the memory. The batch size does not.
        mini_batch_num_tokens: if set, mini-batches are filled up to this many tokens (rows x longest row) instead.
        gather_across_devices: compare the rows of all ranks as one batch.
        show_progress_bar: show a progress bar over the mini-batches of each pass.
        sort_by_length: put rows of like length into one mini-batch.
        trim_left_padding: also cut off leading padding that a whole mini-batch shares; only for models with relative
            (rotary) positions.
        kept_graphs: share of the mini-batches whose graphs are kept from the first pass: time for memory.
        differentiated_samples: embed only so many rows (an int, or a share as a float) a second time, drawn anew at
            every step and weighted so that the expected gradient is that of all rows; None for all.
        selection_seed: seed of those draws.
        defer_reduction: under FSDP2 and ZeRO, reduce gradients over ranks once a backward.

    Raises:
        TypeError: ``model`` is no SentenceTransformer, ``mmd`` no MultiEncoderMMD, or an argument of the wrong type.
        ValueError: heads or outputs of unknown encoders, token outputs without segments, references without a shape
            or with a condition, or an argument out of its range.

    References:
        - A Kernel Two-Sample Test: https://jmlr.org/papers/v13/gretton12a.html
        - Representation Distribution Matching: https://huggingface.co/papers/2607.02375

    Requirements:
        1. A reference per encoder, of features of data like the columns'.
        2. For a current reference (``current_reference_weight`` above 0), the encoders' features of each row as label.

    Inputs:
        +---------------------+----------------------------------------------------------------------------------+
        | Inputs              | Labels                                                                           |
        +=====================+==================================================================================+
        | one or more columns | none, or the encoders' features of the row, flattened and side by side, [B, ΣD]  |
        +---------------------+----------------------------------------------------------------------------------+

    Recommendations:
        - Combine it with a loss on pairs through :class:`~st_cached_extras.CachedCompositeLoss`.
        - Batches of 512 rows and more; watch ``loss.metrics``, the raw value by encoder: the loss itself, normalised,
          stays near the sum of the weights.
        - A model that starts far from the references wants wide kernel scales, such as (1, 2, 4, 8).

    Relations:
        - Several columns are compared as one cloud. To bring two columns of a batch together instead, without a
          reference, use :class:`~st_cached_extras.objectives.mmd.TwoSampleMMD`.

    Example:
        ::

            from datasets import Dataset
            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
            from st_cached_extras import CachedMultiEncoderMMDLoss
            from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
            from torch import nn

            teacher = SentenceTransformer("all-mpnet-base-v2")
            model = SentenceTransformer("microsoft/MiniLM-L12-H384-uncased")
            sentences = ["It's nice weather outside today.", "He drove to work.", "She plays chess."]
            features = teacher.encode(sentences, convert_to_tensor=True)
            mmd = MultiEncoderMMD({"mpnet": NystromReference.fit(features)})
            loss = CachedMultiEncoderMMDLoss(model, mmd, heads={"mpnet": nn.Linear(384, 768)})
            train_dataset = Dataset.from_dict({"sentence": sentences})
            trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    objective: MultiEncoderMMD

    def __init__(
        self,
        model: SentenceTransformer,
        mmd: MultiEncoderMMD,
        heads: Mapping[str, nn.Module] | None = None,
        outputs: Sequence[str] | Mapping[str, str] = ("sentence_embedding",),
        token_segments: int = 0,
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
        if not isinstance(mmd, MultiEncoderMMD):
            raise TypeError(f"mmd: found {type(mmd).__name__}, expected a MultiEncoderMMD.")
        super().__init__(
            model,
            mmd,
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
        encoders = tuple(mmd.references)
        heads = dict(heads or {})
        if unknown := [name for name in heads if name not in encoders]:
            raise ValueError(f"heads: found {unknown}, expected encoders among {list(encoders)}.")
        # A list, because the names of encoders hold characters that those of modules may not.
        self.heads = nn.ModuleList(heads.get(name, nn.Identity()) for name in encoders)
        self.outputs = _outputs_by_encoder(outputs, encoders)
        self.token_segments = token_segments
        self._shapes = _feature_shapes(mmd, self.outputs, token_segments)

    # ------------------------------------------------------------------------------- from loss to objective

    def extract(self, outputs: Mapping[str, Any]) -> Tensor:
        """The features of every encoder for one mini-batch, flattened and side by side: [n, ΣD]."""
        features = []
        for head, (name, shape) in zip(self.heads, self._shapes.items(), strict=True):
            output = self.outputs[name]
            if output not in outputs:
                raise ValueError(f"outputs: the model has no {output!r} for {name!r}, only {', '.join(outputs)}.")
            x = outputs[output]
            if output == "token_embeddings":
                x = pool_segments(x, outputs["attention_mask"], self.token_segments)
            x = head(x)
            if tuple(x.shape[1:]) != shape:
                raise ValueError(
                    f"heads: a row of {name!r} has the shape {list(x.shape[1:])}, expected {list(shape)} as its "
                    f"reference. Give a head that maps {output} there, such as heads={{{name!r}: "
                    f"torch.nn.Linear({outputs[output].shape[-1]}, {shape[-1]})}}."
                )
            features.append(x.flatten(1))
        return features[0] if len(features) == 1 else torch.cat(features, dim=1)

    def to_features(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """By encoder, the rows of all columns together, [columns · B, ...]."""
        return self._by_encoder(columns[0] if len(columns) == 1 else torch.cat(list(columns)), "The features")

    def to_targets(self, labels: Tensor | None) -> tuple[None, dict[str, Tensor] | None]:
        """The labels, [B, ΣD], as the current reference, if it has a weight."""
        if not self.objective.uses_reference:
            return None, None
        if labels is None:
            raise ValueError(
                f"labels: found None with current_reference_weight={self.objective.current_reference_weight}, "
                "expected the encoders' features of every row. Add them to the dataset as a column 'label', flattened "
                f"and side by side in the order {', '.join(self._shapes)}, or set current_reference_weight=0."
            )
        return None, self._by_encoder(labels, "labels")

    def _by_encoder(self, packed: Tensor, what: str) -> dict[str, Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self._shapes.values()]
        if packed.ndim != 2 or packed.shape[1] != sum(sizes):
            raise ValueError(
                f"{what} of shape {list(packed.shape)}, expected [rows, {sum(sizes)}]: those of "
                f"{', '.join(f'{name} {list(shape)}' for name, shape in self._shapes.items())}, flattened and side by "
                "side. They cannot be truncated, so MatryoshkaLoss does not go around this loss."
            )
        parts = zip(self._shapes.items(), packed.split(sizes, dim=1), strict=True)
        return {name: part.reshape(-1, *shape) for (name, shape), part in parts}

    def to_rows(self, rows: Tensor, features: Mapping[str, Tensor], count: int) -> Tensor:
        """The selected rows of every column, which the objective sees one after the other."""
        stacked = len(next(iter(features.values())))
        return stacked_rows(rows, stacked // count, stacked)

    def update_balance(self, metrics: Mapping[str, Tensor]) -> None:
        """Hand the raw values "mmd/NAME", averaged over ranks, to the balance of the encoders, if there is one."""
        if self.objective.balance is None:
            return
        world = engine_of(self.model).world
        scores = torch.stack([metrics[f"mmd/{name}"] for name in self._shapes])
        scores = (world.all_reduce(scores) / world.size).tolist()
        self.objective.balance.update(dict(zip(self._shapes, scores, strict=True)))

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types, for the model card."""
        mmd = self.objective
        return {
            "encoders": {name: reference.describe() for name, reference in mmd.references.items()},
            "weights": mmd.weights,
            "statistic": mmd.statistic,
            "normalize": mmd.normalize,
            "current_reference_weight": mmd.current_reference_weight,
            "heads": {name: type(head).__name__ for name, head in zip(self._shapes, self.heads, strict=True)},
            "outputs": dict(self.outputs),
            "token_segments": self.token_segments,
            **super().get_config_dict(),
        }

    @property
    def citation(self) -> str:
        """BibTeX of the MMD, of its estimate by landmarks, and of the caching."""
        return (
            super().citation.rstrip()
            + """

@article{gretton2012kernel,
    title={A Kernel Two-Sample Test},
    author={Arthur Gretton and Karsten Borgwardt and Malte Rasch and Bernhard Sch{\\"o}lkopf and Alexander Smola},
    journal={Journal of Machine Learning Research},
    volume={13},
    pages={723--773},
    year={2012}
}

@misc{chatalic2022nystrom,
    title={Nystr{\\"o}m Kernel Mean Embeddings},
    author={Antoine Chatalic and Nicolas Schreuder and Alessandro Rudi and Lorenzo Rosasco},
    year={2022},
    eprint={2201.13055},
    archivePrefix={arXiv},
    primaryClass={stat.ML}
}
"""
        )


def _outputs_by_encoder(outputs: Sequence[str] | Mapping[str, str], encoders: tuple[str, ...]) -> dict[str, str]:
    if isinstance(outputs, str):
        outputs = (outputs,)
    if not isinstance(outputs, Mapping):
        names = list(outputs) * (len(encoders) if len(outputs) == 1 else 1)
        if len(names) != len(encoders):
            raise ValueError(
                f"outputs: found {len(outputs)}, expected one for all encoders, or one each for {', '.join(encoders)}."
            )
        outputs = dict(zip(encoders, names, strict=True))
    known = ("sentence_embedding", "token_embeddings")
    if outputs.keys() != set(encoders) or any(output not in known for output in outputs.values()):
        raise ValueError(
            f"outputs: found {dict(outputs)}, expected 'sentence_embedding' or 'token_embeddings' for each of "
            f"{', '.join(encoders)}."
        )
    return {name: outputs[name] for name in encoders}


def _feature_shapes(
    mmd: MultiEncoderMMD, outputs: Mapping[str, str], token_segments: int
) -> dict[str, tuple[int, ...]]:
    """Shape of one row by encoder, as the references say."""
    if isinstance(token_segments, bool) or not isinstance(token_segments, int) or token_segments < 0:
        raise ValueError(f"token_segments: found {token_segments!r}, expected a number of parts, 0 for none.")
    if mmd.conditional:
        raise ValueError(
            "mmd: its references hold a condition, and this loss has none to give. Fit them without a condition."
        )
    shapes = {}
    for name, reference in mmd.references.items():
        shape = reference.sample_shape
        if shape is None:
            raise ValueError(
                f"mmd: the reference of {name!r} does not know the shape of a row. Give sample_shape to from_parts."
            )
        if outputs[name] == "token_embeddings" and not (token_segments and shape[0] == token_segments):
            raise ValueError(
                f"token_segments: found {token_segments}, expected {shape[0]} as in the reference of {name!r}, whose "
                f"rows have the shape {list(shape)}: [parts, dimension]."
            )
        shapes[name] = shape
    return shapes
