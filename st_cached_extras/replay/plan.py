"""Which rows share a mini-batch.

A mini-batch of padded text costs rows x longest row, so rows of like length belong together: sorting by length makes
the padding vanish. The plan is made once, before any forward; the features return to row order before the objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def plan_mini_batches(
    count: int,
    lengths: Sequence[int] | None,
    *,
    mini_batch_size: int,
    mini_batch_num_tokens: int | None = None,
    sort_by_length: bool = True,
) -> list[Tensor]:
    """Partition rows 0..count-1 into mini-batches.

    Args:
        count: number of rows.
        lengths: computed width of every row (its last active position + 1), or None if the rows have no length or
            must stay in order.
        mini_batch_size: most rows in a mini-batch. With a token budget it is ignored, as in sentence-transformers.
        mini_batch_num_tokens: token budget of a mini-batch, counted as what is computed: rows x longest row. A row
            longer than the budget forms its own mini-batch.
        sort_by_length: longest rows first (so that the costliest mini-batch shows at once whether it fits); rows of
            equal length keep their order. Without it, or without ``lengths``, rows stay in order.

    Returns:
        int64 row indices, one tensor [n] per mini-batch; every row exactly once.

    Raises:
        ValueError: a token budget without lengths.
    """
    if mini_batch_num_tokens is not None and lengths is None:
        raise ValueError(
            f"mini_batch_num_tokens={mini_batch_num_tokens} needs the length of every row, and these inputs have none "
            "(no attention mask over rows x tokens was found). Use mini_batch_size instead."
        )
    if lengths is not None and sort_by_length:
        order = torch.tensor(lengths).argsort(descending=True, stable=True)
    else:
        order = torch.arange(count)
    if mini_batch_num_tokens is None or lengths is None:
        return list(order.split(mini_batch_size))
    return list(order.split(_sizes_within_budget([lengths[row] for row in order.tolist()], mini_batch_num_tokens)))


def _sizes_within_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Greedy runs of consecutive rows with (rows x longest) <= budget, and at least one row each."""
    sizes: list[int] = []
    size, longest = 0, 0
    for length in lengths:
        longest = max(longest, length)
        if size and (size + 1) * longest > budget:
            sizes.append(size)
            size, longest = 0, length
        size += 1
    return [*sizes, size] if size else sizes
