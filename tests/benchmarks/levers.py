"""What each lever is worth: a step with all of them, and with each off on its own.

    python -m tests.benchmarks.levers --batch_size 2048 --wordnet /usr/share/wordnet
    python -m tests.benchmarks.levers --batch_size 256 --mini_batch_size 8 --vocabulary_size 150000 --by_rows \\
        --levers "word-embedding gradients by rows" --wordnet /usr/share/wordnet
    python -m tests.benchmarks.levers --table directions --batch_size 4096

The first two: CPU-seconds of a whole step of MiniLM's architecture, medians of sides that take turns in one run, and
how far the gradients of all parameters are from those with all levers (relative L2: the order of summation differs).
Mini-batches are filled up to mini-batch size x longest row tokens, what the largest mini-batch of rows as they come
computes; ``--by_rows`` takes the mini-batch size as rows instead.

The third: the loss stage alone in several directions, with each product of features made once for both, or not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from st_cached_extras import CachedInfoNCELoss, CachedLoss
from st_cached_extras.levers import without
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.objectives.infonce import DIRECTIONS
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.loss_stage import make_pairs
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn

ALL = "all levers"
LEVERS = (
    "mini-batches filled by tokens",
    "rows sorted by length",
    "word-embedding gradients by rows",
    "the loss in closed form",
)
SEVERAL_DIRECTIONS = (
    (("query_to_doc", "doc_to_query"), "per_direction"),
    (("query_to_doc", "doc_to_query"), "joint"),
    (DIRECTIONS, "joint"),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=("step", "directions"), default="step")
    parser.add_argument("--batch_size", type=int, default=2048)
    parser.add_argument("--mini_batch_size", type=int, default=32)
    parser.add_argument("--by_rows", action="store_true", help="mini-batches of so many rows, not filled by tokens")
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=None, help="to switch off; default: all")
    parser.add_argument("--vocabulary_size", type=int, default=30522)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=384, help="of the table of directions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm_ups", type=int, default=1)
    add_arguments(parser)
    return parser.parse_args()


Side = tuple[nn.Module, Callable[[], AbstractContextManager]]


def make_sides(arguments: argparse.Namespace, model: SentenceTransformer, longest: int) -> dict[str, Side]:
    """Losses, and what they run in, by what is off."""
    rows = {"mini_batch_size": arguments.mini_batch_size}
    sizes = rows if arguments.by_rows else {"mini_batch_num_tokens": arguments.mini_batch_size * longest}
    loss = CachedInfoNCELoss(model, **sizes)
    off = {
        "mini-batches filled by tokens": (CachedInfoNCELoss(model, **rows), nullcontext),
        "rows sorted by length": (CachedInfoNCELoss(model, **sizes, sort_by_length=False), nullcontext),
        "word-embedding gradients by rows": (loss, partial(without, "embedding_rows")),
        "the loss in closed form": (CachedLoss(MultipleNegativesRankingLoss(model), **sizes), nullcontext),
    }
    chosen = arguments.levers or [name for name in LEVERS if not (arguments.by_rows and "filled" in name)]
    return {ALL: (loss, nullcontext), **{f"without {name}": off[name] for name in chosen}}


def gradient(side: Side, model: SentenceTransformer, columns: list[dict[str, Tensor]]) -> Tensor:
    """All parameter gradients of one step, flat."""
    loss, context = side
    model.zero_grad()
    with context():
        loss([dict(column) for column in columns], None).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def step_table(arguments: argparse.Namespace) -> str:
    pairs, vocabulary = load_pairs(arguments, arguments.batch_size)
    model = minilm(vocabulary, arguments.layers, vocabulary_size=arguments.vocabulary_size)
    columns = columns_of(model, pairs)
    longest = max(int(column["attention_mask"].sum(1).max()) for column in columns)
    sides = make_sides(arguments, model, longest)
    gradients: dict[str, Tensor] = {}

    def step(name: str) -> None:
        gradients[name] = gradient(sides[name], model, columns)

    times = time_in_turn({name: partial(step, name) for name in sides}, arguments.repeats, warm_ups=arguments.warm_ups)
    rows = []
    for name, (cpu, wall) in times.items():
        error = (gradients[name] - gradients[ALL]).norm() / gradients[ALL].norm()
        rows.append([name, f"{cpu:.2f}", f"{wall:.2f}", f"{cpu / times[ALL][0]:.2f}", f"{error:.0e}"])
    return table(["step", "CPU-s", "wall s", "of all levers", "gradients differ by"], rows)


def directions_table(arguments: argparse.Namespace) -> str:
    features = make_pairs(arguments.batch_size, arguments.dim, noise=2.0)
    rows = []
    for directions, partition_mode in SEVERAL_DIRECTIONS:
        objective = InfoNCE(directions=directions, partition_mode=partition_mode)
        found: dict[str, Tensor] = {}

        def stage(name: str, context: Callable, objective=objective, found=found) -> None:
            with context():
                found[name] = torch.cat(list(objective.value_and_cotangents(features).cotangents.values()))

        sides = {
            "shared": partial(stage, "shared", nullcontext),
            "each": partial(stage, "each", partial(without, "symmetric_products")),
        }
        times = time_in_turn(sides, arguments.repeats, warm_ups=arguments.warm_ups)
        shared, each = times["shared"][0], times["each"][0]
        error = (found["shared"] - found["each"]).norm() / found["each"].norm()
        name = f"{len(directions)} directions, {partition_mode}"
        rows.append([name, f"{shared:.3f}", f"{each:.3f}", f"{each / shared:.2f}", f"{error:.0e}"])
    head = ["loss stage", "products shared, CPU-s", "each its own, CPU-s", "ratio", "gradients differ by"]
    return table(head, rows)


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    print(header())
    print({"step": step_table, "directions": directions_table}[arguments.table](arguments))


if __name__ == "__main__":
    main()
