"""Rows of one column of sentence-transformers features: how many there are, how long, and any mini-batch of them.

Which axis of a tensor is rows is never guessed. Where every tensor plainly holds one row per sample and an attention
mask gives the lengths, any set of rows can be taken; everything else keeps its order and is sliced by ST's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from st_cached_extras._compat import create_mini_batch, get_batch_size

# Per-batch settings, whatever their shape: ST passes prompt_length as an int, or as a tensor [1] or [B].
_NEVER_INDEXED = ("prompt_length",)
# Fragments of the names of tensors whose first axis may be patches, images, tokens or sequences instead of rows.
_AXIS_MAY_NOT_BE_ROWS = ("pixel", "grid", "offset", "cu_seq", "seq_idx", "image", "video", "per_sample")


class FeatureRows:
    """One input column, as ST's preprocessing made it, seen as rows.

    Args:
        features: the column's feature dict, e.g. ``input_ids`` and ``attention_mask`` [B, tokens], or
            ``pixel_values`` [B, frames, channels, height, width]. Never modified.

    Attributes:
        count: number of rows B.
        lengths: computed width of every row (last active position + 1), or None if rows must stay in order.
    """

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features = {key: value for key, value in features.items() if key not in _NEVER_INDEXED}
        self._settings = {key: value for key, value in features.items() if key in _NEVER_INDEXED}
        self.count: int = get_batch_size(self._features)
        self.lengths: list[int] | None = self._row_lengths() if self._every_tensor_holds_rows() else None

    def _every_tensor_holds_rows(self) -> bool:
        mask = self._features.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return False
        if any(fragment in key for key in self._features for fragment in _AXIS_MAY_NOT_BE_ROWS):
            return False
        return all(
            value.ndim > 0 and len(value) == self.count
            for value in self._features.values()
            if isinstance(value, Tensor)
        )

    def _row_lengths(self) -> list[int]:
        # The last active position, and not the number of active ones: left padding is computed too. Read once, before
        # any forward, because modules may change masks in place.
        mask = self._features["attention_mask"] != 0  # [B, tokens]
        width = mask.shape[1]
        positions = torch.arange(1, width + 1, device=mask.device)
        return (mask * positions).amax(dim=1).tolist() if width else [0] * self.count

    def take(self, rows: Tensor) -> dict[str, Any]:
        """The features of one mini-batch, trailing padding trimmed.

        Args:
            rows: int64 [n] row indices on the CPU, as planned: any rows if ``lengths`` is not None, else a
                contiguous run.

        Returns:
            A new feature dict for the model to consume.
        """
        if self.lengths is None:
            begin, end = int(rows[0]), int(rows[-1]) + 1
            if end - begin != len(rows):
                raise ValueError(f"These features can only be taken in order, got rows {rows.tolist()}.")
            return {**create_mini_batch(self._features, begin, end), **self._settings}
        width = self._features["attention_mask"].shape[1]
        # A row without a single active token keeps the whole width, as in ST.
        longest = max(self.lengths[row] for row in rows.tolist()) or width
        taken: dict[str, Any] = {}
        for key, value in self._features.items():
            if isinstance(value, Tensor):
                value = value.index_select(0, rows.to(value.device, non_blocking=True))
                if value.ndim >= 2 and value.shape[1] == width:
                    value = value[:, :longest]
            taken[key] = value
        return {**taken, **self._settings}
