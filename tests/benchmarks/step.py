"""A whole training step, forward and backward: ours, sentence-transformers' cached loss and its plain one.

    python -m tests.benchmarks.step --batch_size 2048 --mini_batch_sizes 32 64 --wordnet /usr/share/wordnet
    python -m tests.benchmarks.step --batch_size 512 --plain --wordnet /usr/share/wordnet
    python -m tests.benchmarks.step --batch_size 256 --plain --equal_lengths --kept_graphs .5 .75 1
    python -m tests.benchmarks.step --batch_size 64 --mini_batch_sizes 8 --video
    python -m tests.benchmarks.step --batch_size 2048 --sides ours "ST cached 32" --wordnet /usr/share/wordnet

Prints CPU-seconds of the process and wall seconds as a Markdown table, medians of sides that take turns in one run.
``--equal_lengths`` gives every row the same length, where there is nothing to sort and caching costs a forward;
``--video`` takes clips of 4 to 32 frames and a tiny Qwen2-VL.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.testing.tiny_models import random_sentences
from st_cached_extras.testing.tiny_vlms import clip, message, tiny_qwen2_vl
from tests.benchmarks.data import add_arguments, columns_of, load_pairs, minilm
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn

TOKENS_OF_EQUAL_LENGTH = 24


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--mini_batch_sizes", type=int, nargs="+", default=[32])
    parser.add_argument("--plain", action="store_true", help="also the plain loss, which holds the whole batch")
    parser.add_argument("--unsorted", action="store_true", help="also ours without sorting")
    parser.add_argument("--equal_lengths", action="store_true")
    parser.add_argument("--kept_graphs", type=float, nargs="*", default=[], help="shares to try")
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--sides", nargs="+", default=[""], help="only those whose names begin so")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm_ups", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6)
    add_arguments(parser)
    return parser.parse_args()


def text_inputs(arguments: argparse.Namespace) -> tuple[SentenceTransformer, list[dict[str, Tensor]]]:
    """MiniLM's architecture, and pairs of text of their own lengths or all of one."""
    pairs, vocabulary = load_pairs(arguments, arguments.batch_size)
    if arguments.equal_lengths:
        words = [word for pair in pairs for text in pair for word in text.split()]
        generator = random.Random(0)
        pairs = [tuple(" ".join(generator.choices(words, k=64)) for _ in pair) for pair in pairs]
    model = minilm(vocabulary, arguments.layers, max_length=TOKENS_OF_EQUAL_LENGTH if arguments.equal_lengths else 128)
    return model, columns_of(model, pairs)


def video_inputs(arguments: argparse.Namespace) -> tuple[SentenceTransformer, list[dict[str, Tensor]]]:
    """A tiny Qwen2-VL, captions, and clips of 4 to 32 frames, few of them long."""
    model, generator = tiny_qwen2_vl(), random.Random(0)
    frames = [2 * round(2 * 8 ** (generator.random() ** 2)) for _ in range(arguments.batch_size)]
    captions = [message(text) for text in random_sentences(arguments.batch_size)]
    clips = [message(clip(seed, count)) for seed, count in enumerate(frames)]
    return model, [model.preprocess(captions), model.preprocess(clips)]


def make_losses(arguments: argparse.Namespace, model: SentenceTransformer, longest: int) -> dict[str, nn.Module]:
    """The losses by name.

    Token budgets are mini-batch size x longest row: what the largest mini-batch of rows as they come computes, so the
    peak memory of the sides is the same.
    """
    losses: dict[str, nn.Module] = {}
    for size in arguments.mini_batch_sizes:
        budget = size * longest
        losses[f"ours {size}"] = CachedInfoNCELoss(model, mini_batch_size=size)
        losses[f"ST cached {size}"] = CachedMultipleNegativesRankingLoss(model, mini_batch_size=size)
        if not arguments.equal_lengths and not arguments.video:
            losses[f"ours, {budget} tokens"] = CachedInfoNCELoss(model, mini_batch_num_tokens=budget)
            losses[f"ST cached, {budget} tokens"] = CachedMultipleNegativesRankingLoss(
                model, mini_batch_num_tokens=budget
            )
        if arguments.unsorted:
            losses[f"ours {size}, unsorted"] = CachedInfoNCELoss(model, mini_batch_size=size, sort_by_length=False)
        for share in arguments.kept_graphs:
            kept = {"mini_batch_size": size} if arguments.equal_lengths else {"mini_batch_num_tokens": budget}
            name = f"ours {size}" if arguments.equal_lengths else f"ours, {budget} tokens"
            losses[f"{name}, kept {share:g}"] = CachedInfoNCELoss(model, **kept, kept_graphs=share)
    if arguments.plain:
        losses["ST plain"] = MultipleNegativesRankingLoss(model)
    return losses


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model, columns = video_inputs(arguments) if arguments.video else text_inputs(arguments)
    print(header())
    lengths = [column["attention_mask"].sum(1).float() for column in columns]
    described = "; ".join(f"{x.mean():.1f} on average, {int(x.max())} at most" for x in lengths)
    print(f"B = {arguments.batch_size}; tokens a row, by column: {described}\n")

    def step_of(loss: nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad()
            loss([dict(column) for column in columns], None).backward()

        return step

    losses = make_losses(arguments, model, int(torch.cat(lengths).max()))
    losses = {name: loss for name, loss in losses.items() if name.startswith(tuple(arguments.sides))}
    times = time_in_turn({name: step_of(loss) for name, loss in losses.items()}, arguments.repeats, arguments.warm_ups)
    head, rows = (
        ["step", "CPU-s", "wall s"],
        [[name, f"{cpu:.2f}", f"{wall:.2f}"] for name, (cpu, wall) in times.items()],
    )
    best = {
        f"of {kind}": min(cpu for name, (cpu, _) in times.items() if name.startswith(kind))
        for kind in ("ST plain", "ST cached")
        if any(name.startswith(kind) for name in times)
    }
    for kind, seconds in best.items():
        head.append(kind if kind == "of ST plain" else "of ST cached at its best")
        for row, (cpu, _) in zip(rows, times.values(), strict=True):
            row.append(f"{cpu / seconds:.2f}")
    print(table(head, rows))


if __name__ == "__main__":
    main()
