"""A compiled model inside the loss: what compiling costs, what it gains, and where the graph breaks.

    python -m tests.benchmarks.compiled --batch_size 512 --wordnet /usr/share/wordnet

A step of MiniLM's architecture as it is and through ``torch.compile``, which is told nothing. The first step compiles;
then both sides take turns. Every graph break is printed with its reason and the line that it comes from.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from torch import nn

from st_cached_extras import CachedInfoNCELoss
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--mini_batch_size", type=int, default=32)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    add_arguments(parser)
    return parser.parse_args()


def graph_breaks(model: nn.Module, features: dict) -> list[str]:
    """Reason and line of each."""
    explained = torch._dynamo.explain(model)(dict(features))
    lines = [f"{explained.graph_count} graph(s), {explained.graph_break_count} break(s)"]
    for reason in explained.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        where = "" if frame is None else f" at {frame.filename}:{frame.lineno}: {frame.line}"
        lines.append(f"- {reason.reason.splitlines()[0]}{where}")
    return lines


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    pairs, vocabulary = load_pairs(arguments, arguments.batch_size)
    eager = minilm(vocabulary, arguments.layers)
    columns = columns_of(eager, pairs)
    inside = copy.deepcopy(eager)
    compiled = torch.compile(inside, backend=arguments.backend)
    print(header())
    print("\n".join(graph_breaks(copy.deepcopy(eager), columns[0])) + "\n")

    def step(model: nn.Module) -> None:
        model.zero_grad()
        loss = CachedInfoNCELoss(model, mini_batch_size=arguments.mini_batch_size)
        loss([dict(column) for column in columns], None).backward()

    first = time.perf_counter()
    step(compiled)
    first = time.perf_counter() - first
    sides = {"as it is": lambda: step(eager), "compiled": lambda: step(compiled)}
    times = time_in_turn(sides, arguments.repeats)
    pairs_of_gradients = zip(eager.parameters(), inside.parameters(), strict=True)
    flat = [(a.grad.flatten(), b.grad.flatten()) for a, b in pairs_of_gradients if a.grad is not None]
    truth, found = (torch.cat(side) for side in zip(*flat, strict=True))
    error = (found - truth).norm() / truth.norm()
    rows = [
        ["as it is", "", *(f"{x:.2f}" for x in times["as it is"]), "1.00", ""],
        [
            f"compiled ({arguments.backend})",
            f"{first:.1f}",
            *(f"{x:.2f}" for x in times["compiled"]),
            f"{times['compiled'][0] / times['as it is'][0]:.2f}",
            f"{error:.0e}",
        ],
    ]
    head = ["model", "first step, wall s", "CPU-s", "wall s", "of the model as it is", "gradients differ by"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
