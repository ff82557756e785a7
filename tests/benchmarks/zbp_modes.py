"""All modes of an estimated backward on one model, at equal queries: a table, and a figure of it.

    python -m tests.benchmarks.zbp_modes --figure docs/zbp_modes.png

A classifier of token sequences: narrow embeddings (they must be trained), one causal transformer block whose backward
is answered by the mode, mean, linear head. Parameters of the block itself get autograd's gradients under every mode;
what differs is the gradient that leaves the block downwards. Every mode that queries is given the same number of
forward calls a step. Each run trains by its own gradients; every so many steps they are held against exact ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from st_cached_extras.cards.figures import COLOURS, save_png
from st_cached_extras.zbp import (
    ErrorTap,
    Noise,
    Quantise,
    ZBPBlock,
    ZBPConfig,
    compare_with_exact,
    opzo_update,
    reset_queries,
    set_mode,
    zbp_stats,
)
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table

VOCABULARY, LENGTH, NARROW, WIDTH, CLASSES = 64, 12, 6, 32, 4


@dataclass(frozen=True)
class Run:
    """What one mode came to with one seed; times in CPU-seconds a step."""

    cosine: float
    error: float
    queries: float
    exact_backwards: float
    seconds: float
    loss: float


class Block(nn.Module):
    """A causal transformer block over [B, T, C], pre-norm, residual."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.inputs(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*split, is_causal=True)  # [B, heads, T, C / heads]
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Classifier(nn.Module):
    """Token ids [B, T] to logits [B, classes]."""

    def __init__(self, config: ZBPConfig, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.below = nn.Sequential(nn.Embedding(VOCABULARY, NARROW), nn.Linear(NARROW, WIDTH), nn.Tanh())
        self.block = ZBPBlock(Block(WIDTH), config, name="block")
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.below(ids)).mean(1))


def configurations(queries: int, batch_size: int) -> dict[str, ZBPConfig]:
    """Every mode that this block can have, with as many probes as the queries pay for."""
    pairs = {"n_probes": queries // 2, "eps": 1e-2, "probe_chunk": 16, "param_mode": "local"}
    cd = ZBPConfig(mode="cd", **pairs)
    channels = {"measurement": (Noise(0.1), Quantise(6)), "transport": (Quantise(6),)}
    return {
        "exact": cd.replace(mode="exact"),
        "cd": cd,
        "fd": cd.replace(mode="fd", n_probes=queries - 1, eps=1e-3),
        "jvp": cd.replace(mode="jvp", n_probes=queries),
        "oracle": cd.replace(mode="oracle"),
        "cd, identity": cd.replace(control="identity"),
        "cd, fit": cd.replace(control="fit", n_probes=queries // 2 - 1),
        "cd, surrogate": cd.replace(surrogate=True),
        "cd, channels": cd.replace(**channels),
        "slice": cd.replace(mode="slice", coordinates=(0, WIDTH // 4)),
        "score_k": cd.replace(mode="score_k"),
        "score_qk": cd.replace(mode="score_qk"),
        "score_qk, window 4": cd.replace(mode="score_qk", window=4, n_probes=4),
        "opzo": cd.replace(mode="opzo", opzo_alpha=None),
        "skip": cd.replace(mode="skip"),
        "fa": cd.replace(mode="fa"),
        "fa, identity": cd.replace(mode="fa", control="identity"),
        "dfa": cd.replace(mode="dfa"),
        "drtp": cd.replace(mode="drtp", feedback_scale=1 / batch_size),  # the loss is a mean, the target is not
        "replay": cd.replace(mode="capture"),
        "noise": cd.replace(mode="noise"),
        "zero": cd.replace(mode="zero"),
    }


def batch_of(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and classes [B]: the class of a sequence is the largest of the sums of its tokens' hidden scores."""
    scores = torch.randn(VOCABULARY, CLASSES, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    return ids, scores[ids].sum(1).argmax(1)


def run_mode(name: str, config: ZBPConfig, seed: int, arguments: argparse.Namespace) -> Run:
    """Train one model by one mode."""
    generator = torch.Generator().manual_seed(1000 + seed)
    model = Classifier(config, seed)
    tap = ErrorTap(model)
    optimizer = torch.optim.Adam(model.parameters(), arguments.learning_rate)
    batches = [batch_of(arguments.batch_size, generator) for _ in range(arguments.steps)]
    held_out = batch_of(2048, torch.Generator().manual_seed(9))

    def backward(ids: Tensor, classes: Tensor) -> None:
        tap.set_target(classes)
        cross_entropy(model(ids), classes).backward()

    if name == "replay":
        backward(*batches[0])  # what is captured is injected in every step from here on
        set_mode(model, "replay")
    reset_queries(model)
    found, seconds = [], 0.0
    for step, (ids, classes) in enumerate(batches):
        optimizer.zero_grad()
        begin = time.process_time()
        if config.mode == "opzo":
            with torch.no_grad():
                clean = model(ids)
            for _ in range(arguments.queries):
                opzo_update(model, lambda ids=ids: model(ids), clean, alpha=0.1)
        backward(ids, classes)
        optimizer.step()
        seconds += time.process_time() - begin
        if step % arguments.every == arguments.every - 1:
            found += compare_with_exact(model, lambda pair=(ids, classes): backward(*pair)).values()
    [stats] = zbp_stats(model).values()
    with torch.no_grad():
        loss = float(cross_entropy(model.eval()(held_out[0]), held_out[1]))
    return Run(
        cosine=statistics.fmean(quality.weight_cosine for quality in found),
        error=statistics.fmean(quality.relative_error for quality in found),
        queries=stats["queries"] / arguments.steps,
        exact_backwards=stats["exact_backwards"] / arguments.steps,
        seconds=seconds / arguments.steps,
        loss=loss,
    )


def figure_of(path: Path, runs: dict[str, list[Run]]) -> Path:
    """Cosine and loss of every mode, as bars over the same names; whiskers from the least to the most of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.27 * len(runs)), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panels = ((left, "cosine", "cosine with the exact gradient, weights below"), (right, "loss", "loss, held out"))
    for (axes, attribute, label), colour in zip(panels, COLOURS, strict=False):
        values = [[getattr(run, attribute) for run in of_mode] for of_mode in runs.values()]
        means = [statistics.fmean(of_mode) for of_mode in values]
        spread = [
            [mean - min(of_mode) for mean, of_mode in zip(means, values, strict=True)],
            [max(of_mode) - mean for mean, of_mode in zip(means, values, strict=True)],
        ]
        axes.barh(list(runs), means, xerr=spread, color=colour, error_kw={"lw": 1})
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    left.invert_yaxis()
    left.axvline(0, color="black", lw=0.8)
    right.axvline(statistics.fmean(run.loss for run in runs["exact"]), color="black", lw=0.8, ls="--")
    return save_png(figure, path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--queries", type=int, default=16, help="forward calls of the block a step, for modes that ask"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two comparisons with exact gradients")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--modes", nargs="+", default=None, help="names of rows; exact is always there")
    parser.add_argument("--figure", type=Path, default=None, help="where the figure goes, a PNG")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore", message="The layer .* is differentiable")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    rows: list[list[object]] = []
    runs: dict[str, list[Run]] = {}
    for name, config in configurations(arguments.queries, arguments.batch_size).items():
        if arguments.modes is not None and name not in ("exact", *arguments.modes):
            continue
        runs[name] = [run_mode(name, config, seed, arguments) for seed in arguments.seeds]
        print(name, runs[name][0], file=sys.stderr, flush=True)
    unit = statistics.fmean(run.seconds for run in runs["exact"])
    for name, of_mode in runs.items():
        losses = [run.loss for run in of_mode]
        mean = {key: statistics.fmean(getattr(run, key) for run in of_mode) for key in vars(of_mode[0])}
        spread = f"{mean['loss']:.3f} ({min(losses):.3f} to {max(losses):.3f})"
        figures = [f"{mean['cosine']:.2f}", f"{mean['error']:.2f}", f"{mean['queries']:.0f}"]
        rows.append([name, *figures, f"{mean['exact_backwards']:.0f}", f"{mean['seconds'] / unit:.1f}", spread])
    print(header())
    print(
        f"One causal block of width {WIDTH} on {LENGTH} tokens, batch {arguments.batch_size}, {arguments.steps} steps "
        f"of Adam at {arguments.learning_rate:g}, {len(arguments.seeds)} seed(s).\n"
    )
    print(
        table(
            ["mode", "cosine", "relative error", "queries", "exact backwards", "time, exact = 1", "loss (range)"], rows
        )
    )
    if arguments.figure is not None:
        print(f"\n{os.path.relpath(figure_of(arguments.figure, runs))}")


if __name__ == "__main__":
    restart_with_sleeping_threads()
    main()
