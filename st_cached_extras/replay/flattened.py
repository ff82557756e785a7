"""Rows of flattened inputs: all sequences of a batch in one, without padding, for variable-length attention.

``DataCollatorWithFlattening`` makes them of text where flash attention is there: tokens [1, total], the boundaries of
the sequences, and which sequence each token is of. A mini-batch is the same, of its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from st_cached_extras.replay.axes import Axis, Layout, LayoutError, Segments, Setting, described, to_host

_OVER_TOKENS = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds", "labels")


@dataclass(frozen=True)
class _Boundaries:
    """[0, n_0, n_0 + n_1, ...] of the taken sequences."""

    lengths: Tensor

    def take(self, value: Tensor, rows: Tensor) -> Tensor:
        boundaries = torch.nn.functional.pad(self.lengths[rows].cumsum(0), (1, 0))
        return boundaries.to(value.device, value.dtype)


@dataclass(frozen=True)
class _Longest:
    """The longest taken sequence, a plain integer as kernels want it."""

    lengths: Tensor

    def take(self, value: Any, rows: Tensor) -> int:
        return int(self.lengths[rows].max())


@dataclass(frozen=True)
class _SequenceOfToken:
    """0 for every token of the first taken sequence, 1 for the second, ..."""

    lengths: Tensor

    def take(self, value: Tensor, rows: Tensor) -> Tensor:
        sequences = torch.arange(len(rows)).repeat_interleave(self.lengths[rows])
        return sequences.expand(*value.shape[:-1], -1).to(value.device, value.dtype)


def flattened_layout(features: Mapping[str, Any], settings: tuple[str, ...]) -> Layout:
    """The layout of features with ``cu_seq_lens_q``.

    Args:
        features: the feature dict.
        settings: keys that are never cut.

    Raises:
        LayoutError: an entry that is none of what flattening makes, or does not fit the boundaries.
    """
    host = to_host({key: features[key] for key in ("cu_seq_lens_q", "cu_seq_lens_k") if key in features})
    boundaries = host["cu_seq_lens_q"]
    if not torch.equal(host.get("cu_seq_lens_k", boundaries), boundaries):
        raise LayoutError(
            "Flattened inputs whose cu_seq_lens_k differs from cu_seq_lens_q cannot be cut into rows: an embedder's "
            "sequences attend to themselves. Make both the same."
        )
    lengths = boundaries.diff()
    if boundaries.ndim != 1 or not len(lengths) or int(boundaries[0]) != 0 or int(lengths.min()) < 0:
        raise LayoutError(
            f"cu_seq_lens_q must be [0, n_0, n_0 + n_1, ...] of the sequence lengths, got {boundaries.tolist()}."
        )
    total = int(boundaries[-1])
    tokens = Segments(boundaries[:-1], lengths, dim=-1)
    over_tokens: dict[str, Axis] = {**dict.fromkeys(_OVER_TOKENS, tokens), "seq_idx": _SequenceOfToken(lengths)}
    axes: dict[str, Axis] = {}
    for key, value in features.items():
        if key in ("cu_seq_lens_q", "cu_seq_lens_k"):
            axes[key] = _Boundaries(lengths)
        elif key in ("max_length_q", "max_length_k"):
            axes[key] = _Longest(lengths)
        elif key in settings or isinstance(value, (str, bool, int, float, type(None))):
            axes[key] = Setting()
        elif key in over_tokens and isinstance(value, Tensor):
            is_embedded = key == "inputs_embeds"
            if value.ndim < 1 + is_embedded or value.shape[-1 - is_embedded] != total:
                raise LayoutError(
                    f"{key} of flattened inputs must hold the {total} tokens that cu_seq_lens_q counts, got "
                    f"{described(value)}."
                )
            axes[key] = Segments(tokens.starts, lengths, dim=-2) if is_embedded else over_tokens[key]
        else:
            raise LayoutError(
                f"Flattened inputs have an entry {key!r} ({described(value)}) that their collator does not make, and "
                "whether it is over tokens or sequences cannot be told. Leave it out, or set unpad_inputs=False on "
                "the model's Transformer module to pad instead."
            )
    return Layout(len(lengths), axes, lengths, is_padded=False)
