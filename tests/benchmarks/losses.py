"""The loss stage of every kind of loss: closed forms beside autograd, dense and in chunks, and the bare products.

    python -m tests.benchmarks.losses --batch_size 4096 --dim 384 --threads 1 --repeats 5

Value and gradients from embeddings that are there already. "Chunked" is written as the ``calculate_loss`` of
sentence-transformers' cached losses: the embeddings are one leaf per mini-batch, and as many rows at a time go forward
and backward; at the fastest of several sizes. "Products" are the three that no implementation can leave out: S = u vᵀ,
S v and Sᵀ u. CPU-seconds of the process; the sides take turns within one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from st_cached_extras.objectives import InfoNCE, LossObjective, Objective, Sigmoid, SupCon
from tests.benchmarks.measure import header, restart_with_sleeping_threads, table, time_in_turn

CHUNKS = (32, 128, 256, 512, 1024)
PRODUCT_CHUNKS = (128, 256, 512)
CLASS_SIZE = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", nargs="+", default=["closed", "adapted"])
    return parser.parse_args()


def make_features(batch_size: int, dim: int, columns: int) -> dict[str, Tensor]:
    """Columns of any length of row, all noise around a common anchor."""
    generator = torch.Generator().manual_seed(batch_size)
    anchor = torch.randn(batch_size, dim, generator=generator)
    names = ["anchor", "positive", "negative_1", "negative_2"][:columns]
    return {name: anchor + 2.0 * torch.randn(batch_size, dim, generator=generator) for name in names}


# The same losses under autograd. ``rows`` of the loss against everything: the whole batch, or a chunk.


def sigmoid_rows(embeddings: list[Tensor], labels: Tensor, begin: int, end: int) -> Tensor:
    logits = 10.0 * cos_sim(embeddings[0][begin:end], embeddings[1]) - 10.0
    y = -torch.ones_like(logits)
    y.diagonal(begin).fill_(1.0)
    return -nn.functional.logsigmoid(y * logits).sum() / len(labels)


def supcon_rows(embeddings: list[Tensor], labels: Tensor, begin: int, end: int) -> Tensor:
    logits = 10.0 * cos_sim(embeddings[0][begin:end], embeddings[0])
    itself = torch.zeros_like(logits, dtype=torch.bool)
    itself.diagonal(begin).fill_(True)
    positive = (labels[begin:end, None] == labels) & ~itself
    log_p = logits.masked_fill(itself, -torch.inf).log_softmax(1)
    return -(log_p.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)).sum() / len(labels)


def grouped_rows(embeddings: list[Tensor], labels: Tensor, begin: int, end: int) -> Tensor:
    logits = 20.0 * cos_sim(embeddings[0][begin:end], embeddings[1])
    same = labels[begin:end, None] == labels
    same.diagonal(begin).fill_(False)
    target = torch.arange(begin, end)
    return nn.functional.cross_entropy(logits.masked_fill(same, -torch.inf), target, reduction="sum") / len(labels)


CLOSED: dict[str, tuple[Callable[[], Objective], int, Callable[..., Tensor]]] = {
    "sigmoid": (lambda: Sigmoid(learnable_scale=False, learnable_bias=False), 2, sigmoid_rows),
    "SupCon": (lambda: SupCon(), 1, supcon_rows),
    "InfoNCE, groups": (lambda: InfoNCE(labels_as_groups=True), 2, grouped_rows),
}


def by_autograd(features: dict[str, Tensor], labels: Tensor, rows: Callable[..., Tensor], chunk: int) -> list[Tensor]:
    """Gradients, a chunk of rows at a time."""
    leaves = [[x.detach().requires_grad_() for x in column.split(chunk)] for column in features.values()]
    embeddings = [torch.cat(column) for column in leaves]
    for begin in range(0, len(labels), chunk):
        rows(embeddings, labels, begin, min(begin + chunk, len(labels))).backward()
    return [torch.cat([leaf.grad for leaf in column]) for column in leaves]


def make_products(features: dict[str, Tensor], chunk: int) -> Callable[[], None]:
    """S = u vᵀ, S v and Sᵀ u in row chunks, into buffers made beforehand."""
    columns = [nn.functional.normalize(x) for x in features.values()]
    u, v = columns[0], columns[-1]  # one column is scored against itself
    scores, du, dv = u.new_empty(chunk, len(u)), torch.empty_like(u), torch.empty_like(v)

    def products() -> None:
        dv.zero_()
        for begin in range(0, len(u), chunk):
            some = u[begin : begin + chunk]
            S = torch.mm(some, v.T, out=scores[: len(some)])
            torch.mm(S, v, out=du[begin : begin + chunk])
            dv.addmm_(S.T, some)

    return products


def closed_table(arguments: argparse.Namespace) -> str:
    """Closed forms: their time, that of autograd, and their gradients' distance from it."""
    rows = []
    labels = torch.arange(arguments.batch_size) // CLASS_SIZE
    for name, (make, columns, rows_of) in CLOSED.items():
        features = make_features(arguments.batch_size, arguments.dim, columns)
        objective = make()
        sides: dict[str, Callable[[], object]] = {
            "ours": lambda o=objective, f=features: o.value_and_cotangents(f, labels=labels)
        }
        for chunk in (*CHUNKS, arguments.batch_size):
            sides[f"chunk {chunk}"] = lambda f=features, r=rows_of, c=chunk: by_autograd(f, labels, r, c)
        for chunk in PRODUCT_CHUNKS:
            sides[f"products {chunk}"] = make_products(features, chunk)
        seconds = {side: cpu for side, (cpu, _) in time_in_turn(sides, arguments.repeats).items()}
        ours, dense = seconds["ours"], seconds[f"chunk {arguments.batch_size}"]
        best = min(CHUNKS, key=lambda chunk: seconds[f"chunk {chunk}"])
        products = min(seconds[f"products {chunk}"] for chunk in PRODUCT_CHUNKS)
        truth = torch.cat(by_autograd({n: x.double() for n, x in features.items()}, labels, rows_of, 512))
        found = torch.cat(list(objective.value_and_cotangents(features, labels=labels).cotangents.values()))
        chunked = seconds[f"chunk {best}"]
        rows.append(
            [
                name,
                f"{ours:.3f}",
                f"{chunked:.3f} ({best})",
                f"{seconds['chunk 32']:.3f}",
                f"{dense:.3f}",
                f"{products:.3f}",
                f"{chunked / ours:.2f}",
                f"{ours / products:.2f}",
                f"{((found - truth).norm() / truth.norm()).item():.0e}",
            ]
        )
    head = ["loss", "closed form", "chunked, best (at)", "chunked, 32", "dense", "products"]
    return table([*head, "× chunked", "of products", "gradient error"], rows)


ADAPTED: dict[str, tuple[Callable[[], nn.Module], int, Callable[[int], Tensor | None]]] = {
    "CoSENT": (lambda: losses.CoSENTLoss(None), 2, lambda n: torch.linspace(0, 1, n)),
    "AnglE": (lambda: losses.AnglELoss(None), 2, lambda n: torch.linspace(0, 1, n)),
    "CosineSimilarity": (lambda: losses.CosineSimilarityLoss(None), 2, lambda n: torch.linspace(0, 1, n)),
    "Triplet": (lambda: losses.TripletLoss(None), 3, lambda n: None),
    "BatchHardTriplet": (lambda: losses.BatchHardTripletLoss(None), 1, lambda n: torch.arange(n) // CLASS_SIZE),
    "DistillKLDiv": (
        lambda: losses.DistillKLDivLoss(None),
        3,
        lambda n: torch.rand(n, 2, generator=torch.Generator().manual_seed(0)),
    ),
    "GlobalOrthogonalRegularization": (lambda: losses.GlobalOrthogonalRegularizationLoss(None), 2, lambda n: None),
    "MultipleNegativesRanking": (lambda: losses.MultipleNegativesRankingLoss(None), 2, lambda n: None),
}


def adapted_table(arguments: argparse.Namespace) -> str:
    """Losses of sentence-transformers through the adapter, and called by themselves."""
    rows = []
    for name, (make, columns, make_labels) in ADAPTED.items():
        features = make_features(arguments.batch_size, arguments.dim, columns)
        labels, loss = make_labels(arguments.batch_size), make()
        objective = LossObjective(loss)

        def alone(features=features, labels=labels, loss=loss) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in features.values()]
            value = loss.compute_loss_from_embeddings(leaves, labels)
            (sum(value.values()) if isinstance(value, dict) else value).backward()
            return [leaf.grad for leaf in leaves]

        sides = {
            "adapter": lambda o=objective, f=features, y=labels: o.value_and_cotangents(f, labels=y),
            "alone": alone,
        }
        seconds = {side: cpu for side, (cpu, _) in time_in_turn(sides, arguments.repeats).items()}
        ratio = seconds["adapter"] / seconds["alone"]
        rows.append([name, f"{seconds['adapter']:.4f}", f"{seconds['alone']:.4f}", f"{ratio:.2f}"])
    return table(["loss", "through the adapter", "by itself", "ratio"], rows)


def main() -> None:
    restart_with_sleeping_threads()
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    print(header())
    where = f"B = {arguments.batch_size}, D = {arguments.dim}, CPU-seconds of value and gradients (medians)"
    for name, make in {"closed": closed_table, "adapted": adapted_table}.items():
        if name in arguments.tables:
            print(f"### {'Closed forms' if name == 'closed' else 'Losses of sentence-transformers'}, {where}\n")
            print(make(arguments), flush=True)
            print()


if __name__ == "__main__":
    main()
