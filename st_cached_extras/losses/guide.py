"""The guide of GISTEmbedLoss over a batch that is embedded in mini-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss
from sentence_transformers.util import batch_to_device
from torch import Tensor

from st_cached_extras.replay.columns import read_columns
from st_cached_extras.replay.plan import plan_mini_batches


@torch.no_grad()
def embed_with_guide(loss: GISTEmbedLoss, columns: Sequence[Mapping[str, Any]], mini_batch_size: int) -> Tensor:
    """What the guide of ``loss`` makes of the inputs: [B, number of columns, D], without a graph.

    Args:
        loss: holds the guide, and says whether it has another tokenizer than the model.
        columns: the model's input features, left as they are.
        mini_batch_size: rows that the guide embeds at once.
    """
    embeddings = []
    for rows in read_columns(columns).values():
        plan = plan_mini_batches(rows.count, rows.lengths, mini_batch_size=mini_batch_size, is_padded=rows.is_padded)
        of_column = torch.cat([_embed(loss, rows.take(mini_batch)) for mini_batch in plan])
        embeddings.append(of_column[torch.cat(plan).argsort().to(of_column.device)])
    return torch.stack(embeddings, dim=1)


def _embed(loss: GISTEmbedLoss, features: dict[str, Any]) -> Tensor:
    if loss.must_retokenize:
        ids = features["input_ids"]
        if "cu_seq_lens_q" in features:  # flattened: one row after the other
            ids = ids[0].tensor_split(features["cu_seq_lens_q"][1:-1].cpu())
        texts = loss.tokenizer.batch_decode(ids, skip_special_tokens=True)
        features = batch_to_device(loss.guide.preprocess(texts), loss.guide.device)
    return loss.guide(features)["sentence_embedding"]
