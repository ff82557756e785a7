"""What the ranks of test_ddp.py run: one SGD step under DDP, beside the same step in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.distributed import World
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    random_clips,
    random_sentences,
    relative_error,
    tiny_text_model,
    tiny_two_tower_model,
)

LEARNING_RATE = 0.3
EVERY_DIRECTION = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def bilinear(a: Tensor, b: Tensor) -> Tensor:
    """A similarity without a closed form here."""
    return torch.tanh(a @ b.T)


@dataclass
class Case:
    """One comparison.

    Attributes:
        rows: rows of every rank.
        gather: one global loss, or the mean of local ones.
        accumulation: batches before the optimizer's step.
        loss: options of the cached loss alone.
        objective: options of both losses.
        ddp: options of DistributedDataParallel.
        towers: a Router of text and video instead of one text model; "frozen" freezes the video tower, which the last
            column uses.
        columns: text columns.
    """

    rows: tuple[int, ...] = (8, 8, 8)
    gather: bool = True
    accumulation: int = 1
    loss: dict[str, Any] = field(default_factory=lambda: {"mini_batch_size": 3})
    objective: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=lambda: {"find_unused_parameters": True})
    towers: str = ""
    columns: int = 2


UNEVEN = (12, 5, 9)
CASES: dict[str, Case] = {
    "even": Case(),
    "uneven": Case(rows=(48, 32, 16)),
    "accumulated": Case(rows=UNEVEN, accumulation=2),
    "budgets": Case(rows=UNEVEN, loss={"mini_batch_num_tokens": 30}),
    "local": Case(gather=False),
    "local uneven": Case(rows=(48, 32, 16), gather=False),
    "local accumulated": Case(rows=UNEVEN, gather=False, accumulation=2),
    "local budgets": Case(rows=UNEVEN, gather=False, loss={"mini_batch_num_tokens": 30}),
    "every direction": Case(
        rows=UNEVEN, columns=3, objective={"directions": EVERY_DIRECTION, "hardness_mode": "all_negatives"}
    ),
    "custom similarity": Case(rows=UNEVEN, objective={"similarity_fct": bilinear, "scale": 2.0}),
    "learnable scale": Case(rows=UNEVEN, loss={"mini_batch_size": 3, "learnable_scale": True}),
    "local learnable scale": Case(
        rows=UNEVEN, gather=False, accumulation=2, loss={"mini_batch_size": 3, "learnable_scale": True}
    ),
    "static graph": Case(rows=UNEVEN, accumulation=2, ddp={"static_graph": True}),
    "no search for unused": Case(rows=UNEVEN, towers="both", ddp={}),
    "static graph, two towers": Case(rows=UNEVEN, towers="both", ddp={"static_graph": True}),
    "static graph with a search": Case(
        rows=UNEVEN, towers="both", ddp={"static_graph": True, "find_unused_parameters": True}
    ),
    "two towers": Case(rows=UNEVEN, towers="both", accumulation=2),
    "frozen tower last": Case(rows=UNEVEN, towers="frozen"),
    "bucket views": Case(rows=UNEVEN, ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}),
}


def make_model(case: Case) -> nn.Module:
    if not case.towers:
        return tiny_text_model()
    model = tiny_two_tower_model()
    # Without a search for unused parameters, DDP itself wants every trainable one used, and BERT's pooler is not.
    model[0].sub_modules["text"][0].model.pooler.requires_grad_(False)
    if case.towers == "frozen":
        model[0].sub_modules["video"].requires_grad_(False)
    return model


def make_columns(case: Case, model: nn.Module, ranks: list[int], batch: int) -> list[dict]:
    """The columns of some ranks' rows together. Inputs of a rank depend on the rank and the batch alone."""
    seeds = [1000 * batch + 100 * rank for rank in ranks]
    columns = []
    for column in range(case.columns - bool(case.towers)):
        # Lengths differ between ranks too, so that token budgets give them different numbers of mini-batches.
        texts = [
            random_sentences(case.rows[r], seed + column, 6 + 5 * r) for r, seed in zip(ranks, seeds, strict=True)
        ]
        columns.append(model.preprocess([text for of_rank in texts for text in of_rank]))
    if case.towers:
        clips = [random_clips(case.rows[r], seed) for r, seed in zip(ranks, seeds, strict=True)]
        columns.append(model.preprocess([clip for of_rank in clips for clip in of_rank]))
    return columns


def make_plain_loss(case: Case, model: nn.Module) -> nn.Module:
    options = {"hardness_strength": 2.0, **case.objective} if "hardness_mode" in case.objective else case.objective
    return MultipleNegativesRankingLoss(model, **options)


class WithScale(nn.Module):
    """ST's plain loss with a scale that is trained: the truth of ``learnable_scale``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.plain = MultipleNegativesRankingLoss(model)
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, columns: list[dict], labels: Tensor | None) -> Tensor:
        self.plain.scale = self.log_scale.exp()
        return self.plain(columns, labels)


def step_in_one_process(case: Case, world_size: int) -> tuple[dict[str, Tensor], float]:
    """Parameters after one SGD step of the truth, and its loss."""
    model = make_model(case)
    loss = WithScale(model) if "learnable_scale" in case.loss else make_plain_loss(case, model)
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=LEARNING_RATE)
    ranks = list(range(world_size))
    for batch in range(case.accumulation):
        groups = [ranks] if case.gather else [[rank] for rank in ranks]
        values = [loss(make_columns(case, model, group, batch), None) for group in groups]
        value = sum(values) / len(values)
        (value / case.accumulation).backward()
    optimizer.step()
    return _parameters(loss, model), float(value.detach())


def step_on_ranks(case: Case, make_loss: Callable[..., nn.Module]) -> tuple[dict[str, Tensor], float, int]:
    """Parameters after one SGD step under DDP, the last loss, and how often a bucket was reduced."""
    model = make_model(case)
    wrapped = DistributedDataParallel(model, **case.ddp)
    reductions = []
    if not case.ddp.get("static_graph"):
        wrapped.register_comm_hook(reductions, _counting_all_reduce)
    loss = make_loss(case, model)
    loss.model = wrapped
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=LEARNING_RATE)
    rank = dist.get_rank()
    for batch in range(case.accumulation):
        synchronise = batch == case.accumulation - 1
        with nullcontext() if synchronise else wrapped.no_sync():
            value = loss(make_columns(case, model, [rank], batch), None)
            (value / case.accumulation).backward()
    optimizer.step()
    return _parameters(loss, model), float(value.detach()), len(reductions)


def make_cached_loss(case: Case, model: nn.Module) -> CachedInfoNCELoss:
    options = {"hardness_strength": 2.0, **case.objective} if "hardness_mode" in case.objective else case.objective
    return CachedInfoNCELoss(model, **options, **case.loss, gather_across_devices=case.gather)


def check_case(name: str, make_loss: Callable[..., nn.Module] = make_cached_loss) -> dict[str, float]:
    """Relative L2 distances to one process, of the parameters and of what the step changed."""
    case = CASES[name]
    expected, expected_loss = step_in_one_process(case, dist.get_world_size())
    found, found_loss, reductions = step_on_ranks(case, make_loss)
    start = _parameters(make_loss(case, start_model := make_model(case)), start_model)
    change = lambda after: {name: after[name] - start[name] for name in start}  # noqa: E731
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, found_loss)
    return {
        "parameters": relative_error(found, expected),
        "change": relative_error(change(found), change(expected)),
        "loss": abs(sum(losses) / len(losses) - expected_loss) / abs(expected_loss),
        "loss spread": max(losses) - min(losses) if case.gather else 0.0,
        "reductions": float(reductions),
        "checksum": float(sum(value.double().sum() for value in found.values())),
    }


def check_cases(names: list[str]) -> dict[str, dict[str, float]]:
    return {name: check_case(name) for name in names}


class WithoutWorldFactor(CachedInfoNCELoss):
    @property
    def world_factor(self) -> int:
        return 1


class WithWorldFactorAlways(CachedInfoNCELoss):
    @property
    def world_factor(self) -> int:
        return dist.get_world_size()


def make_mutant(mutant: type[CachedInfoNCELoss], case: Case, model: nn.Module) -> CachedInfoNCELoss:
    return mutant(model, **case.loss, gather_across_devices=case.gather)


def make_mutant_without(case: Case, model: nn.Module) -> CachedInfoNCELoss:
    return make_mutant(WithoutWorldFactor, case, model)


def make_mutant_always(case: Case, model: nn.Module) -> CachedInfoNCELoss:
    return make_mutant(WithWorldFactorAlways, case, model)


def check_mutants() -> tuple[float, float]:
    return (
        check_case("uneven", make_mutant_without)["change"],
        check_case("local uneven", make_mutant_always)["change"],
    )


def count_collectives() -> dict[str, Any]:
    """Collectives of features in one step by mini-batch size, and the gradient reductions of a plain DDP step."""
    case = CASES["uneven"]
    counts = {}
    for mini_batch_size in (2, 5, 64):
        model = make_model(case)
        loss = CachedInfoNCELoss(model, mini_batch_size=mini_batch_size, gather_across_devices=True)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        loss.model = wrapped
        with counting_collectives() as calls:
            loss(make_columns(case, model, [dist.get_rank()], 0), None).backward()
        counts[mini_batch_size] = calls
    model = make_model(case)
    model[0].model.pooler.requires_grad_(False)  # a plain step of several columns cannot search for unused parameters
    wrapped = DistributedDataParallel(model)
    reductions: list[int] = []
    wrapped.register_comm_hook(reductions, _counting_all_reduce)
    MultipleNegativesRankingLoss(wrapped)(make_columns(case, model, [dist.get_rank()], 0), None).backward()
    return {"features": counts, "plain reductions": len(reductions)}


class counting_collectives:
    """Counts collectives of floating-point tensors that Python code of the package starts."""

    names = ("all_gather", "reduce_scatter")

    def __enter__(self) -> dict[str, int]:
        from st_cached_extras.distributed import world

        self.module, self.saved, self.calls = world, {}, {}
        for name in self.names:
            attribute = f"_{name}"
            self.saved[attribute] = function = getattr(world, attribute)

            def counted(output, tensor, *args, _name=name, _function=function, **kwargs):
                if tensor.is_floating_point():
                    self.calls[_name] = self.calls.get(_name, 0) + 1
                return _function(output, tensor, *args, **kwargs)

            setattr(world, attribute, counted)
        return self.calls

    def __exit__(self, *exception: object) -> None:
        for attribute, function in self.saved.items():
            setattr(self.module, attribute, function)


def _counting_all_reduce(reductions, bucket):  # DDP refuses annotations that are strings
    reductions.append(bucket.index())
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def _parameters(loss: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's parameters and of a trained scale."""
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scales = [p.detach().clone() for name, p in loss.named_parameters() if name.endswith("log_scale")]
    return parameters | {"log_scale": scales[0]} if scales else parameters


def check_errors() -> list[str]:
    """What each rank hears when one rank's batch is bad; afterwards all train on."""
    rank, messages = dist.get_rank(), []
    for broken in ("embeddings", "rows", "producer", "replay"):
        case = CASES["even"]
        model = make_model(case)
        loss = CachedInfoNCELoss(model, mini_batch_size=3, gather_across_devices=True)
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)
        columns = make_columns(case, model, [rank], 0)
        good = copy_columns(columns)
        calls = []
        if rank == 1 and broken == "embeddings":
            word = columns[1]["input_ids"][4, 1].clone()
            kept = model[0].model.embeddings.word_embeddings.weight.detach().clone()
            model[0].model.embeddings.word_embeddings.weight.data[word] = float("nan")
        elif rank == 1 and broken == "rows":
            columns[1] = {key: value[:5] if torch.is_tensor(value) else value for key, value in columns[1].items()}
        elif rank == 1:
            limit = {"producer": 2, "replay": 8}[broken]  # 6 mini-batches are collected before the first replay

            def fail(module, args, calls=calls, limit=limit):
                calls.append(1)
                if len(calls) == limit:
                    raise torch.OutOfMemoryError("no room for this mini-batch")

            handle = model[0].register_forward_pre_hook(fail)
        try:
            loss(columns, None).backward()
            messages.append("no error")
        except RuntimeError as error:
            messages.append(f"{type(error).__name__}: {error}")
        if rank == 1 and broken == "embeddings":
            model[0].model.embeddings.word_embeddings.weight.data.copy_(kept)
        if rank == 1 and broken in ("producer", "replay"):
            handle.remove()
        loss.zero_grad()
        loss(good, None).backward()
    return messages


def check_disagreement() -> str:
    """Ranks whose losses are configured differently."""
    model = tiny_text_model()
    loss = CachedInfoNCELoss(model, scale=20.0 + dist.get_rank(), gather_across_devices=True)
    try:
        loss(make_columns(CASES["even"], model, [dist.get_rank()], 0), None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def local_evaluation_on_one_rank() -> float | None:
    """Evaluates a loss without gathering on rank 0 alone: nothing may wait for the others."""
    model = tiny_text_model()
    loss = CachedInfoNCELoss(model, mini_batch_size=3)
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    if dist.get_rank() != 0:
        return None
    with torch.no_grad():
        return float(loss(make_columns(CASES["even"], model, [0], 0), None))


def two_losses_in_one_step() -> tuple[float, float, float, float]:
    """Gradients of two learned scales whose losses share an accumulated step, and those of one process."""
    case = CASES["learnable scale"]
    rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
    model = make_model(case)
    wrapped = DistributedDataParallel(model, **case.ddp)
    losses = [make_cached_loss(case, model) for _ in range(2)]
    for loss in losses:
        loss.model = wrapped
    with wrapped.no_sync():
        losses[0](make_columns(case, model, [rank], 0), None).backward()
    losses[1](make_columns(case, model, [rank], 1), None).backward()
    truths = []
    for batch in range(2):
        truth = WithScale(model := make_model(case))
        truth(make_columns(case, model, ranks, batch), None).backward()
        truths.append(float(truth.log_scale.grad))
    return (*(float(loss.objective.log_scale.grad) for loss in losses), *truths)


def errors_between_collecting_and_replaying() -> list[str]:
    """What each rank hears when one rank fails where no mini-batch is run."""
    rank, messages = dist.get_rank(), []
    case = CASES["even"]
    for broken in ("iterator", "to_features", "to_targets", "no trainable row"):
        model = make_model(case)
        loss = CachedInfoNCELoss(model, mini_batch_size=3, gather_across_devices=True)
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)
        columns: Any = make_columns(case, model, [rank], 0)

        def fail(*args: Any, broken: str = broken) -> Any:
            raise KeyError(f"no {broken} here")

        if rank == 1 and broken == "iterator":
            columns = (fail() for _ in range(2))
        elif rank == 1 and broken == "no trainable row":
            model.requires_grad_(False)
        elif rank == 1:
            setattr(loss, broken, fail)
        try:
            loss(columns, None).backward()
            messages.append("no error")
        except RuntimeError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def count_operations() -> tuple[int, float]:
    """Floating-point operations of this rank's loss stage, and those of its three products."""
    world, rows, width = World.current(), (48, 32, 16), 64
    counts = rows[: world.size]
    features = {name: torch.randn(counts[world.rank], width) for name in ("anchor", "positive")}
    # Torch counts addmm, but not where it adds in place.
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        InfoNCE(chunk_size=7).value_and_cotangents(features, world=world)
    return counter.get_total_flops(), 6.0 * counts[world.rank] * sum(counts) * width


def train_the_scale(steps: int = 5) -> tuple[list[float], list[float]]:
    """A learned scale after every step under DDP, and in one process."""
    case = CASES["learnable scale"]
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def run(loss: nn.Module, model: nn.Module, ranks: list[int]) -> list[float]:
        optimizer = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
        scales = []
        for batch in range(steps):
            optimizer.zero_grad()
            loss(make_columns(case, model, ranks, batch), None).backward()
            optimizer.step()
            scales.append(next(float(p.detach().exp()) for n, p in loss.named_parameters() if n.endswith("log_scale")))
        return scales

    model = make_model(case)
    loss = make_cached_loss(case, model)
    loss.model = DistributedDataParallel(model, **case.ddp)
    found = run(loss, model, [rank])
    model = make_model(case)
    return found, run(WithScale(model), model, list(range(world_size)))
