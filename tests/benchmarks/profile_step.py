"""What a training step spends its time on: every operation of at least 3 % of it.

    python -m tests.benchmarks.profile_step --batch_size 512 --wordnet /usr/share/wordnet

One step of the cached InfoNCE loss with all levers, after a step that is not counted, under torch's profiler. "Between
operations" is what no operation accounts for: Python, in this package, sentence-transformers, transformers and torch.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from st_cached_extras import CachedInfoNCELoss
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--mini_batch_size", type=int, default=32, help="its longest, in tokens, is the budget")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.03, help="least share of the step that gets a row")
    add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(1)  # so that the times of operations add up to that of the step
    pairs, vocabulary = load_pairs(arguments, arguments.batch_size)
    model = minilm(vocabulary, arguments.layers)
    columns = columns_of(model, pairs)
    longest = max(int(column["attention_mask"].sum(1).max()) for column in columns)
    loss = CachedInfoNCELoss(model, mini_batch_num_tokens=arguments.mini_batch_size * longest)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss([dict(column) for column in columns], None).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        begin = time.perf_counter()
        step()
        whole = time.perf_counter() - begin
    found = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in found if event.key.startswith("aten::")}
    calls = {event.key: event.count for event in found}
    shown = {name: time for name, time in seconds.items() if time >= arguments.share * whole}
    rows = [[f"`{name}`", calls[name], f"{time:.2f}", f"{time / whole:.1%}"] for name, time in shown.items()]
    rest = sum(seconds.values()) - sum(shown.values())
    between = whole - sum(seconds.values())
    rows.append([f"{len(seconds) - len(shown)} other operations", "", f"{rest:.2f}", f"{rest / whole:.1%}"])
    rows.append(["between operations", "", f"{between:.2f}", f"{between / whole:.1%}"])
    print(header())
    print(f"B = {arguments.batch_size}, {whole:.2f} s\n")
    print(table(["operation", "calls", "seconds", "of the step"], rows))


if __name__ == "__main__":
    main()
