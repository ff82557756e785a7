"""Cached losses under every engine: how far a step is from one process, what it communicates, and what it takes.

    python -m tests.benchmarks.engines                    # the whole matrix on 2 gloo ranks
    python -m tests.benchmarks.engines --ranks 4 --families infonce
    python -m tests.benchmarks.engines --times --ranks 1 2

The matrix: engine x loss x accumulation x even or uneven rows x all or some rows differentiated x reduced for every
mini-batch or once. A cell is two SGD steps of a tiny model; its errors are relative L2 distances of what the steps
changed, and of the parameters, to one process in fp32. DeepSpeed's shared-memory collectives are off.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from st_cached_extras.losses import CachedInfoNCELoss
from st_cached_extras.testing.engines import ENGINES, check_wrapped, forget_engine, make_accelerator
from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model
from tests.benchmarks.measure import header, table
from tests.distributed.engine_cases import UNEVEN, Case, check_cases
from tests.distributed.loss_families import FAMILIES

EVEN = (9, 9, 9, 9)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--times", action="store_true", help="time steps instead")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def cases_of(engine: str, families: list[str]) -> dict[str, Case]:
    """The cells of one engine by their names."""
    cases = {}
    for family, accumulation, rows, selected, deferred in itertools.product(
        families, (1, 2), (EVEN, UNEVEN), (False, True), (False, True)
    ):
        if deferred and engine in ("ddp", "zero1"):  # which defer anyway
            continue
        loss: dict[str, Any] = {"mini_batch_size": 3, "defer_reduction": deferred}
        if selected:
            loss["differentiated_samples"] = 4
        name = " ".join(
            (
                family,
                f"accumulation {accumulation}",
                "even" if rows is EVEN else "uneven",
                "4 rows" if selected else "all rows",
                "deferred" if deferred else "default",
            )
        )
        # Ranks with unlike row counts weigh their rows unlike: one process would not.
        gather = not (selected and rows is UNEVEN)
        cases[name] = Case(engine, rows, gather, accumulation, family, loss)
    return cases


def print_matrix(arguments: argparse.Namespace, ranks: int) -> None:
    """A row for every engine and mode, as soon as it is known; every family has ranks of its own."""
    head = [
        f"{ranks} ranks",
        "cells",
        "worst error of the parameters",
        "of the change",
        "reductions of a step of 6 mini-batches",
        "share of the parameters held",
    ]
    print(table(head, []), flush=True)
    for engine in arguments.engines:
        found = {}
        for family in arguments.families:
            found |= run_on_ranks(
                check_cases, ranks, cases_of(engine, [family]), timeout=3000, collective_timeout=600
            )[0]
        for mode in ("default", "deferred"):
            cells = {name: cell for name, cell in found.items() if name.endswith(mode)}
            if not cells:
                continue
            step = found[f"{arguments.families[0]} accumulation 1 even all rows {mode}"]
            row = [
                f"{engine}, {mode}",
                len(cells),
                f"{max(max(cell['parameters']) for cell in cells.values()):.1e}",
                f"{max(max(cell['change'] + cell['own change']) for cell in cells.values()):.1e}",
                sum(step["reductions"][0].values()) or "in C++",
                f"{step['share']:.2f}",
            ]
            print_row(head, row)


def seconds_of_a_step(engine: str, steps: int) -> float:
    """Median wall seconds of a step of 32 rows a rank in mini-batches of 8, forward to optimizer."""
    forget_engine()
    model = tiny_text_model(hidden=128, layers=4)
    model[0].model.pooler = None
    loss = CachedInfoNCELoss(model, mini_batch_size=8, gather_across_devices=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = model
    if engine == "plain":
        backward = torch.Tensor.backward
    else:
        sizes = ["reduce_bucket_size"]
        if engine == "zero3":
            sizes += ["stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
        zero_options = dict.fromkeys(sizes, 100_000) if engine.startswith("zero") else {}
        accelerator = make_accelerator(engine, **zero_options)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        check_wrapped(wrapped, engine)
        backward = accelerator.backward
        loss.model = wrapped
    rank = dist.get_rank()
    texts = [random_sentences(32, 10 * rank + column, 40) for column in range(2)]
    times = []
    for _ in range(steps + 1):
        columns = [model.preprocess(column) for column in texts]
        begin = time.perf_counter()
        backward(loss(columns, None))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def print_times(arguments: argparse.Namespace) -> None:
    """A row for every engine, as soon as it is known."""
    plain = run_on_ranks(seconds_of_a_step, 1, "plain", arguments.steps)[0]
    head = ["seconds a step, 32 rows a rank", *(f"{ranks} rank(s)" for ranks in arguments.ranks)]
    print(table(head, [["one process", f"{plain:.2f}", *[""] * (len(arguments.ranks) - 1)]]), flush=True)
    for engine in arguments.engines:
        row = [engine]
        for ranks in arguments.ranks:
            slowest = max(run_on_ranks(seconds_of_a_step, ranks, engine, arguments.steps, timeout=600))
            row.append(f"{slowest:.2f} ({slowest / plain:.2f} x)")
        print_row(head, row)


def print_row(head: list[str], row: list[object]) -> None:
    """One line of a Markdown table whose head is printed."""
    print(table(head, [row]).splitlines()[-1], flush=True)


def main() -> None:
    arguments = parse_arguments()
    print(header(), flush=True)
    if arguments.times:
        print_times(arguments)
        return
    for ranks in arguments.ranks:
        print_matrix(arguments, ranks)


if __name__ == "__main__":
    main()
