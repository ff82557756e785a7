"""Rows of one column of sentence-transformers features: how many there are, how long, and any mini-batch of them.

Which axis of a tensor is rows is never guessed from its size. The entries that ST and its processors make are known
by name, and whatever is not is refused, unless a batch leaves only one reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from st_cached_extras._compat import get_batch_size
from st_cached_extras.replay.axes import Axis, Layout, LayoutError, Rows, Setting, Tokens, Unseen, described, to_host
from st_cached_extras.replay.flattened import flattened_layout
from st_cached_extras.replay.media import MEDIA, TOKEN_TYPES_KEY
from st_cached_extras.replay.media_rows import collect_media

# Per-batch settings, whatever their shape: ST passes prompt_length as an int, or as a tensor [1] or [B].
_NEVER_INDEXED = ("prompt_length",)
# Rows x tokens, whatever follows.
_TOKEN_KEYS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "special_tokens_mask",
    "offset_mapping",
    "query_expansion_positions",
    "global_attention_mask",
    "cross_attention_mask",
    "image_attention_mask",
    "bbox",
    TOKEN_TYPES_KEY,
)
_COUNT_KEYS = tuple(medium.count_key for medium in MEDIA)
# ST keeps its own counts from the model, but has none of audio clips: where a user adds one, it is kept here.
_COUNT_NOT_OF_ST = "num_audios_per_sample"
# Not over rows, although their first axis may be as long.
_NEVER_ROWS = ("offsets", "cu_seq_lens_k", "seq_idx", "per_sample_weights")


class FeatureRows:
    """One input column, as ST's preprocessing made it, seen as rows.

    Args:
        features: the column's feature dict, e.g. ``input_ids`` and ``attention_mask`` [B, tokens], or
            ``pixel_values`` [B, frames, channels, height, width]. Never modified.
        trim_left_padding: also cut off leading padding that all rows of a mini-batch share. Exact for models with
            relative (rotary) positions, wrong for absolute ones.
        length_multiple: leave so much padding that mini-batches are as long as a multiple of this, as far as there is
            any: few lengths, for models that are compiled for each.
        media_tokens: token ids that stand for an "image", "video" or "audio" clip in ``input_ids``. They help where
            ST does not say how many each row has, see :func:`~st_cached_extras.replay.media.media_tokens_of`.

    Attributes:
        count: number of rows B.
        lengths: tokens that are computed for every row (its last active position + 1, unless leading padding is
            trimmed), visual ones included, int64 [B] on the CPU; None if rows have no tokens.
        is_padded: whether mini-batches are as wide as their longest row; flattened ones are as long as their sum.
        patches: patches of every row that a vision tower with a grid computes, before they are merged into tokens,
            int64 [B]; None if there are none.

    Raises:
        LayoutError: an entry whose rows cannot be told for sure.
        TypeError: an entry that is neither a tensor nor a plain setting.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        *,
        trim_left_padding: bool = False,
        length_multiple: int = 1,
        media_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self._features = dict(features)
        if "cu_seq_lens_q" in features:
            layout = flattened_layout(features, _NEVER_INDEXED)
        else:
            layout = _padded_layout(self._features, trim_left_padding, length_multiple, media_tokens or {})
        self._axes = layout.axes
        self.count: int = layout.count
        self.lengths: Tensor | None = layout.lengths
        self.is_padded: bool = layout.is_padded
        self.patches: Tensor | None = layout.patches

    def take(self, rows: Tensor) -> dict[str, Any]:
        """The features of one mini-batch, padding trimmed.

        Args:
            rows: int64 [n] row indices on the CPU, any and in any order.

        Returns:
            A new feature dict for the model to consume. Entries over images or videos are missing if no row has any.
        """
        taken: dict[str, Any] = {}
        for key, value in self._features.items():
            part = self._axes[key].take(value, rows)
            if part is not None or value is None:
                taken[key] = part
        return taken


def _padded_layout(
    features: Mapping[str, Any], trim_left_padding: bool, length_multiple: int, media_tokens: Mapping[str, int]
) -> Layout:
    """The layout of features that hold rows x tokens, or no tokens at all."""
    axes: dict[str, Axis] = {key: Setting() for key, value in features.items() if _is_setting(key, value)}
    entries = {key: value for key, value in features.items() if key not in axes}
    if not any(isinstance(value, Tensor) for value in entries.values()):
        raise LayoutError(f"The inputs hold no tensor with rows, only {', '.join(map(repr, features)) or 'nothing'}.")
    layout = Layout(get_batch_size(entries), axes)
    tokens = next((entries[key] for key in ("input_ids", "inputs_embeds") if key in entries), None)
    if tokens is None:
        return _layout_without_tokens(layout, entries)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise LayoutError(
            f"input_ids must be padded to rows x tokens, got {described(tokens)}. Inputs of a StaticEmbedding (with "
            "offsets) have no rows to cut, and need no caching: use the plain loss."
        )
    width = tokens.shape[1]

    named = {key for key in entries if key in _TOKEN_KEYS or key in _COUNT_KEYS}
    media = collect_media(features, [key for key in entries if key not in named], layout.count, media_tokens)
    others = {key: value for key, value in entries.items() if key not in named}
    for one in media:
        others = {key: value for key, value in others.items() if key not in one.entries}

    # Everything that decides about the host's side of the layout, in one synchronisation.
    mask = _active_tokens(entries, width)
    to_read = {} if mask is None else _spans(mask)
    for one in media:
        to_read.update(one.to_read())
    host = to_host(to_read)

    one_item_a_row = True
    for one in media:
        items = one.items_of_rows(host)
        one_item_a_row &= bool((items == 1).all())
        media_axes, patches = one.axes(items, host)
        axes.update(media_axes)
        if patches is not None:
            layout.patches = patches if layout.patches is None else layout.patches + patches
    _check_others(others, layout.count, one_item_a_row)
    axes.update(dict.fromkeys(others, Rows()))

    # An unknown entry that may be over tokens forbids to trim: left whole, all stay in step.
    may_trim = not any(value.ndim >= 2 and value.shape[1] == width for value in others.values())
    token_axis: Axis = Rows()
    layout.lengths = torch.full((layout.count,), width)
    if mask is not None and may_trim:
        end = host["end"]
        first = host["first"] if trim_left_padding else torch.zeros_like(end)
        token_axis = Tokens(first, end, width, length_multiple)
        # Rows without an active token may be computed at the whole width.
        layout.lengths = torch.where(end == 0, width, token_axis.rounded(end - first))
    for key in named:
        _check_named(key, entries[key], layout.count, width)
        axes[key] = token_axis if key in _TOKEN_KEYS else Rows()
    if _COUNT_NOT_OF_ST in named:
        axes[_COUNT_NOT_OF_ST] = Unseen()
    return layout


def _layout_without_tokens(layout: Layout, entries: Mapping[str, Any]) -> Layout:
    """Images, clips or sounds alone: by ST's contract the first axis of every tensor is rows."""
    for key, value in entries.items():
        if not isinstance(value, Tensor) or len(value) != layout.count or key.endswith("_grid_thw"):
            raise LayoutError(
                f"Without input_ids every entry must hold one item for each of the {layout.count} rows, but {key} is "
                f"{described(value)}. Visual patches with a grid need the tokens that stand for them."
            )
        layout.axes[key] = Rows()
    mask = entries.get("attention_mask")
    if mask is not None and mask.ndim == 2:  # e.g. over the samples of a sound
        layout.lengths = torch.full((layout.count,), mask.shape[1])
    return layout


def _is_setting(key: str, value: Any) -> bool:
    if key in _NEVER_INDEXED or isinstance(value, (str, bool, int, float, type(None), dict)):
        return True
    if isinstance(value, Tensor):
        return value.ndim == 0
    if key == "modality" and isinstance(value, tuple):
        return True  # such as ("image", "text")
    if isinstance(value, (list, tuple, np.ndarray)):
        if key == "second_per_grid_ts":
            return False
        raise TypeError(
            f"The inputs have an entry {key!r} of type {type(value).__name__}, and whether it is one for each row "
            "cannot be told. Make it a tensor with rows on its first axis, or leave it out of the features."
        )
    return True


def _active_tokens(entries: Mapping[str, Any], width: int) -> Tensor | None:
    """bool [B, tokens]: what has to be computed; None if there is no mask over tokens."""
    mask = entries.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != width:
        return None
    # Positions of a query's expansion are scored although they are masked.
    expansion = entries.get("query_expansion_positions")
    return mask.bool() if expansion is None else mask.bool() | expansion.bool()


def _spans(active: Tensor) -> dict[str, Tensor]:
    """Of every row [B] its first active position, and its last + 1: (width, 0) if there is none.

    Read once, before any forward, because modules may change masks in place.
    """
    width = active.shape[1]
    from_left = torch.arange(1, width + 1, device=active.device, dtype=torch.int32)
    if not width:
        return {name: active.new_zeros(len(active), dtype=torch.int32) for name in ("first", "end")}
    return {
        "first": width - (active * from_left.flip(0)).amax(dim=1),
        "end": (active * from_left).amax(dim=1),
    }


def _check_named(key: str, value: Any, count: int, width: int) -> None:
    expected = [count, width] if key in _TOKEN_KEYS else [count]
    if not isinstance(value, Tensor) or list(value.shape[: len(expected)]) != expected:
        raise LayoutError(
            f"{key} must begin with the axes {expected} (rows{' x tokens' if len(expected) > 1 else ''}) of these "
            f"inputs, got {described(value)}. Leave it out of the features if the model can do without."
        )


def _check_others(others: Mapping[str, Any], count: int, one_item_a_row: bool) -> None:
    """Entries of no known name: beside text they are over rows (so ST slices them), beside media they may be over
    images as well, unless that is the same."""
    for key, value in others.items():
        known = "its first axis may be rows or images" if not one_item_a_row else f"there are {count} rows"
        if key in _NEVER_ROWS or not one_item_a_row or not isinstance(value, Tensor) or len(value) != count:
            raise LayoutError(
                f"The inputs have an entry {key!r} ({described(value)}) that is not known, and {known}: it cannot be "
                "cut into mini-batches. Leave it out of the features, or make it a plain setting (a str or number)."
            )
