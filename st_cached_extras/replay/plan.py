"""Which rows share a mini-batch.

A mini-batch of padded text costs rows x longest row, so rows of like length belong together: sorting by length makes
the padding vanish. The plan is made once, before any forward; the features return to row order before the objective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Most rows that a token budget puts into one mini-batch. A budget counts tokens, but very short rows cost more than
# theirs: attention kernels work in tiles of 64 and more positions per row and head, and pooling, masks and outputs are
# per row. At 1024 rows a launch is long amortised, so nothing is lost. It does not depend on mini_batch_size, which ST
# ignores under a budget, too.
MOST_ROWS_WITHIN_BUDGET = 1024


def plan_mini_batches(
    count: int,
    lengths: Tensor | None,
    *,
    mini_batch_size: int,
    mini_batch_num_tokens: int | None = None,
    sort_by_length: bool = True,
    is_padded: bool = True,
    patches: Tensor | None = None,
) -> list[Tensor]:
    """Partition rows 0..count-1 into mini-batches.

    Args:
        count: number of rows.
        lengths: tokens computed for every row, int64 [count] on the CPU, or None if the rows have none.
        mini_batch_size: most rows in a mini-batch. With a token budget it is ignored, as in sentence-transformers.
        mini_batch_num_tokens: token budget of a mini-batch, counted as what is computed: rows x longest row on padded
            inputs, the sum of the rows on flattened ones, and the visual patches in either. At most
            :data:`MOST_ROWS_WITHIN_BUDGET` rows; a row beyond the budget forms its own mini-batch.
        sort_by_length: longest rows first (so that the costliest mini-batch shows at once whether it fits); rows of
            equal length keep their order. Without it, or without ``lengths``, rows stay in order. So do flattened
            ones: they have no padding to save, and in order their mini-batches are of like size.
        is_padded: whether a mini-batch is as wide as its longest row.
        patches: visual patches of every row, int64 [count], which are computed beside its tokens; None for none.

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
    if lengths is not None and sort_by_length and is_padded:
        order = lengths.argsort(descending=True, stable=True)
    else:
        order = torch.arange(count)
    if mini_batch_num_tokens is None or lengths is None:
        return list(order.split(mini_batch_size))
    in_order = lengths[order]
    widths, own = (in_order, torch.zeros_like(in_order)) if is_padded else (torch.zeros_like(in_order), in_order)
    if patches is not None:
        own = own + patches[order]
    return list(order.split(_sizes_within_budget(widths, own, mini_batch_num_tokens)))


def plan_selected_first(
    count: int,
    lengths: Tensor | None,
    selected: Tensor | None,
    *,
    patches: Tensor | None = None,
    **settings: Any,
) -> tuple[list[Tensor], int]:
    """Mini-batches that are wholly of selected rows or wholly of others.

    Args:
        count: number of rows.
        lengths: tokens computed for every row, int64 [count], or None.
        selected: int64 [b] ascending rows, or None for all.
        patches: visual patches of every row, int64 [count], or None.
        settings: of :func:`plan_mini_batches`.

    Returns:
        The plan, selected rows first, and how many of its mini-batches hold them.
    """
    if selected is None or len(selected) == count:
        plan = plan_mini_batches(count, lengths, patches=patches, **settings)
        return plan, len(plan)
    is_selected = torch.zeros(count, dtype=torch.bool).index_fill_(0, selected, True)
    plans = []
    for group in (selected, (~is_selected).nonzero().flatten()):
        of_group = {
            name: None if values is None else values[group]
            for name, values in (("lengths", lengths), ("patches", patches))
        }
        plans.append([group[mini_batch] for mini_batch in plan_mini_batches(len(group), **of_group, **settings)])
    return plans[0] + plans[1], len(plans[0])


def _sizes_within_budget(widths: Tensor, own: Tensor, budget: int) -> list[int]:
    """Greedy runs of consecutive rows with (rows x widest + sum of own) <= budget, and at least one row each."""
    before = torch.nn.functional.pad(own.cumsum(0), (1, 0))  # [rows + 1]
    sizes: list[int] = []
    begin = 0
    while begin < len(widths):
        end = min(begin + MOST_ROWS_WITHIN_BUDGET, len(widths))
        widest = widths[begin:end].cummax(0).values
        cost = torch.arange(1, end - begin + 1) * widest + before[begin + 1 : end + 1] - before[begin]  # never falls
        sizes.append(max(1, int((cost <= budget).sum())))
        begin += sizes[-1]
    return sizes
