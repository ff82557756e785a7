"""Staged replay: generator → decoder → encoders, run again one stage at a time, from the last to the first.

The chain runs once without a graph and keeps what entered every stage. When the cotangents of its features are known,
each stage runs again from its kept input, and its backward turns them into the cotangents of that input, which are
what the stage before it needs. One mini-batch of one stage has a graph at any time, so that a generator trains
through a decoder and several encoders whose graphs would not fit together. The gradients are those of one backward
through everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor

from st_cached_extras.distributed.engines import DDPEngine, Engine, engine_of
from st_cached_extras.distributed.world import RankError, World
from st_cached_extras.distributed.zero import ZeROEngine
from st_cached_extras.replay.cotangents import surrogate
from st_cached_extras.replay.passes import AutocastState

Value = Tensor | Mapping[str, Tensor]
"""What goes from stage to stage: a tensor [n, ...], or several by name, of the same n rows."""

Named = dict[str | None, Tensor]
"""A value by name, in here; a tensor that stands alone is called None."""


class ParityError(RuntimeError):
    """A stage did not compute a second time what it computed first; the message names the stage."""


@dataclass(frozen=True)
class Stage:
    """One link of the chain.

    Args:
        name: what errors call it.
        run: a module or any function from the value before to the value after it, row by row. Or several by name,
            such as encoders: each takes the value before, and their outputs by name are the value after.
        mini_batch_size: rows that run at once; None for what ``run`` says by an attribute of that name, as frozen
            encoders do, or else all rows that were collected together.
        frozen: give no gradient to parameters, even to those that ask for one; the stage's input gets its own.
    """

    name: str
    run: Callable[[Any], Value] | Mapping[str, Callable[[Any], Tensor]]
    mini_batch_size: int | None = None
    frozen: bool = False


class Staged:
    """A chain of stages, trained with the graph of one mini-batch of one stage in memory.

    Stages compute row by row, and the same when they run again: random numbers and autocast are those of the first
    time; statistics of the batch in train mode would not be. A stage may be wrapped by DistributedDataParallel, FSDP2
    or DeepSpeed: :meth:`FeatureGradientReplay.replay` ends the step with its last mini-batch if ``model`` says which
    module is wrapped. Under FSDP2 and DeepSpeed, ranks must collect equally often; how many rows each time is free.

    Args:
        *stages: from first to last, :class:`Stage` or ``(name, run)``.
        tolerance: how far a stage's second output may be from its first, ``|second − first| / |first|`` over a
            mini-batch. ``math.inf`` compares nothing, and saves a synchronisation with the device per mini-batch of
            every stage and branch.

    Raises:
        TypeError, ValueError: no stage, two of one name, something that cannot be called, a number out of range, or
            DeepSpeed around a frozen stage.

    Example:
        >>> staged = Staged(("generator", generator), ("decoder", decoder), ("encoders", {"a": a, "b": b}))
        >>> passes = [staged.collect(noise) for noise in batch_of_noise.split(8)]
        >>> for one in passes:
        ...     replay.add(one.features)
        >>> replay.finalize()
        >>> replay.replay(lambda index: passes[index].replay())
    """

    def __init__(self, *stages: Stage | tuple[str, Any], tolerance: float = 1e-3) -> None:
        self.stages = tuple(stage if isinstance(stage, Stage) else Stage(*stage) for stage in stages)
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Staged needs at least one stage, each with a name of its own, got {names}.")
        if not tolerance > 0:
            raise ValueError(f"tolerance must be above 0, or math.inf to compare nothing, got {tolerance}.")
        self.tolerance = tolerance
        self._links = tuple(_Link(stage) for stage in self.stages)

    @torch.no_grad()
    def collect(self, inputs: Value, *, replayed: bool = True) -> StagedPass:
        """Run the chain without a graph.

        Args:
            inputs: what the first stage takes.
            replayed: whether these rows will run again; if not, nothing but their features is kept.

        Returns:
            Their features, and the way to run them again.
        """
        values = [_by_name(inputs)]
        random_states = []
        autocast = AutocastState.capture(next(iter(values[0].values())).device)
        for link in self._links:
            with link.naming_failures():
                outputs, states = link.run(values[-1])
            # What enters a stage asks for a gradient, if it can have one: the stage before needs it.
            outputs = {name: x.detach() for name, x in outputs.items()}
            values.append({name: x.requires_grad_(x.is_floating_point()) for name, x in outputs.items()})
            random_states.append(states)
            if not replayed:
                del values[:-1]
        return StagedPass(self, values, random_states if replayed else None, autocast)


class StagedPass:
    """A first pass through the stages, and how to repeat it. Made by :meth:`Staged.collect`.

    Attributes:
        features: the last stage's output, without a graph.
    """

    def __init__(
        self,
        staged: Staged,
        values: list[Named],
        random_states: list[list[RandContext]] | None,
        autocast: AutocastState,
    ) -> None:
        self._staged = staged
        self._values = values
        self._random_states = random_states
        self._autocast = autocast
        self.features = _as_value({name: x.detach() for name, x in values[-1].items()})

    def replay(self) -> Value:
        """The features, with a graph. Nothing runs yet: it is the backward through them that runs the stages again.

        It adds to ``.grad`` of what is trainable in the stages, and gives the inputs their gradient, if they asked
        for one when they were collected. (``torch.autograd.grad`` finds parameters inside the stages unused.)

        Raises:
            ValueError: the rows were collected with ``replayed=False``.
            ParityError: in the backward, if a stage's second output is not its first; zero the gradients then. Where
                gradients are synchronised, a :class:`~st_cached_extras.RankError` on all ranks.
        """
        if self._random_states is None:
            raise ValueError("Nothing was kept to run these rows again: collect them with replayed=True.")
        # Whether this is the synchronising mini-batch is known now, and the backward comes later.
        synchronising = [link.synchronising() for link in self._staged._links]
        # Stages may train although no input does: autograd comes here for the sake of this scalar.
        anchor = torch.zeros((), requires_grad=True)
        features = _StagesAgain.apply(self, synchronising, anchor, *self._values[0].values())
        return _as_value(dict(zip(self._values[-1], features, strict=True)))

    def run_again(self, cotangents: Named, synchronising: list[list[bool]]) -> Named:
        """Run the stages again, last to first, each to turn cotangents of its output into those of its input."""
        links = self._staged._links
        waiting = [world for link, flags in zip(links, synchronising, strict=True) for world in link.waiting(flags)]
        world = next((world for world in waiting if world.size > 1), World())
        try:
            with torch.enable_grad(), self._autocast.restore():
                for index in reversed(range(len(links))):
                    with links[index].naming_failures():
                        cotangents = links[index].run_again(
                            self._values[index],
                            self._values[index + 1],
                            cotangents,
                            self._random_states[index],
                            synchronising[index],
                            self._staged.tolerance,
                        )
                    if not cotangents:  # nothing before this stage can have a gradient
                        break
        except RankError:
            raise
        except Exception as error:
            world.raise_together(error)  # the others hear of it where they are about to wait for this rank
        world.raise_together(None)
        return cotangents


class _StagesAgain(torch.autograd.Function):
    """Features that are known already, whose derivative is computed by running the stages again."""

    @staticmethod
    def forward(ctx, first: StagedPass, synchronising: list[list[bool]], anchor: Tensor, *inputs: Tensor):
        ctx.first, ctx.synchronising = first, synchronising
        return tuple(x.detach() for x in first._values[-1].values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *_, features = ctx.first._values
        gradients = ctx.first.run_again(dict(zip(features, cotangents, strict=True)), ctx.synchronising)
        return None, None, None, *(gradients.get(name) for name in inputs)


class _Link:
    """A stage as the chain runs it: first without a graph, then again with one."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.runs = dict(stage.run) if isinstance(stage.run, Mapping) else {None: stage.run}
        if not self.runs or not all(callable(run) for run in self.runs.values()):
            raise TypeError(f"Stage {stage.name!r} must be a callable or a mapping of callables, got {stage.run!r}.")
        self.engines = {branch: engine_of(run) for branch, run in self.runs.items()}
        for branch, run in self.runs.items():
            if stage.frozen and isinstance(self.engines[branch], ZeROEngine):
                raise ValueError(
                    f"{self._title(branch)} is frozen, and wrapped by DeepSpeed, which knows no backward without "
                    "gradients of parameters. Hand over the module itself, or shard it by FSDP2."
                )
            size = self._mini_batch_size(run)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"{self._title(branch)}: mini_batch_size must be a number of rows, got {size!r}.")

    def synchronising(self) -> list[bool]:
        return [engine.synchronises for engine in self.engines.values()]

    def waiting(self, synchronising: list[bool]) -> Iterator[World]:
        """Of every branch, the ranks that will wait for this one in the last mini-batch, and in no other."""
        for engine, synchronises in zip(self.engines.values(), synchronising, strict=True):
            meets = isinstance(engine, DDPEngine) and synchronises and not self.stage.frozen
            yield engine.world if meets else World()

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Of what ranks wait for in every mini-batch."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.naming_failures())
            yield

    def run(self, inputs: Named) -> tuple[Named, list[RandContext]]:
        """The stage's output, and the random state before every mini-batch."""
        outputs: Named = {}
        random_states = []
        for branch, engine in self.engines.items():
            parts = []
            mini_batches = self._mini_batches(branch, inputs)
            missing = _missing(mini_batches, engine)
            for rows in mini_batches:
                taken = {name: x[rows] for name, x in inputs.items()}
                random_states.append(RandContext(*taken.values()))
                parts.append(self._checked(branch, taken, engine.collect(_as_value(taken))))
            for _ in range(missing):
                with RandContext(*taken.values()):
                    engine.collect(_as_value(taken))
            outputs.update({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        return outputs, random_states

    def run_again(
        self,
        inputs: Named,
        outputs: Named,
        cotangents: Named,
        random_states: list[RandContext],
        synchronising: list[bool],
        tolerance: float,
    ) -> Named:
        """Gradients of the inputs that ask for one; what is trainable in the stage gets its own."""
        gradients = {name: torch.zeros_like(x, dtype=_wide(x)) for name, x in inputs.items() if x.requires_grad}
        reached = False
        states = iter(random_states)
        waiting = self.waiting(synchronising)
        for (branch, engine), synchronises, world in zip(self.engines.items(), synchronising, waiting, strict=True):
            mini_batches = self._mini_batches(branch, inputs)
            missing = _missing(mini_batches, engine)
            of_branch = [next(states) for _ in mini_batches]
            for step in range(-missing, len(mini_batches)):
                rows, state = mini_batches[max(step, 0)], of_branch[max(step, 0)]
                weight = float(step >= 0)  # what is missing runs with cotangents of zero
                taken = {name: x[rows].detach().requires_grad_(x.requires_grad) for name, x in inputs.items()}
                last = synchronises and step == len(mini_batches) - 1
                if last:  # an engine may synchronise buffers in its last forward, and gradients in the backward
                    world.raise_together(None)
                with state:
                    again = self._checked(branch, taken, engine.replay(_as_value(taken), last=last))
                surrogates = []
                for name, x in again.items():
                    if tolerance < math.inf:
                        self._check_parity(branch, x.detach(), outputs[name][rows].detach(), tolerance)
                    if x.requires_grad:
                        factor = torch.full((), weight, device=x.device)  # filled there: nothing is copied
                        surrogates.append(surrogate(x, cotangents[name][rows], factor))
                if last:
                    world.raise_together(None)
                if not surrogates:
                    continue
                leaves = [taken[name] for name in gradients]
                if not self.stage.frozen:
                    engine.backward(sum(surrogates), last=last)
                    found = [leaf.grad for leaf in leaves]
                elif leaves:
                    found = torch.autograd.grad(sum(surrogates), leaves, allow_unused=True)
                else:
                    found = []
                for name, gradient in zip(gradients, found, strict=True):
                    if gradient is not None:
                        reached = True
                        gradients[name][rows] += gradient
        if gradients and not reached:
            raise ValueError(
                f"Stage {self.stage.name!r} is not differentiable in its input: no gradient reaches the stages before "
                "it. Look for no_grad, detach or integers inside it."
            )
        return gradients

    def _mini_batches(self, branch: str | None, inputs: Named) -> list[slice]:
        count = len(next(iter(inputs.values())))
        size = self._mini_batch_size(self.runs[branch]) or count
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def _mini_batch_size(self, run: Any) -> int | None:
        size = self.stage.mini_batch_size
        return getattr(run, "mini_batch_size", None) if size is None else size

    def _checked(self, branch: str | None, inputs: Named, output: Any) -> Named:
        """The output by name, if it is of as many rows as went in."""
        rows = len(next(iter(inputs.values())))
        outputs = _by_name(output) if branch is None else {branch: output}
        for x in outputs.values():
            if not isinstance(x, Tensor):
                raise TypeError(f"{self._title(branch)} must return tensors, got {type(x).__name__}.")
            if x.ndim == 0 or len(x) != rows:
                raise ValueError(f"{self._title(branch)} was given {rows} rows, and returned {list(x.shape)}.")
        return outputs

    def _check_parity(self, branch: str | None, second: Tensor, first: Tensor, tolerance: float) -> None:
        if second.shape != first.shape:
            difference = f"{list(first.shape)} at first and {list(second.shape)} then"
        else:
            wide = _wide(first)
            norm = torch.linalg.vector_norm
            error = float(norm(second.to(wide) - first.to(wide)) / norm(first.to(wide)).clamp_min(1e-30))
            if error <= tolerance:
                return
            difference = f"a relative error of {error:.2g}, where tolerance is {tolerance:.2g}"
        raise ParityError(
            f"{self._title(branch)} computed something else when it ran again: {difference}. Between the two passes "
            "its weights, its mode or a state of its own has changed, or it draws random numbers outside of torch."
        )

    def _title(self, branch: str | None) -> str:
        return f"Stage {self.stage.name!r}" + ("" if branch is None else f", branch {branch!r},")


def _missing(mini_batches: list[slice], engine: Engine) -> int:
    """How many mini-batches more than this one another rank runs, where all must run equally many."""
    return engine.world.max_count(len(mini_batches)) - len(mini_batches) if engine.shards else 0


def _by_name(value: Value) -> Named:
    return dict(value) if isinstance(value, Mapping) else {None: value}


def _as_value(named: Named) -> Value:
    return named.get(None, named)


def _wide(x: Tensor) -> torch.dtype:
    """At least fp32: sums over encoders, and norms, are taken in it."""
    return torch.promote_types(x.dtype, torch.float32)
