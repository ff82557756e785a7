"""The loss stage alone: InfoNCE's closed form beside sentence-transformers' chunked autograd and the bare products.

    python -m tests.benchmarks.loss_stage --batch_sizes 1024 4096 16384 --dim 384 --threads 2 --repeats 5
    python -m tests.benchmarks.loss_stage --batch_sizes 65536 --tables blocks

Prints Markdown: CPU time, gradient error against fp64, and peak memory. CPU time is that of the process, all threads,
so that another process on the machine disturbs it little; the sides take turns within one run, in the table "blocks"
after every block of rows, so that one evaluation of a very large batch is enough.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn

from st_cached_extras.objectives import InfoNCE
from tests.benchmarks.measure import MIB, header, peak_resident, reset_peak, resident, restart_with_sleeping_threads

ST_MINI_BATCHES = (32, 256, 1024)
PRODUCT_CHUNKS = (128, 256, 512)
LOSSES = (3.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-5, 1e-7, 1e-9)
HALF_LOSSES = (3.6, 1.0, 0.02)


class Embedder(nn.Module):
    """Stands where a transformer would; the loss stage never calls it."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk_size", type=int, default=None, help="of InfoNCE; chosen by itself if not given")
    parser.add_argument("--tables", nargs="+", default=["time", "error", "memory"])
    parser.add_argument("--product_chunks", type=int, nargs="+", default=[256], help="of the table blocks")
    parser.add_argument("--memory_of", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_pairs(batch_size: int, dim: int, noise: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Anchors of any length and positives that are their anchor plus noise."""
    generator = torch.Generator().manual_seed(batch_size)
    anchor = torch.randn(batch_size, dim, generator=generator, dtype=dtype)
    positive = torch.randn(batch_size, dim, generator=generator, dtype=dtype).mul_(noise).add_(anchor)
    return {"anchor": anchor, "positive": positive}


def st_leaves(features: dict[str, Tensor], mini_batch: int) -> list[list[Tensor]]:
    """What sentence-transformers' embedding stage leaves: per column, one leaf per mini-batch."""
    return [[x.clone().requires_grad_() for x in column.split(mini_batch)] for column in features.values()]


def st_loss(mini_batch: int, scale: float = 20.0) -> CachedMultipleNegativesRankingLoss:
    model = SentenceTransformer(modules=[Embedder()], device="cpu")
    return CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=mini_batch)


# Time


def make_products(features: dict[str, Tensor], chunk: int) -> Callable[[], None]:
    """S = u vᵀ, S v and Sᵀ u in row chunks, into buffers made beforehand: what no implementation can leave out."""
    u, v = (nn.functional.normalize(x) for x in features.values())
    scores, du, dv = u.new_empty(chunk, len(u)), torch.empty_like(u), torch.empty_like(v)

    def products() -> None:
        dv.zero_()
        for begin in range(0, len(u), chunk):
            rows = u[begin : begin + chunk]
            S = torch.mm(rows, v.T, out=scores[: len(rows)])
            torch.mm(S, v, out=du[begin : begin + chunk])
            dv.addmm_(S.T, rows)

    return products


def cpu_seconds(sides: dict[str, Callable[[], Callable[[], None]]], repeats: int) -> dict[str, float]:
    """Median process time by side; every side is prepared outside the clock and they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, prepare in sides.items():
            run = prepare()
            start = time.process_time()
            run()
            if repeat:  # the first turn warms up
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_table(arguments: argparse.Namespace) -> None:
    print("\n### CPU-seconds of the loss stage, value and gradients (medians)\n")
    columns = [f"ST {size}" for size in ST_MINI_BATCHES] + [f"products {chunk}" for chunk in PRODUCT_CHUNKS]
    head = ["B", "InfoNCE", *columns, "× ST 32", "× ST best", "of products"]
    print_row(head)
    print_row(["---"] * len(head))
    for batch_size in arguments.batch_sizes:
        features = make_pairs(batch_size, arguments.dim, noise=2.0)
        objective = InfoNCE(chunk_size=arguments.chunk_size)
        sides = {"InfoNCE": lambda: lambda: objective.value_and_cotangents(features)}  # noqa: B023
        for size in ST_MINI_BATCHES:
            loss = st_loss(size)

            def prepare(loss=loss, size=size):
                leaves = st_leaves(features, size)  # noqa: B023
                return lambda: loss.calculate_loss(leaves, with_backward=True)

            sides[f"ST {size}"] = prepare
        for chunk in PRODUCT_CHUNKS:
            products = make_products(features, chunk)
            sides[f"products {chunk}"] = lambda products=products: products
        seconds = cpu_seconds(sides, arguments.repeats)
        ours = seconds["InfoNCE"]
        st_best = min(seconds[f"ST {size}"] for size in ST_MINI_BATCHES)
        products_best = min(seconds[f"products {chunk}"] for chunk in PRODUCT_CHUNKS)
        ratios = [seconds["ST 32"] / ours, st_best / ours, ours / products_best]
        print_row([batch_size, f"{ours:.3f}", *(f"{seconds[c]:.3f}" for c in columns), *(f"{r:.2f}" for r in ratios)])


class InTurn(InfoNCE):
    """After every few of its own chunks, the bare products of the same rows, in chunks of their own size.

    Attributes:
        products: CPU-seconds of the bare products.
    """

    def __init__(self, features: dict[str, Tensor], chunk: int, **options) -> None:
        super().__init__(**options)
        self._u, self._v = (nn.functional.normalize(x) for x in features.values())
        self._buffer = self._u.new_empty(chunk, len(self._u))
        self._du, self._dv, self._done = torch.empty_like(self._u), torch.zeros_like(self._v), 0
        self.products = 0.0

    def _chunk(self, s, scores, softmaxes, labels, logits, begin, end):
        loss = super()._chunk(s, scores, softmaxes, labels, logits, begin, end)
        start = time.process_time()
        while self._done < end and (end - self._done >= len(self._buffer) or end == len(self._u)):
            rows = self._u[self._done : self._done + len(self._buffer)]
            S = torch.mm(rows, self._v.T, out=self._buffer[: len(rows)])
            torch.mm(S, self._v, out=self._du[self._done : self._done + len(rows)])
            self._dv.addmm_(S.T, rows)
            self._done += len(rows)
        self.products += time.process_time() - start
        return loss


def blocks_table(arguments: argparse.Namespace) -> None:
    print("\n### CPU-seconds of one loss stage, value and gradients, in turn with the bare products, block by block\n")
    rows = []
    for batch_size in arguments.batch_sizes:
        features = make_pairs(batch_size, arguments.dim, noise=2.0)
        for chunk in arguments.product_chunks:
            objective = InTurn(features, min(chunk, batch_size), chunk_size=arguments.chunk_size)
            start = time.process_time()
            objective.value_and_cotangents(features)
            ours = time.process_time() - start - objective.products
            cells = [f"{ours:.3f}", f"{objective.products:.3f}", f"{ours / objective.products:.2f}"]
            rows.append([batch_size, chunk, *cells])
    print_row(["B", "rows of a product", "InfoNCE", "products", "of products"])
    print_row(["---", *["---:"] * 4])
    for row in rows:
        print_row(row)


# Error


def dense_float64(features: dict[str, Tensor], scale: float) -> tuple[float, Tensor]:
    """Loss and stacked gradients [2, B, D] in fp64, as log(1 + Σ exp(l − p)): log Z − p would cancel even there."""
    leaves = [x.double().clone().requires_grad_() for x in features.values()]
    u, v = (nn.functional.normalize(x) for x in leaves)
    logits = scale * (u @ v.T)
    margins = (logits - logits.diagonal()[:, None]).exp()
    loss = torch.log1p(margins.masked_fill(torch.eye(len(u), dtype=torch.bool), 0.0).sum(dim=1)).mean()
    loss.backward()
    return loss.item(), torch.stack([leaf.grad for leaf in leaves])


def pairs_of_loss(target: float, batch_size: int, dim: int) -> tuple[dict[str, Tensor], float]:
    """Pairs and a scale at which the loss is ``target``, found by bisection of the noise."""
    scale = 20.0 if target > 1e-4 else 45.0
    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        features = make_pairs(batch_size, dim, middle)
        loss, _ = dense_float64(features, scale)
        low, high = (middle, high) if loss < target else (low, middle)
    return features, scale


def errors(features: dict[str, Tensor], scale: float, truth: Tensor) -> tuple[float, float]:
    """Relative L2 error of all gradients: InfoNCE's, then sentence-transformers'."""
    cotangents = InfoNCE(scale=scale).value_and_cotangents(features).cotangents
    leaves = st_leaves(features, 256)
    st_loss(256, scale).calculate_loss(leaves, with_backward=True)
    st_gradients = [torch.cat([leaf.grad for leaf in column]) for column in leaves]
    sides = torch.stack(list(cotangents.values())), torch.stack(st_gradients)
    return tuple(((side.double() - truth).norm() / truth.norm()).item() for side in sides)


def error_table(arguments: argparse.Namespace) -> None:
    batch_size = 1024
    print(f"\n### Relative L2 error of all gradients against fp64, B = {batch_size} (ST at mini-batch 256)\n")
    print_row(["embeddings", "scale", "loss", "InfoNCE", "ST"])
    print_row(["---"] * 5)
    for target in LOSSES:
        features, scale = pairs_of_loss(target, batch_size, arguments.dim)
        loss, truth = dense_float64(features, scale)
        ours, st = errors(features, scale, truth)
        print_row(["fp32", scale, f"{loss:.2g}", f"{ours:.1e}", f"{st:.1e}"])
    for target in HALF_LOSSES:
        features, scale = pairs_of_loss(target, batch_size, arguments.dim)
        rounded = {name: x.bfloat16() for name, x in features.items()}
        for label, exact in (("bf16", features), ("bf16, rounding aside", rounded)):
            loss, truth = dense_float64(exact, scale)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                ours, st = errors(rounded, scale, truth)
            print_row([f"{label}, bf16 autocast", scale, f"{loss:.2g}", f"{ours:.1e}", f"{st:.1e}"])


# Memory


def measure_memory(arguments: argparse.Namespace) -> None:
    """In a fresh process: growth of the peak over one step, as JSON."""
    objective = InfoNCE(chunk_size=arguments.chunk_size)
    objective.value_and_cotangents(make_pairs(256, arguments.dim, noise=2.0))
    features = make_pairs(arguments.memory_of, arguments.dim, noise=2.0)
    reset_peak()
    before = resident()
    cotangents = objective.value_and_cotangents(features).cotangents
    peak = peak_resident()
    kept = sum(x.numel() * 4 for x in cotangents.values()) * 2  # the normalised copy and the cotangents
    print(json.dumps({"growth": (peak - before) / MIB, "beyond": (peak - before - kept) / MIB}))


def memory_table(arguments: argparse.Namespace) -> None:
    print("\n### Peak memory of one step in a fresh process, MiB\n")
    print_row(["B", "growth over features", "of it beyond one normalised copy and cotangents"])
    print_row(["---"] * 3)
    for batch_size in arguments.batch_sizes:
        command = [sys.executable, "-m", "tests.benchmarks.loss_stage", "--memory_of", str(batch_size)]
        command += ["--dim", str(arguments.dim), "--threads", str(arguments.threads)]
        if arguments.chunk_size:
            command += ["--chunk_size", str(arguments.chunk_size)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        memory = json.loads(output.splitlines()[-1])
        print_row([batch_size, f"{memory['growth']:.0f}", f"{memory['beyond']:.0f}"])


def print_row(cells: list) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of is not None:
        measure_memory(arguments)
        return
    print(header())
    tables = {"time": time_table, "blocks": blocks_table, "error": error_table, "memory": memory_table}
    for name in arguments.tables:
        tables[name](arguments)


if __name__ == "__main__":
    main()
