"""What planning and row access cost beside the step that they are part of.

    python -m tests.benchmarks.plan --batch_size 16384 --wordnet /usr/share/wordnet

Prints, as medians, the CPU-seconds of reading the lengths and planning the mini-batches of a whole batch, of taking
the rows of every mini-batch twice (once per pass), and of a step. The step is measured on ``--step_rows`` random rows
of the batch and scaled by the rows: embedding is linear in them. The loss stage is not, it grows with their square,
so the true step is longer and the true share smaller than the one printed.
"""

from __future__ import annotations

import argparse

import torch

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.replay.columns import read_columns
from st_cached_extras.replay.plan import plan_mini_batches
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=16384)
    parser.add_argument("--step_rows", type=int, default=512)
    parser.add_argument("--mini_batch_size", type=int, default=32)
    parser.add_argument("--mini_batch_num_tokens", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    sizes = {
        "mini_batch_size": arguments.mini_batch_size,
        "mini_batch_num_tokens": arguments.mini_batch_num_tokens,
    }
    pairs, vocabulary = load_pairs(arguments, arguments.batch_size)
    model = minilm(vocabulary, arguments.layers)
    columns = columns_of(model, pairs)
    some = columns_of(model, pairs[: arguments.step_rows])  # load_pairs has shuffled them
    loss = CachedInfoNCELoss(model, **sizes)
    print(header())

    def plan() -> None:
        for column in read_columns(columns).values():
            plan_mini_batches(column.count, column.lengths, **sizes)

    rows = read_columns(columns).values()
    planned = [(column, plan_mini_batches(column.count, column.lengths, **sizes)) for column in rows]

    def take() -> None:
        for _ in ("collect", "replay"):
            for column, mini_batches in planned:
                for mini_batch in mini_batches:
                    column.take(mini_batch)

    def step() -> None:
        model.zero_grad()
        loss(some, None).backward()

    times = time_in_turn({"plan": plan, "take": take, "step": step}, arguments.repeats)
    whole = times["step"][0] * arguments.batch_size / arguments.step_rows
    count = sum(len(mini_batches) for _, mini_batches in planned)
    names = {"plan": "lengths and plan", "take": f"rows of {count} mini-batches, twice"}
    found = [[name, f"{times[key][0]:.3f}", f"{times[key][0] / whole:.2%}"] for key, name in names.items()]
    found.append([f"the step, {arguments.step_rows} rows scaled to {arguments.batch_size}", f"{whole:.1f}", "100 %"])
    print(table([f"B = {arguments.batch_size}", "CPU-s", "of the step"], found))


if __name__ == "__main__":
    main()
