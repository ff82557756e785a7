"""Images, videos and audio clips of rows of text: how many each row has, and which entries are theirs.

Processors put the media of a batch one after another: one tensor per image, or all visual patches in one tensor with
a grid [time, height, width] per item. Which rows they are of follows from the number of items of every row, which ST
counts (``num_images_per_sample``, ``num_videos_per_sample``) where it can. Where it does not, one item a row is
accepted only if every row is known to have at least one: then B items for B rows leave no other reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from st_cached_extras.replay.axes import Axis, LayoutError, Rows, RowsWithItems, Segments, described
from st_cached_extras.replay.media import MEDIA, TOKEN_TYPES_KEY, Medium, medium_of

_BATCH_NUM_IMAGES = "batch_num_images"
# The tensor per sample that marks processors which fill up every row to equally many images, and the axes of it and
# of their pixel_values: Idefics3 [B, images, height, width], Mllama [B, images].
_MARKS_OF_IMAGES_PER_SAMPLE = {"pixel_attention_mask": (4, 5), "aspect_ratio_ids": (2, 6)}


@dataclass
class Media:
    """The items of one medium in a batch of ``count`` rows.

    Args:
        medium: which one.
        entries: the entries of the feature dict that belong to it.
        features: the whole feature dict.
        count: number of rows B.
        tokens: token ids that stand for a medium, by name, where known.
    """

    medium: Medium
    entries: dict[str, Any]
    features: Mapping[str, Any]
    count: int
    tokens: Mapping[str, int] = field(default_factory=dict)

    def to_read(self) -> dict[str, Tensor]:
        """Small tensors that :meth:`axes` needs on the host, by name."""
        read: dict[str, Tensor] = {}
        name, counts, grid = self.medium.name, self.features.get(self.medium.count_key), self._grid()
        if counts is not None:
            if not isinstance(counts, Tensor) or list(counts.shape) != [self.count]:
                raise LayoutError(
                    f"{self.medium.count_key} must hold the number of {name}s of each of the {self.count} rows "
                    f"[{self.count}], got {described(counts)}."
                )
            read[f"{name} counts"] = counts
        elif (stands := self._stands_in_rows()) is not None:
            read[f"{name} in row"] = stands
        if grid is not None:
            read[f"{name} patches"] = grid.prod(dim=1)
        if (mark := self._mark_of_items_per_sample()) is not None:
            # The images that each row is filled up with have zeros there.
            shown = self.entries[mark].reshape(*self.entries[mark].shape[:2], -1) != 0  # [B, images, ...]
            read[f"{name} shown"] = shown.any(dim=2).sum(dim=1)
        if isinstance(images_of_rows := self.entries.get(_BATCH_NUM_IMAGES), Tensor):
            read[_BATCH_NUM_IMAGES] = images_of_rows
        return read

    def _grid(self) -> Tensor | None:
        grid = self.entries.get(self.medium.grid_key)
        if grid is not None and not (isinstance(grid, Tensor) and grid.ndim == 2 and grid.shape[1] == 3):
            raise LayoutError(
                f"{self.medium.grid_key} must be [items, 3], the patches in time, height and width of every "
                f"{self.medium.name}, got {described(grid)}."
            )
        return grid

    def _stands_in_rows(self) -> Tensor | None:
        """bool [B]: whether a token of the row stands for an item; None if that is not known."""
        types, ids = self.features.get(TOKEN_TYPES_KEY), self.features.get("input_ids")
        if isinstance(types, Tensor) and types.ndim == 2:
            return (types == self.medium.token_type).any(dim=1)
        if isinstance(ids, Tensor) and ids.ndim == 2 and self.medium.name in self.tokens:
            return (ids == self.tokens[self.medium.name]).any(dim=1)
        return None

    def items_of_rows(self, host: Mapping[str, Tensor]) -> Tensor:
        """int64 [B]: the number of items of every row.

        Raises:
            LayoutError: it can neither be read nor be concluded.
        """
        name = self.medium.name
        for source in (f"{name} counts", f"{name} shown"):
            if source in host:
                return host[source]
        modality = self.features.get("modality")
        every_row_has_one = name in ((modality,) if isinstance(modality, str) else modality or ())
        every_row_has_one |= bool(host.get(f"{name} in row", torch.tensor(False)).all())
        key, value = self._counted_entry()
        if every_row_has_one and len(value) == self.count:
            return torch.ones(self.count, dtype=torch.int64)
        raise LayoutError(
            f"The inputs hold {name}s beside text ({key}: {described(value)}), but not how many each of the "
            f"{self.count} rows has, and it cannot be concluded. Add to the features the int64 tensor "
            f"{self.medium.count_key} [{self.count}], or give every row exactly one {name}."
        )

    def _counted_entry(self) -> tuple[str, Any]:
        for key in (self.medium.grid_key, self.medium.pixel_key, *self.entries):
            if key in self.entries:
                return key, self.entries[key]
        raise AssertionError("media without entries")

    def axes(self, items: Tensor, host: Mapping[str, Tensor]) -> tuple[dict[str, Axis], Tensor | None]:
        """How every entry is cut.

        Args:
            items: int64 [B], as from :meth:`items_of_rows`.
            host: what :meth:`to_read` asked for.

        Returns:
            The axes by key, and the patches of every row, int64 [B], where there is a grid.

        Raises:
            LayoutError: an entry that does not fit the number of items, or whose axes cannot be told.
        """
        if f"{self.medium.name} shown" in host:
            return self._axes_of_items_per_sample(host[f"{self.medium.name} shown"]), None
        per_item = Segments.of(items)
        axes: dict[str, Axis] = {}
        patches = None
        for key, value in self.entries.items():
            if key == self.medium.pixel_key and self.medium.grid_key in self.entries:
                of_items = host[f"{self.medium.name} patches"]
                before = torch.nn.functional.pad(of_items.cumsum(0), (1, 0))  # [items + 1]
                self._check_total(self.medium.grid_key, len(of_items), items)
                starts = before[per_item.starts]
                patches = before[per_item.starts + items] - starts
                if len(value) != int(before[-1]):
                    raise LayoutError(
                        f"{key} must hold the {int(before[-1])} patches that {self.medium.grid_key} counts, got "
                        f"{described(value)}."
                    )
                axes[key] = Segments(starts, patches)
            elif key == _BATCH_NUM_IMAGES:
                axes[key] = self._axis_of_batch_num_images(items, host)
            elif key in (self.medium.pixel_key, self.medium.grid_key, *self.medium.item_keys):
                self._check_total(key, len(value), items)
                self._check_it_is_not_per_sample(key, value, items)
                axes[key] = per_item
            elif bool((items == 1).all()) and isinstance(value, Tensor) and len(value) == self.count:
                axes[key] = Rows()  # one item in every row: whatever it counts, row r's entry is entry r
            else:
                raise LayoutError(
                    f"The inputs have an entry {key!r} ({described(value)}) beside {int(items.sum())} "
                    f"{self.medium.name}s in {self.count} rows, and which of it belongs to which row is not known. "
                    f"Leave it out of the features, or give every row exactly one {self.medium.name}."
                )
        return axes, patches

    def _mark_of_items_per_sample(self) -> str | None:
        pixels = self.entries.get(self.medium.pixel_key)
        for mark, axes in _MARKS_OF_IMAGES_PER_SAMPLE.items():
            if mark in self.entries and isinstance(pixels, Tensor) and axes == (self.entries[mark].ndim, pixels.ndim):
                return mark
        return None

    def _axes_of_items_per_sample(self, shown: Tensor) -> dict[str, Axis]:
        if wrong := [key for key, value in self.entries.items() if len(value) != self.count]:
            raise LayoutError(
                f"With {self._mark_of_items_per_sample()} every visual entry is per row, but {wrong[0]} is "
                f"{described(self.entries[wrong[0]])} for {self.count} rows."
            )
        # Idefics3 fails on rows of fillings alone: the key must vanish as if the batch had no images.
        return {key: RowsWithItems(shown) for key in self.entries}

    def _axis_of_batch_num_images(self, items: Tensor, host: Mapping[str, Tensor]) -> Axis:
        # LLaVA-OneVision's processor: one entry per row that has images (ST slices it as if per row), and all ones if
        # the images came without rows.
        found = host[_BATCH_NUM_IMAGES]
        has_images = (items > 0).long()
        if torch.equal(found, items[items > 0]):
            return Segments.of(has_images)
        if torch.equal(found, torch.ones(int(items.sum()), dtype=torch.int64)):
            return Segments.of(items)
        raise LayoutError(
            f"{_BATCH_NUM_IMAGES} is {found.tolist()}, which does not fit the images of the rows, {items.tolist()}."
        )

    def _check_total(self, key: str, found: int, items: Tensor) -> None:
        if found != int(items.sum()):
            source = self.medium.count_key if self.medium.count_key in self.features else "one a row"
            raise LayoutError(
                f"{key} holds {found} entries, but the {self.count} rows have {int(items.sum())} {self.medium.name}s "
                f"({source}), so its rows cannot be told. If {self.medium.name}s are split into several (crops, "
                "tiles, frames), switch that off in the processor."
            )

    def _check_it_is_not_per_sample(self, key: str, value: Any, items: Tensor) -> None:
        """As many images as rows, not one a row, and an axis more than an image has: both readings are possible."""
        if key != self.medium.pixel_key or self.medium.name != "image" or value.ndim <= 4:
            return
        if len(value) == self.count and not bool((items == 1).all()) and "image_sizes" not in self.entries:
            raise LayoutError(
                f"{key} is {described(value)} for {self.count} rows with {items.tolist()} images: its first axis may "
                "be rows or images. Use batches in which every row has exactly one image."
            )


def collect_media(
    features: Mapping[str, Any], keys: Iterable[str], count: int, tokens: Mapping[str, int]
) -> list[Media]:
    """The media among the entries ``keys`` of a feature dict."""
    entries: dict[str, dict[str, Any]] = {}
    for key in keys:
        if (medium := medium_of(key)) is not None:
            entries.setdefault(medium.name, {})[key] = features[key]
    return [Media(medium, entries[medium.name], features, count, tokens) for medium in MEDIA if medium.name in entries]
