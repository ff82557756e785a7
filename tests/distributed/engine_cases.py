"""What the ranks of test_engines.py run: an optimizer's step under an engine, beside the same step in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from st_cached_extras.distributed.checkpoints import whole_parameters
from st_cached_extras.distributed.engines import engine_of
from st_cached_extras.losses import CachedInfoNCELoss
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.replay import FeatureGradientReplay, ReplayLoss
from st_cached_extras.testing.engines import (
    check_wrapped,
    forget_engine,
    local_elements,
    make_accelerator,
)
from st_cached_extras.testing.tiny_models import (
    random_clips,
    random_sentences,
    relative_error,
    tiny_text_model,
    tiny_two_tower_model,
)
from tests.distributed.ddp_cases import WithoutWorldFactor, counting_collectives
from tests.distributed.loss_families import FAMILIES

LEARNING_RATE = 0.3


@dataclass
class Case:
    """One comparison.

    Attributes:
        engine: one of :data:`~st_cached_extras.testing.engines.ENGINES`.
        rows: rows of every rank.
        gather: one global loss, or the mean of local ones.
        accumulation: batches before the optimizer's step.
        family: which loss, of :data:`FAMILIES`; its own parameters are trained, too.
        loss: its options.
        towers: a Router of text and video instead of one text model; "frozen" freezes the video tower.
        variant: of the text model: "lora" trains adapters alone, "checkpointing" keeps no activations.
        options: of DeepSpeed's ZeRO.
        steps: of the optimizer.
        precision: of Accelerate's mixed precision.
    """

    engine: str
    rows: tuple[int, ...] = (12, 12, 12, 12)
    gather: bool = True
    accumulation: int = 1
    family: str = "infonce"
    loss: dict[str, Any] = field(default_factory=lambda: {"mini_batch_size": 4})
    towers: str = ""
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    precision: str = "no"


UNEVEN = (12, 5, 9, 7)


def make_model(case: Case) -> nn.Module:
    if not case.towers:
        model = tiny_text_model()
        transformer = model[0].model
        transformer.pooler = None  # mean pooling leaves it without a gradient
        if case.variant == "checkpointing":
            transformer.gradient_checkpointing_enable({"use_reentrant": False})
        elif case.variant == "lora":
            adapters = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
            inject_adapter_in_model(adapters, transformer)
        return model
    model = tiny_two_tower_model()
    model[0].sub_modules["text"][0].model.pooler = None
    if case.towers == "frozen":
        model[0].sub_modules["video"].requires_grad_(False)
    return model


def make_columns(case: Case, model: nn.Module, ranks: list[int], batch: int) -> list[dict]:
    """The columns of some ranks' rows together. Inputs of a rank depend on the rank and the batch alone."""
    seeds = [1000 * batch + 100 * rank for rank in ranks]
    columns = []
    for column in range(1 if case.towers else 2):
        # Lengths differ between ranks too, so that token budgets give them different numbers of mini-batches.
        texts = [random_sentences(case.rows[r], s + column, 6 + 5 * r) for r, s in zip(ranks, seeds, strict=True)]
        columns.append(model.preprocess([text for of_rank in texts for text in of_rank]))
    if case.towers:
        clips = [random_clips(case.rows[r], seed) for r, seed in zip(ranks, seeds, strict=True)]
        columns.append(model.preprocess([clip for of_rank in clips for clip in of_rank]))
    return columns


def make_labels(case: Case, ranks: list[int]) -> Tensor:
    """Group ids that the rows of several ranks share; of CoSENT, scores."""
    labels = torch.cat([torch.arange(case.rows[rank]) % 3 for rank in ranks])
    return labels / 2 if case.family == "cosent" else labels


def make_loss(case: Case, model: nn.Module, gather: bool) -> ReplayLoss:
    return FAMILIES[case.family](model, **case.loss, gather_across_devices=gather)


class DrawsOfRanks:
    """In one process, the rows that the ranks would draw of the rows that each would have."""

    counts: tuple[int, ...]
    ranks: tuple[int, ...]

    def select_rows(self, count: int, rank: int) -> Tensor:
        drawn, begin = [], 0
        for rank, of_rank in zip(self.ranks, self.counts, strict=True):
            drawn.append(begin + super().select_rows(of_rank, rank))
            begin += of_rank
        return torch.cat(drawn)


def total(value: Tensor | dict[str, Tensor]) -> Tensor:
    """The loss, of a loss with several components their sum."""
    return sum(value.values()) if isinstance(value, dict) else value


def share_parameters(losses: list[ReplayLoss]) -> None:
    """Let all losses own the parameters of the first one, of which all ranks have a copy."""
    for loss in losses[1:]:
        shared = dict(zip(loss.own_parameters().values(), losses[0].own_parameters().values(), strict=True))
        for module in loss.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in shared:
                    setattr(module, name, shared[parameter])


def all_parameters(model: nn.Module, loss: ReplayLoss) -> dict[str, Tensor]:
    """Those of the model, whole, and the loss's own."""
    own = {f"loss.{name}": parameter.detach().clone() for name, parameter in loss.own_parameters().items()}
    return whole_parameters(model) | own


def run_in_one_process(case: Case, world_size: int) -> list[dict[str, Tensor]]:
    """Parameters after every SGD step of one process that has the rows of all ranks."""
    model = make_model(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    groups = [list(range(world_size))] if case.gather else [[rank] for rank in range(world_size)]
    losses = []
    for group in groups:
        loss = type("OfRanks", (DrawsOfRanks, FAMILIES[case.family]), {})(model, **case.loss)
        loss.ranks, loss.counts = tuple(group), tuple(case.rows[rank] for rank in group)
        losses.append(loss)
    share_parameters(losses)
    own = list(losses[0].own_parameters().values())
    optimizer.add_param_group({"params": own})
    after = []
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in range(case.accumulation):
            for group, loss in zip(groups, losses, strict=True):
                columns = make_columns(case, model, group, case.accumulation * step + batch)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                    value = total(loss(columns, make_labels(case, group)))
                (value / (len(groups) * case.accumulation)).backward()
        optimizer.step()
        after.append(all_parameters(model, losses[0]))
    return after


def run_on_ranks(
    case: Case, make_loss: Callable[..., ReplayLoss] = make_loss
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Parameters after every SGD step under the engine, and what was seen on the way."""
    model = make_model(case)
    elements = sum(parameter.numel() for parameter in model.parameters())
    layers = ("BertLayer", "VideoMAELayer") if case.towers else ("BertLayer",)
    accelerator = make_accelerator(
        case.engine, layers=layers, accumulation=case.accumulation, precision=case.precision, **case.options
    )
    loss = make_loss(case, model, case.gather)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    rank, after, reductions = dist.get_rank(), [], []
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    check_wrapped(wrapped, case.engine)
    loss.model = wrapped
    own = list(loss.own_parameters().values())
    own_optimizer = torch.optim.SGD(own, lr=LEARNING_RATE) if own else None
    for step in range(case.steps):
        for batch in range(case.accumulation):
            columns = make_columns(case, model, [rank], case.accumulation * step + batch)
            with accelerator.accumulate(wrapped), counting_reductions() as counted:
                accelerator.backward(total(loss(columns, make_labels(case, [rank]))))
                optimizer.step()
                optimizer.zero_grad()
            reductions.append(counted)
        if own_optimizer is not None:
            own_optimizer.step()
            own_optimizer.zero_grad()
        after.append(all_parameters(wrapped, loss))
    seen = {
        "engine": type(engine_of(wrapped)).__name__,
        "share": local_elements(wrapped) / elements,
        "reductions": [dict(counted) for counted in reductions],
    }
    return after, seen


REDUCTIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce_scatter",
    "all_to_all_single",
)


@contextmanager
def counting_reductions() -> Iterator[Counter]:
    """Counts reductions of floating-point tensors, by the name of the call."""
    counted: Counter = Counter()
    modules = [dist, dist.distributed_c10d]
    saved = {
        (module, name): getattr(module, name) for module in modules for name in REDUCTIONS if hasattr(module, name)
    }

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(x for x in (*args, *kwargs.values()) if torch.is_tensor(x) or isinstance(x, list))
            if isinstance(tensor, list) or (tensor.is_floating_point() and tensor.numel() > 1):
                counted[name] += 1
            return function(*args, **kwargs)

        return call

    for (module, name), function in saved.items():
        setattr(module, name, counting(name, function))
    try:
        yield counted
    finally:
        for (module, name), function in saved.items():
            setattr(module, name, function)


def check_case(case: Case, make_loss: Callable[..., ReplayLoss] = make_loss) -> dict[str, Any]:
    """Relative L2 distances to one process after every step: of the parameters, of what the steps changed, and of what
    they changed of the loss's own parameters."""
    forget_engine()
    expected = run_in_one_process(case, dist.get_world_size())
    start = all_parameters(model := make_model(case), make_loss(case, model, case.gather))
    found, seen = run_on_ranks(case, make_loss)
    change = lambda after: {name: after[name] - start[name] for name in start}  # noqa: E731
    own = lambda after: {name: x for name, x in change(after).items() if name.startswith("loss.")}  # noqa: E731
    return {
        "parameters": [relative_error(a, b) for a, b in zip(found, expected, strict=True)],
        "change": [relative_error(change(a), change(b)) for a, b in zip(found, expected, strict=True)],
        "own change": [relative_error(own(a), own(b)) for a, b in zip(found, expected, strict=True) if own(b)],
        "checksum": float(sum(value.double().sum() for value in found[-1].values())),
        **seen,
    }


def check_cases(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    return {name: check_case(case) for name, case in cases.items()}


def check_engine(engine: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Everything that the ranks of one launch are asked."""
    return {
        "cases": check_cases(cases),
        "collectives": count_feature_collectives(engine),
        "bf16": bf16_step(engine),
        "bf16 mutant": bf16_step(
            engine, lambda case, model, gather: WithoutWorldFactor(model, gather_across_devices=gather, **case.loss)
        ),
    }


def bf16_step(engine: str, make_loss: Callable[..., ReplayLoss] = make_loss) -> float:
    """Distance of what one step in mixed precision changes to one process under autocast."""
    case = Case(engine, rows=UNEVEN, steps=1, precision="bf16")
    return check_case(case, make_loss)["change"][0]


def count_feature_collectives(engine: str) -> dict[int, dict[str, int]]:
    """Collectives of features in one step, by mini-batch size."""
    case = Case(engine, rows=UNEVEN)
    forget_engine()
    model = make_model(case)
    accelerator = make_accelerator(engine)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    check_wrapped(wrapped, engine)
    counts = {}
    for mini_batch_size in (2, 5, 64):
        loss = CachedInfoNCELoss(model, mini_batch_size=mini_batch_size, gather_across_devices=True)
        loss.model = wrapped
        with counting_collectives() as calls:
            accelerator.backward(loss(make_columns(case, model, [dist.get_rank()], 0), None))
        optimizer.step()
        counts[mini_batch_size] = calls
    return counts


def refusals() -> list[str]:
    """What is said where gradients would be wrong."""
    messages = []
    case = Case("zero2", rows=UNEVEN, towers="both", options={"offload_optimizer": {"device": "cpu"}})
    messages.append(_message(lambda: run_on_ranks(case)))
    forget_engine()
    wrapped = FullyShardedDataParallel(make_model(Case("fsdp1")), device_id=torch.device("cpu"))
    messages.append(_message(lambda: engine_of(wrapped)))
    messages.append(_message(lambda: run_on_ranks(Case("zero0"))))
    return messages


def _message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail_on_one_rank(engine: str, broken: str) -> None:
    """A step in which rank 1 fails: in its inputs, in its embeddings, or in the middle of a forward."""
    case = Case(engine)
    forget_engine()
    model = make_model(case)
    accelerator = make_accelerator(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    check_wrapped(wrapped, engine)
    loss = make_loss(case, model, gather=True)
    loss.model = wrapped
    columns = make_columns(case, model, [dist.get_rank()], 0)
    if dist.get_rank() == 1:
        if broken == "rows":
            columns[1] = {key: value[:5] if torch.is_tensor(value) else value for key, value in columns[1].items()}
        elif broken == "embeddings":
            model[1].register_forward_hook(_make_not_finite)
        else:
            layer = model[0].model.encoder.layer[1]
            calls: list[int] = []
            layer.register_forward_pre_hook(lambda *args: _fail_at_the_second(calls))
    accelerator.backward(loss(columns, None))


def _make_not_finite(module: nn.Module, inputs: Any, outputs: dict) -> dict:
    return outputs | {"sentence_embedding": outputs["sentence_embedding"] * torch.nan}


def _fail_at_the_second(calls: list[int]) -> None:
    calls.append(1)
    if len(calls) == 2:
        raise torch.OutOfMemoryError("no room for this mini-batch")


class Producer(nn.Module):
    """A tiny generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 8)

    def forward(self, noise: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(noise)))


def replay_protocol(engine: str) -> float:
    """Distance of what a generator's step changes, by FeatureGradientReplay under an engine, to one process."""
    noise = torch.randn(2 * 8, 6, generator=torch.Generator().manual_seed(1))
    forget_engine()
    truth, start = Producer(), whole_parameters(Producer())
    features = truth(noise)
    value = InfoNCE().value_and_cotangents({"anchor": features.detach()[:, :4], "positive": features.detach()[:, 4:]})
    torch.autograd.backward(features, torch.cat([value.cotangents["anchor"], value.cotangents["positive"]], dim=1))
    torch.optim.SGD(truth.parameters(), lr=LEARNING_RATE).step()

    producer = Producer()
    accelerator = make_accelerator(engine, layers=("Linear",))
    optimizer = torch.optim.SGD(producer.parameters(), lr=LEARNING_RATE)
    wrapped, optimizer = accelerator.prepare(producer, optimizer)
    check_wrapped(wrapped, engine)
    mine = noise.chunk(2)[dist.get_rank()].split(3)
    replay = FeatureGradientReplay(InfoNCE(), target_local_samples=8, differentiated_local_samples=8)
    names = lambda x: {"anchor": x[:, :4], "positive": x[:, 4:]}  # noqa: E731
    with torch.no_grad():
        for part in mine:
            replay.add(names(wrapped(part)))
    replay.finalize()
    replay.replay(lambda index: names(wrapped(mine[index])), model=wrapped)
    replay.commit()
    (wrapped if engine.startswith("zero") else optimizer).step()
    found, expected = whole_parameters(wrapped), whole_parameters(truth)
    change = lambda after: {name: after[name] - start[name] for name in start}  # noqa: E731
    return relative_error(change(found), change(expected))
