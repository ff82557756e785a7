"""What the ranks of test_engines.py run: an optimizer's step under an engine, beside the same step in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.distributed.engines import engine_of
from st_cached_extras.testing.engines import (
    check_wrapped,
    forget_engine,
    local_elements,
    make_accelerator,
    whole_parameters,
)
from st_cached_extras.testing.tiny_models import (
    random_clips,
    random_sentences,
    relative_error,
    tiny_text_model,
    tiny_two_tower_model,
)

LEARNING_RATE = 0.3


@dataclass
class Case:
    """One comparison.

    Attributes:
        engine: one of :data:`~st_cached_extras.testing.engines.ENGINES`.
        rows: rows of every rank.
        gather: one global loss, or the mean of local ones.
        accumulation: batches before the optimizer's step.
        loss: options of the cached loss alone.
        towers: a Router of text and video instead of one text model; "frozen" freezes the video tower.
        options: of DeepSpeed's ZeRO.
        steps: of the optimizer.
    """

    engine: str
    rows: tuple[int, ...] = (12, 12, 12, 12)
    gather: bool = True
    accumulation: int = 1
    loss: dict[str, Any] = field(default_factory=lambda: {"mini_batch_size": 4})
    towers: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2


UNEVEN = (12, 5, 9, 7)


def make_model(case: Case) -> nn.Module:
    if not case.towers:
        model = tiny_text_model()
        model[0].model.pooler = None  # mean pooling leaves it without a gradient
        return model
    model = tiny_two_tower_model()
    model[0].sub_modules["text"][0].model.pooler = None
    if case.towers == "frozen":
        model[0].sub_modules["video"].requires_grad_(False)
    return model


def make_columns(case: Case, model: nn.Module, ranks: list[int], batch: int) -> list[dict]:
    """The columns of some ranks' rows together. Inputs of a rank depend on the rank and the batch alone."""
    seeds = [1000 * batch + 100 * rank for rank in ranks]
    columns = []
    for column in range(1 if case.towers else 2):
        # Lengths differ between ranks too, so that token budgets give them different numbers of mini-batches.
        texts = [random_sentences(case.rows[r], s + column, 6 + 5 * r) for r, s in zip(ranks, seeds, strict=True)]
        columns.append(model.preprocess([text for of_rank in texts for text in of_rank]))
    if case.towers:
        clips = [random_clips(case.rows[r], seed) for r, seed in zip(ranks, seeds, strict=True)]
        columns.append(model.preprocess([clip for of_rank in clips for clip in of_rank]))
    return columns


def make_loss(case: Case, model: nn.Module, gather: bool) -> CachedInfoNCELoss:
    return CachedInfoNCELoss(model, **case.loss, gather_across_devices=gather)


class _TheRanksDraws(CachedInfoNCELoss):
    """In one process, the rows that the ranks would draw of the rows that each would have."""

    counts: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def select_rows(self, count: int, rank: int) -> Tensor:
        drawn, begin = [], 0
        for rank, of_rank in zip(self.ranks, self.counts, strict=True):
            drawn.append(begin + super().select_rows(of_rank, rank))
            begin += of_rank
        return torch.cat(drawn)


def run_in_one_process(case: Case, world_size: int) -> list[dict[str, Tensor]]:
    """Parameters after every SGD step of one process that has the rows of all ranks."""
    model = make_model(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    groups = [list(range(world_size))] if case.gather else [[rank] for rank in range(world_size)]
    losses = []
    for group in groups:
        loss = _TheRanksDraws(model, **case.loss)
        loss.ranks, loss.counts = tuple(group), tuple(case.rows[rank] for rank in group)
        losses.append(loss)
    after = []
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in range(case.accumulation):
            for group, loss in zip(groups, losses, strict=True):
                columns = make_columns(case, model, group, case.accumulation * step + batch)
                (loss(columns, None) / (len(groups) * case.accumulation)).backward()
        optimizer.step()
        after.append(whole_parameters(model))
    return after


def run_on_ranks(case: Case) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Parameters after every SGD step under the engine, and what was seen on the way."""
    model = make_model(case)
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = ("BertLayer", "VideoMAELayer") if case.towers else ("BertLayer",)
    accelerator = make_accelerator(case.engine, layers=layers, accumulation=case.accumulation, **case.options)
    loss = make_loss(case, model, case.gather)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    rank, after, reductions = dist.get_rank(), [], []
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    check_wrapped(wrapped, case.engine)
    loss.model = wrapped
    for step in range(case.steps):
        for batch in range(case.accumulation):
            columns = make_columns(case, model, [rank], case.accumulation * step + batch)
            with accelerator.accumulate(wrapped), counting_reductions() as counted:
                accelerator.backward(loss(columns, None))
                optimizer.step()
                optimizer.zero_grad()
            reductions.append(counted)
        after.append(whole_parameters(wrapped))
    seen = {
        "engine": type(engine_of(wrapped)).__name__,
        "share": local_elements(wrapped) / total,
        "reductions": [dict(counted) for counted in reductions],
    }
    return after, seen


REDUCTIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce_scatter",
    "all_to_all_single",
)


@contextmanager
def counting_reductions() -> Iterator[Counter]:
    """Counts reductions of floating-point tensors, by the name of the call."""
    counted: Counter = Counter()
    modules = [dist, dist.distributed_c10d]
    saved = {
        (module, name): getattr(module, name) for module in modules for name in REDUCTIONS if hasattr(module, name)
    }

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(x for x in (*args, *kwargs.values()) if torch.is_tensor(x) or isinstance(x, list))
            if isinstance(tensor, list) or (tensor.is_floating_point() and tensor.numel() > 1):
                counted[name] += 1
            return function(*args, **kwargs)

        return call

    for (module, name), function in saved.items():
        setattr(module, name, counting(name, function))
    try:
        yield counted
    finally:
        for (module, name), function in saved.items():
            setattr(module, name, function)


def check_case(case: Case) -> dict[str, Any]:
    """Relative L2 distances to one process after every step, of the parameters and of what the steps changed."""
    forget_engine()
    expected = run_in_one_process(case, dist.get_world_size())
    start = whole_parameters(make_model(case))
    found, seen = run_on_ranks(case)
    change = lambda after: {name: after[name] - start[name] for name in start}  # noqa: E731
    return {
        "parameters": [relative_error(a, b) for a, b in zip(found, expected, strict=True)],
        "change": [relative_error(change(a), change(b)) for a, b in zip(found, expected, strict=True)],
        "checksum": float(sum(value.double().sum() for value in found[-1].values())),
        **seen,
    }


def check_cases(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    return {name: check_case(case) for name, case in cases.items()}
