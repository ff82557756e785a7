"""Time and peak memory of a step as the batch grows: ours, sentence-transformers' cached loss and its plain one.

    python -m tests.benchmarks.scaling --batch_sizes 128 256 512 1024 2048 --wordnet /usr/share/wordnet

Every figure is of a step in a process of its own, after a small one that warms up. Ours and ST's cached loss are tried
at every mini-batch size, as rows and as a budget of tokens of the same peak (size x longest row), and shown at their
fastest. The plain loss is left out beyond ``--largest_plain``, where it would not fit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor

from st_cached_extras import CachedInfoNCELoss
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import (
    MIB,
    header,
    peak_resident,
    reset_peak,
    resident,
    restart_with_sleeping_threads,
    table,
)

SIDES = {
    "ours": CachedInfoNCELoss,
    "ST cached": CachedMultipleNegativesRankingLoss,
    "ST plain": MultipleNegativesRankingLoss,
}
TENSORS = ("input_ids", "attention_mask")
WARM_UP_ROWS = 32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--mini_batch_sizes", type=int, nargs="+", default=[32])
    parser.add_argument("--largest_plain", type=int, default=1024)
    parser.add_argument("--largest_budget_of_st", type=int, default=512, help="slower than rows, and only the longer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    # Folder of the inputs, side, batch size and setting.
    parser.add_argument("--of", nargs=4, default=None, help=argparse.SUPPRESS)
    add_arguments(parser)
    return parser.parse_args()


def save_inputs(arguments: argparse.Namespace, folder: Path) -> None:
    """The model and the columns of the largest batch, which every process loads."""
    pairs, vocabulary = load_pairs(arguments, max(arguments.batch_sizes))
    model = minilm(vocabulary, arguments.layers)
    model.save(str(folder / "model"), create_model_card=False)
    torch.save([{key: column[key] for key in TENSORS} for column in columns_of(model, pairs)], folder / "columns.pt")


def first_rows(columns: list[dict[str, Tensor]], count: int) -> list[dict[str, Tensor]]:
    """The first rows, padded to their own longest."""
    widths = [int(column["attention_mask"][:count].sum(1).max()) for column in columns]
    return [
        {key: value[:count, :width].contiguous() for key, value in column.items()}
        for column, width in zip(columns, widths, strict=True)
    ]


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One side at one batch size: CPU-seconds and wall seconds of a step, and growth of the peak in MiB."""
    folder, side, batch_size, setting = arguments.of
    model = SentenceTransformer(str(Path(folder) / "model"), device="cpu").train()
    whole = torch.load(Path(folder) / "columns.pt", weights_only=True)
    columns = first_rows(whole, int(batch_size))
    options = {}
    if side != "ST plain":
        kind, size = setting.split()
        longest = max(column["input_ids"].shape[1] for column in columns)
        options = {"rows": {"mini_batch_size": int(size)}, "tokens": {"mini_batch_num_tokens": int(size) * longest}}
        options = options[kind]
    loss = SIDES[side](model, **options)
    loss(first_rows(whole, WARM_UP_ROWS), None).backward()
    del whole
    reset_peak()
    before, cpu, wall = resident(), time.process_time(), time.perf_counter()
    loss(columns, None).backward()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu": cpu, "wall": wall, "growth": (peak_resident() - before) / MIB}


def settings(arguments: argparse.Namespace, side: str, batch_size: int) -> list[str]:
    if side == "ST plain":
        return ["whole"] if batch_size <= arguments.largest_plain else []
    kinds = ["rows", "tokens"]
    if side == "ST cached" and batch_size > arguments.largest_budget_of_st:
        kinds.remove("tokens")
    return [f"{kind} {size}" for size in arguments.mini_batch_sizes for kind in kinds]


def rows_of(arguments: argparse.Namespace, batch_size: int, folder: str) -> list[list[object]]:
    """A row of the table for every side."""
    rows = []
    for side in SIDES:
        results = {}
        for setting in settings(arguments, side, batch_size):
            of = ["--of", folder, side, str(batch_size), setting]
            command = [sys.executable, "-m", "tests.benchmarks.scaling", *sys.argv[1:], *of]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[setting] = json.loads(output.splitlines()[-1])
            print(".", end="", file=sys.stderr, flush=True)
        if results:
            best = min(results, key=lambda setting: results[setting]["cpu"])
            found = results[best]
            cells = [f"{found['cpu']:.2f}", f"{found['wall']:.2f}", f"{found['growth']:.0f}"]
            rows.append([batch_size, side, best, *cells])
    return rows


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.of is not None:
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_inputs(arguments, Path(folder))  # before anything is printed: imports that it needs print, too
        print(header())
        print(table(["B", "loss", "mini-batches", "CPU-s", "wall s", "growth of the peak, MiB"], []), flush=True)
        for batch_size in arguments.batch_sizes:
            for row in rows_of(arguments, batch_size, folder):
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
