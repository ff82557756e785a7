"""What ranks run of staged replay: a generator under an engine, before a decoder and encoders, beside one process."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras.distributed.checkpoints import whole_parameters
from st_cached_extras.replay import FeatureGradientReplay, Stage, Staged
from st_cached_extras.testing.dense_rbf import DenseRBF
from st_cached_extras.testing.engines import check_wrapped, forget_engine, make_accelerator
from st_cached_extras.testing.tiny_models import relative_error

LEARNING_RATE, STEPS, ACCUMULATION = 0.3, 2, 2
PARTS = ((4, 4), (3, 1))  # rows of every collect, by rank; the stages cut them into unlike numbers of mini-batches


def make_parts() -> nn.ModuleDict:
    """A generator and a decoder of several layers, and two encoders."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
    decoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 10))
    encoders = nn.ModuleDict({"first": nn.Linear(10, 5), "second": nn.Linear(10, 7)})
    return nn.ModuleDict({"generator": generator, "decoder": decoder, "encoders": encoders})


def noise(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(sum(PARTS[rank]), 6, generator=generator)


def train_in_one_process() -> dict[str, Tensor]:
    """The generator's parameters after all steps, by one backward through everything."""
    parts = make_parts()
    generator = parts["generator"]
    optimizer = torch.optim.SGD(generator.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS * ACCUMULATION):
        clips = parts["decoder"](generator(torch.cat([noise(step, rank) for rank in range(len(PARTS))])))
        features = {name: encoder(clips) for name, encoder in parts["encoders"].items()}
        found = DenseRBF(uses_reference=False).value_and_cotangents({n: x.detach() for n, x in features.items()})
        torch.autograd.backward(list(features.values()), [found.cotangents[n] / ACCUMULATION for n in features])
        if step % ACCUMULATION == ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
    return whole_parameters(generator)


def staged_generator(engine: str) -> float:
    """Distance of what the steps of a staged replay under an engine change of the generator, to one process."""
    forget_engine()
    expected, start = train_in_one_process(), whole_parameters(make_parts()["generator"])
    parts = make_parts()
    accelerator = make_accelerator(engine, layers=("Linear",), accumulation=ACCUMULATION)
    optimizer = torch.optim.SGD(parts["generator"].parameters(), lr=LEARNING_RATE)
    wrapped, optimizer = accelerator.prepare(parts["generator"], optimizer)
    check_wrapped(wrapped, engine)
    if engine == "fsdp2":  # which may shard what is frozen, too
        fully_shard(parts["decoder"])
    staged = Staged(
        Stage("generator", wrapped, mini_batch_size=2),
        Stage("decoder", parts["decoder"], mini_batch_size=1, frozen=True),
        Stage("encoders", dict(parts["encoders"]), frozen=True),
    )
    own = PARTS[dist.get_rank()]
    replay = FeatureGradientReplay(
        DenseRBF(uses_reference=False),
        target_local_samples=sum(own),
        differentiated_local_samples=sum(own),
        loss_scale=1 / ACCUMULATION,
    )
    for step in range(STEPS * ACCUMULATION):
        # DeepSpeed counts batches by itself.
        with nullcontext() if engine.startswith("zero") else accelerator.accumulate(wrapped):
            passes = [staged.collect(part) for part in noise(step, dist.get_rank()).split(own)]
            for one in passes:
                replay.add(one.features)
            replay.finalize()
            replay.replay(lambda index: passes[index].replay(), model=wrapped)  # noqa: B023
            replay.commit()
            if engine.startswith("zero"):
                wrapped.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
    found = whole_parameters(wrapped)
    change = lambda after: {name: after[name] - start[name] for name in start}  # noqa: E731
    return relative_error(change(found), change(expected))


def break_parity(engine: str, stage: str, mini_batch: int) -> None:
    """A step in which a stage of rank 1 computes something else in one of two mini-batches of the second pass."""
    forget_engine()
    parts = make_parts()
    if engine == "ddp":
        wrapped = DistributedDataParallel(parts["generator"])
    else:
        accelerator = make_accelerator(engine, layers=("Linear",))
        optimizer = torch.optim.SGD(parts["generator"].parameters(), lr=LEARNING_RATE)
        wrapped, _ = accelerator.prepare(parts["generator"], optimizer)
    check_wrapped(wrapped, engine)
    stages = {"before": nn.Identity(), "generator": wrapped, "decoder": parts["decoder"]}
    staged = Staged(*stages.items())
    passes = [staged.collect(part) for part in noise(0, 0).requires_grad_().split(4)]
    replay = FeatureGradientReplay(
        DenseRBF(uses_reference=False), target_local_samples=8, differentiated_local_samples=8
    )
    for one in passes:
        replay.add({"decoded": one.features})
    replay.finalize()
    if dist.get_rank() == 1:
        calls = iter(range(len(passes)))
        broken = stages[stage] if stage == "before" else parts[stage]
        broken.register_forward_hook(lambda module, inputs, output: output + (next(calls) == mini_batch))
    replay.replay(lambda index: {"decoded": passes[index].replay()}, model=wrapped)


def break_parity_under_ddp() -> list[str]:
    """What this rank raises when another one fails: before, in and after what they wait for each other in."""
    messages = []
    for stage, mini_batch in (("decoder", 0), ("decoder", 1), ("generator", 1), ("before", 1)):
        try:
            break_parity("ddp", stage, mini_batch)
            messages.append("no error")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def refusal() -> str:
    """What is said where DeepSpeed wraps a frozen stage."""
    forget_engine()
    parts = make_parts()
    optimizer = torch.optim.SGD(parts["decoder"].parameters(), lr=LEARNING_RATE)
    wrapped, _ = make_accelerator("zero3").prepare(parts["decoder"], optimizer)
    try:
        Staged(Stage("decoder", wrapped, frozen=True))
    except ValueError as error:
        return str(error)
    return "no error"
