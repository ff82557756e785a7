"""Distribution matching: the closed form beside autograd of the same formula and the bare products.

    python -m tests.benchmarks.mmd --threads 1
    python -m tests.benchmarks.mmd --batch_sizes 2048 --dims 384 --landmarks 512 --scales 0.5 1 2

Value and derivative by all rows of one encoder's features. The sides take turns within one run:

- ours: MultiEncoderMMD;
- dense: autograd through whole matrices;
- chunked: autograd through chunks of rows, each checkpointed, at its best chunk size;
- products: X Xᵀ and X Zᵀ twice, in chunks, into buffers made beforehand: about what no implementation can leave out.

Memory is the growth of the peak over one step, in a fresh process per figure.

    python -m tests.benchmarks.mmd --tables landmarks --pairs definitions.parquet

embeds texts and compares the attraction of a reference's landmarks with that of all its rows: the relative L2 error of
the gradient by held-out embeddings, with a coefficient per landmark and scale, as they are fitted, and with one per
landmark for the mean of the scales.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.objectives.mmd.kernels import squared_distances
from st_cached_extras.objectives.mmd.pairs import PairSums
from tests.benchmarks.measure import (
    MIB,
    header,
    peak_resident,
    reset_peak,
    resident,
    restart_with_sleeping_threads,
    table,
    time_in_turn,
)
from tests.benchmarks.mmd_companion import add_teacher, load_teacher, load_texts

AUTOGRAD_CHUNKS = (256, 1024)
PRODUCT_CHUNKS = (256, 512)
LARGEST_DENSE = 2048


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--landmarks", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk_size", type=int, default=None, help="of ours; chosen by itself if not given")
    parser.add_argument("--tables", nargs="+", default=["time", "memory"], choices=["time", "memory", "landmarks"])
    parser.add_argument("--reference_rows", type=int, default=8192, help="of the table of landmarks")
    add_teacher(parser)
    parser.add_argument("--memory_of", choices=["ours", "dense", "chunked"], default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


class Case:
    """One batch, one reference, and the ways to value and derivative."""

    def __init__(self, batch_size: int, dim: int, landmarks: int, scales: list[float], chunk_size: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(batch_size, dim, generator=generator)
        self.z = torch.randn(landmarks, dim, generator=generator)
        # Of whatever size: the arithmetic is the same for every alpha.
        self.alpha = torch.rand(len(scales), landmarks, generator=generator) / landmarks
        self.scales, self.sigma = scales, (2.0 * dim) ** 0.5
        reference = NystromReference.from_parts(
            landmarks=self.z, alpha=self.alpha, sigma=self.sigma, k_rr=0.5, scales=scales
        )
        self.objective = MultiEncoderMMD({"x": reference}, normalize=False, chunk_size=chunk_size)

    def ours(self) -> None:
        self.objective.value_and_cotangents({"x": self.x})

    def dense(self) -> None:
        self._autograd(len(self.x), lambda function, *args: function(*args))

    def chunked(self, chunk: int) -> None:
        self._autograd(chunk, lambda function, *args: checkpoint(function, *args, use_reentrant=False))

    def products(self, chunk: int) -> Callable[[], None]:
        chunk = min(chunk, len(self.x))
        xx, xz = self.x.new_empty(chunk, len(self.x)), self.x.new_empty(chunk, len(self.z))

        def run() -> None:
            for _ in range(2):
                for rows in self.x.split(chunk):
                    torch.mm(rows, self.x.T, out=xx[: len(rows)])
                    torch.mm(rows, self.z.T, out=xz[: len(rows)])

        return run

    def _autograd(self, chunk: int, run: Callable[..., Tensor]) -> None:
        x = self.x.clone().requires_grad_()
        B = len(x)
        loss = torch.zeros(())
        for rows in x.split(chunk):
            loss = loss + run(self._of_rows, rows, x) / B**2 - run(self._of_landmarks, rows) * 2 / B
        loss.backward()

    def _of_rows(self, rows: Tensor, x: Tensor) -> Tensor:
        squared = self._squared(rows, x)
        return sum(torch.exp(squared * (-0.5 / (s * self.sigma) ** 2)).sum() for s in self.scales) / len(self.scales)

    def _of_landmarks(self, rows: Tensor) -> Tensor:
        squared = self._squared(rows, self.z)
        parts = zip(self.scales, self.alpha, strict=True)
        values = (torch.exp(squared * (-0.5 / (s * self.sigma) ** 2)) @ alpha for s, alpha in parts)
        return sum(values).sum() / len(self.scales)

    @staticmethod
    def _squared(a: Tensor, b: Tensor) -> Tensor:
        return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_min(0)


def time_table(arguments: argparse.Namespace) -> None:
    print(f"\n### CPU-seconds of value and derivative, gaussian of scales {arguments.scales} (medians)\n")
    rows = []
    for batch_size, dim, landmarks in configurations(arguments):
        case = Case(batch_size, dim, landmarks, arguments.scales, arguments.chunk_size)
        sides: dict[str, Callable[[], object]] = {"ours": case.ours}
        if batch_size <= LARGEST_DENSE:
            sides["dense"] = case.dense
        sides |= {f"chunked {chunk}": lambda case=case, chunk=chunk: case.chunked(chunk) for chunk in AUTOGRAD_CHUNKS}
        sides |= {f"products {chunk}": case.products(chunk) for chunk in PRODUCT_CHUNKS}
        seconds = {name: cpu for name, (cpu, _) in time_in_turn(sides, arguments.repeats).items()}
        ours, dense = seconds["ours"], seconds.get("dense")
        chunked = min(seconds[f"chunked {chunk}"] for chunk in AUTOGRAD_CHUNKS)
        products = min(seconds[f"products {chunk}"] for chunk in PRODUCT_CHUNKS)
        ratios = (chunked / ours, ours / products)
        cells = [f"{x:.3f}" for x in (ours, chunked, products)]
        cells.insert(1, "" if dense is None else f"{dense:.3f}")
        rows.append([batch_size, dim, landmarks, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    head = ["B", "D", "m", "ours", "dense", "chunked", "products", "chunked / ours", "ours / products"]
    print(table(head, rows))


def measure_memory(arguments: argparse.Namespace) -> None:
    """In a fresh process: growth of the peak over one step, in MiB, as JSON."""
    sizes = (arguments.batch_sizes[0], arguments.dims[0], arguments.landmarks[0])
    warm_up, case = (
        Case(batch_size, *sizes[1:], arguments.scales, arguments.chunk_size) for batch_size in (64, sizes[0])
    )
    steps = {"ours": Case.ours, "dense": Case.dense, "chunked": lambda case: case.chunked(AUTOGRAD_CHUNKS[0])}
    steps[arguments.memory_of](warm_up)
    reset_peak()
    before = resident()
    steps[arguments.memory_of](case)
    print(json.dumps((peak_resident() - before) / MIB))


def memory_table(arguments: argparse.Namespace) -> None:
    print("\n### Growth of the peak over one step in a fresh process, MiB\n")
    rows = []
    for batch_size, dim, landmarks in configurations(arguments):
        cells = []
        for side in ("ours", "chunked"):
            command = [sys.executable, "-m", "tests.benchmarks.mmd", "--memory_of", side]
            command += ["--batch_sizes", batch_size, "--dims", dim, "--landmarks", landmarks]
            command += ["--threads", arguments.threads, "--scales", *arguments.scales]
            output = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout
            cells.append(f"{json.loads(output.splitlines()[-1]):.0f}")
        rows.append([batch_size, dim, landmarks, *cells])
    print(table(["B", "D", "m", "ours", f"chunked {AUTOGRAD_CHUNKS[0]}"], rows))


def landmarks_table(arguments: argparse.Namespace) -> None:
    held_out = 512
    texts = load_texts(arguments, arguments.reference_rows + held_out)
    teacher = load_teacher(arguments.teacher)
    embeddings = teacher.encode(texts, convert_to_tensor=True, show_progress_bar=True, batch_size=64).clone()
    real, x = embeddings[:-held_out].double(), embeddings[-held_out:].double()
    rows = []
    for count in (64, 256, 1024, 4096):
        reference = NystromReference.fit(real, landmarks=count)
        sigma, scales, shift = reference.sigma[0], len(reference.kernel.scales), real.mean(dim=0)
        z, alpha = reference.targets(0, shift)
        y = (real - shift) / sigma
        # One coefficient for the mean of the scales: of the landmarks' mean kernel, with the same jitter.
        K = reference.kernel.value(squared_distances(z, z)) + 1e-6 * torch.eye(len(z), dtype=torch.float64)
        mean_kernel = torch.stack([reference.kernel.value(squared_distances(z, part)).sum(1) for part in y.split(512)])
        single = torch.linalg.solve(K, mean_kernel.sum(0) / len(y)).expand(scales, -1)

        def attraction(targets: Tensor, coefficients: Tensor, reference=reference, shift=shift) -> Tensor:
            sums = PairSums((x - shift) / reference.sigma[0], len(x), len(x), reference.kernel)
            sums.against(targets, coefficients / len(reference.kernel.scales), 1.0)
            return sums.finish()

        exact = attraction(y, y.new_full((scales, len(y)), 1 / len(y)))
        errors = [(attraction(z, c) - exact).norm() / exact.norm() for c in (alpha, single)]
        rows.append([count, *(f"{100 * error:.2f} %" for error in errors)])
    print(
        f"\n### Error of the attraction's gradient, {len(real)} embeddings of {real.shape[1]} dimensions, scales "
        f"{reference.kernel.scales}\n"
    )
    print(table(["landmarks", "one coefficient per scale", "one for all scales"], rows))


def configurations(arguments: argparse.Namespace) -> list[tuple[int, int, int]]:
    return [(b, d, m) for b in arguments.batch_sizes for d in arguments.dims for m in arguments.landmarks]


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of is not None:
        measure_memory(arguments)
        return
    print(header())
    tables = {"time": time_table, "memory": memory_table, "landmarks": landmarks_table}
    for name in arguments.tables:
        tables[name](arguments)


if __name__ == "__main__":
    main()
