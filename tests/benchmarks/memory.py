"""Peak memory of a whole step as the batch grows, against the bytes that must be there.

    python -m tests.benchmarks.memory --batch_sizes 512 8192
    python -m tests.benchmarks.memory --batch_sizes 1024 65536 --layers 1 --hidden 64 --wordnet /usr/share/wordnet

Every figure is the growth of the peak over one step in a process of its own, from what it held before the step
(inputs included). What must be there grows with B: embeddings, cotangents, one normalised fp32 copy, one chunk of
scores and the random states.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.objectives.contrastive import chunk_rows
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import MIB, header, peak_resident, reset_peak, resident, table

RANDOM_STATE_BYTES = 5056


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--mini_batch_size", type=int, default=32)
    parser.add_argument("--kept_graphs", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--dropout", type=float, default=0.1, help="so that random states are kept")
    parser.add_argument("--of", type=int, default=None, help=argparse.SUPPRESS)
    add_arguments(parser)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Growth of the peak over one step, and the bytes of inputs and of what the step must hold, in MiB."""
    pairs, vocabulary = load_pairs(arguments, max(arguments.batch_sizes))
    model = minilm(vocabulary, arguments.layers, arguments.hidden, dropout=arguments.dropout)
    # The longest rows first, so that the largest mini-batch is the same for every batch size.
    pairs = sorted(pairs, key=lambda pair: -len(pair[0]) - len(pair[1]))[: arguments.of]
    loss = CachedInfoNCELoss(model, mini_batch_size=arguments.mini_batch_size, kept_graphs=arguments.kept_graphs)
    # Once before: gradients, allocator pools and thread stacks are there whatever the batch.
    warm_up = columns_of(model, pairs[: 2 * arguments.mini_batch_size])
    for _ in range(2):
        loss(warm_up, None).backward()
    columns = columns_of(model, pairs)
    reset_peak()
    before = resident()
    loss(columns, None).backward()
    growth = peak_resident() - before
    rows, width = arguments.of, model.get_embedding_dimension()
    features = 2 * rows * width * 4
    chunk = min(rows, chunk_rows(rows * 4, features))
    mini_batches = 2 * -(-rows // arguments.mini_batch_size)
    inputs = sum(v.numel() * v.element_size() for c in columns for v in c.values() if isinstance(v, torch.Tensor))
    must = 3 * features + chunk * rows * 4 + mini_batches * RANDOM_STATE_BYTES
    return {"growth": growth / MIB, "inputs": inputs / MIB, "must": must / MIB}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.of is not None:
        print(json.dumps(measure(arguments)))
        return
    print(header())
    results = {}
    for batch_size in arguments.batch_sizes:
        command = [sys.executable, "-m", "tests.benchmarks.memory", "--of", str(batch_size), *sys.argv[1:]]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[batch_size] = json.loads(output.splitlines()[-1])
    rows = [[b, *(f"{r[key]:.0f}" for key in ("inputs", "growth", "must"))] for b, r in results.items()]
    print(
        table(
            ["B", "inputs, MiB", "growth over the step, MiB", "features, cotangents, copy, chunk, states, MiB"], rows
        )
    )
    (small, first), *_, (large, last) = results.items()
    grown = last["growth"] + last["inputs"] - first["growth"] - first["inputs"]
    must = last["must"] + last["inputs"] - first["must"] - first["inputs"]
    growth = f"From B={small} to B={large} the peak grows by {grown:.0f} MiB"
    print(f"\n{growth}, {grown / must:.2f} x the {must:.0f} MiB that it must.")


if __name__ == "__main__":
    main()
