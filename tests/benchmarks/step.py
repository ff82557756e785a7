"""A whole training step, forward and backward: ours, sentence-transformers' cached loss and its plain one.

    python -m tests.benchmarks.step --batch_size 2048 --mini_batch_size 32 --threads 2 --wordnet /usr/share/wordnet

Prints CPU-seconds of the process and wall seconds as a Markdown table, medians of sides that take turns in one run.
``--equal_lengths`` gives every row the same length, where there is nothing to sort and caching costs a forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from st_cached_extras import CachedInfoNCELoss
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn

WORDS_OF_EQUAL_LENGTH = 24


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--mini_batch_size", type=int, default=32)
    parser.add_argument("--st_mini_batch_sizes", type=int, nargs="*", default=[], help="further ones for ST alone")
    parser.add_argument("--num_tokens", type=int, default=None, help="token budget; default: mini-batch x mean length")
    parser.add_argument("--plain", action="store_true", help="also the plain loss, which holds the whole batch")
    parser.add_argument("--equal_lengths", action="store_true")
    parser.add_argument("--kept_graphs", type=float, nargs="*", default=[], help="shares to try")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    add_arguments(parser)
    return parser.parse_args()


def make_sides(
    arguments: argparse.Namespace, model: SentenceTransformer, columns: list[dict[str, Tensor]]
) -> dict[str, Callable[[], object]]:
    """One step of each loss, by name."""
    size = arguments.mini_batch_size
    active = sum(int(column["attention_mask"].sum()) for column in columns)
    budget = arguments.num_tokens or size * active // (2 * arguments.batch_size)
    ours = {"ours": CachedInfoNCELoss(model, mini_batch_size=size)}
    if not arguments.equal_lengths:
        ours[f"ours, {budget} tokens"] = CachedInfoNCELoss(model, mini_batch_size=size, mini_batch_num_tokens=budget)
        ours["ours, unsorted"] = CachedInfoNCELoss(model, mini_batch_size=size, sort_by_length=False)
    for share in arguments.kept_graphs:
        ours[f"ours, kept {share:g}"] = CachedInfoNCELoss(model, mini_batch_size=size, kept_graphs=share)
    theirs: dict[str, nn.Module] = {
        f"ST cached {n}": CachedMultipleNegativesRankingLoss(model, mini_batch_size=n)
        for n in dict.fromkeys([size, *arguments.st_mini_batch_sizes])
    }
    if not arguments.equal_lengths:
        theirs[f"ST cached, {budget} tokens"] = CachedMultipleNegativesRankingLoss(
            model, mini_batch_size=size, mini_batch_num_tokens=budget
        )
    if arguments.plain:
        theirs["ST plain"] = MultipleNegativesRankingLoss(model)

    def step_of(loss: nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad()
            loss([dict(column) for column in columns], None).backward()

        return step

    return {name: step_of(loss) for name, loss in {**ours, **theirs}.items()}


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    pairs = load_pairs(arguments, arguments.batch_size)
    if arguments.equal_lengths:
        words = [word for pair in pairs for text in pair for word in text.split()]
        texts = iter(" ".join(words[i % len(words)] for i in range(k, k + 64)) for k in range(10**9))
        pairs = [(next(texts), next(texts)) for _ in pairs]
    model = minilm(pairs, arguments.layers, max_length=WORDS_OF_EQUAL_LENGTH if arguments.equal_lengths else 128)
    columns = columns_of(model, pairs)
    lengths = [column["attention_mask"].sum(1).float() for column in columns]
    print(header())
    print(
        f"B = {arguments.batch_size}, {arguments.layers} layers; tokens a row: "
        + "; ".join(f"{x.mean():.1f} on average, {int(x.max())} at most" for x in lengths)
        + "\n"
    )
    sides = make_sides(arguments, model, columns)
    times = time_in_turn(sides, arguments.repeats)
    first = times["ours"][0]
    best = min(times[name][0] for name in times if name.startswith("ST cached"))
    rows = [
        [name, f"{cpu:.2f}", f"{wall:.2f}", f"{cpu / first:.2f}", f"{cpu / best:.2f}"]
        for name, (cpu, wall) in times.items()
    ]
    print(table(["step", "CPU-s", "wall s", "x ours", "x best ST cached"], rows))


if __name__ == "__main__":
    main()
