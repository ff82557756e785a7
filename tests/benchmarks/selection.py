"""What differentiating only b of B rows costs and gains: step time, gradient error, and retrieval in equal wall time.

    python -m tests.benchmarks.selection --batch_size 1024 --wordnet /usr/share/wordnet

The error of one draw is predicted from the rows' own gradients: sqrt(B (B - b) / b) S relative to the full gradient,
S² their sample variance. Training starts from random weights, for the same seconds at every share, and is judged on
pairs held out: how often a term finds its definition among all of them, in the first ten.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.replay.rows import FeatureRows
from tests.benchmarks.data import Pairs, add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn

SHARES = (1.0, 0.5, 0.25, 0.125)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--mini_batch_size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--draws", type=int, default=4, help="of the gradient error, at each share")
    parser.add_argument("--sampled_rows", type=int, default=256, help="from which the spread of rows is estimated")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training at each share and seed")
    parser.add_argument("--seeds", type=int, default=3, help="of training; 0 for none")
    parser.add_argument("--held_out", type=int, default=1000)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    add_arguments(parser)
    return parser.parse_args()


def gradient(loss: CachedInfoNCELoss, columns: list[dict[str, Tensor]]) -> Tensor:
    """All parameter gradients of one step, flat."""
    loss.zero_grad()
    loss([dict(column) for column in columns], None).backward()
    return torch.cat([p.grad.flatten() for p in loss.model.parameters() if p.grad is not None])


def spread_of_rows(loss: CachedInfoNCELoss, columns: list[dict[str, Tensor]], sample: int) -> float:
    """S: the standard deviation over rows of a row's share of the batch's gradient, from the first rows."""
    model, rows = loss.model, [FeatureRows(column) for column in columns]
    batch = torch.arange(rows[0].count)
    with torch.no_grad():
        embeddings = [
            torch.cat([model(column.take(part))["sentence_embedding"] for part in batch.split(loss.mini_batch_size)])
            for column in rows
        ]
    features = dict(zip(("anchor", "positive"), embeddings, strict=True))
    cotangents = loss.objective.value_and_cotangents(features).cotangents
    total, squares = torch.zeros(()), torch.zeros(())
    for row in range(sample):
        model.zero_grad()
        for column, cotangent in zip(rows, cotangents.values(), strict=True):
            model(column.take(torch.tensor([row])))["sentence_embedding"].backward(cotangent[row : row + 1])
        own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        total, squares = total + own, squares + own.square().sum()
    return float(((squares - total.square().sum() / sample) / (sample - 1)).sqrt())


def train(
    arguments: argparse.Namespace, model: SentenceTransformer, share: float, seed: int, pairs: Pairs, held_out: Pairs
) -> tuple[float, int]:
    """Recall in the first ten after so many seconds of training, and the steps they were enough for."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    loss = CachedInfoNCELoss(model, mini_batch_size=arguments.mini_batch_size, selection_seed=seed)
    loss.differentiated_samples = None if share == 1.0 else share
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < arguments.seconds:
        rows = torch.randperm(len(pairs), generator=generator)[: arguments.batch_size].tolist()
        optimizer.zero_grad()
        loss(columns_of(model, [pairs[row] for row in rows]), None).backward()
        optimizer.step()
        steps += 1
    model.eval()
    terms, definitions = (
        model.encode([pair[column] for pair in held_out], convert_to_tensor=True, normalize_embeddings=True)
        for column in (0, 1)
    )
    scores = terms @ definitions.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1)
    return float((ranks < 10).float().mean()), steps


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    B = arguments.batch_size
    pairs, vocabulary = load_pairs(arguments, 16 * B + arguments.held_out)
    held_out, pairs = pairs[: arguments.held_out], pairs[arguments.held_out :]
    model = minilm(vocabulary, arguments.layers)
    columns = columns_of(model, pairs[:B])
    print(header())

    losses = {}
    for share in SHARES:
        losses[share] = CachedInfoNCELoss(
            model, mini_batch_size=arguments.mini_batch_size, differentiated_samples=None if share == 1.0 else share
        )
    times = time_in_turn(
        {f"{share:g}": lambda loss=loss: gradient(loss, columns) for share, loss in losses.items()}, arguments.repeats
    )
    full = gradient(losses[1.0], columns)
    spread = spread_of_rows(losses[1.0], columns, min(B, arguments.sampled_rows))
    rows = []
    for share, loss in losses.items():
        b = round(share * B)
        found = [float((gradient(loss, columns) - full).norm() / full.norm()) for _ in range(arguments.draws)]
        predicted = (B * (B - b) / b) ** 0.5 * spread / float(full.norm())
        scores = [train(arguments, model, share, seed, pairs, held_out) for seed in range(arguments.seeds)]
        cpu, wall = times[f"{share:g}"]
        recalls = [recall for recall, _ in scores]
        rows.append(
            [
                f"{share:g}",
                f"{cpu:.2f}",
                f"{wall:.2f}",
                f"{cpu / times['1'][0]:.2f}",
                f"{statistics.mean(found):.3f}",
                f"{predicted:.3f}",
            ]
        )
        if arguments.seeds:
            rows[-1] += [
                f"{statistics.mean(recalls):.3f} ({', '.join(f'{recall:.3f}' for recall in recalls)})",
                f"{statistics.mean(steps for _, steps in scores):.0f}",
            ]
    head = ["b/B", "CPU-s", "wall s", "of the full step", "relative error of a draw", "predicted"]
    print(table([*head, *([f"R@10 after {arguments.seconds:g} s", "steps"] if arguments.seeds else [])], rows))


if __name__ == "__main__":
    main()
