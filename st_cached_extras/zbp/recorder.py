"""How good the estimated gradients are, against the exact ones, while a model trains.

What matters is the gradient of the weights *below* a layer: an activation's error averages over a batch, or does not,
and its own cosine says little of what is learned. Both are recorded, by running a batch twice, once with every layer's
own rule and once with exact backwards. That costs more than a training step, so it is done every so often, and the
seconds are logged with the rest.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.losses import RandContext
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_cached_extras.cards.figures import save_png
from st_cached_extras.zbp.apply import zbp_blocks
from st_cached_extras.zbp.estimators import LayerCall, exact
from st_cached_extras.zbp.state import ZBPLayer


@dataclass(frozen=True)
class GradientQuality:
    """One layer's estimate on one batch, against the exact gradient.

    Attributes:
        weight_cosine: cosine of the gradients of all weights below the layer; nan where there are none.
        weight_relative_error: |estimated - exact| / |exact| of the same.
        activation_cosine: cosine of the gradients of the layer's input, mean over samples.
        batch_mean_cosine: cosine of their means over samples.
        relative_error: |estimated - exact| / |exact| of the input's gradient, over the batch.
        exact_norm: |exact| of the same.
        norm_ratio: |estimated| / |exact| of the same.
        queries: forward queries of the layer for this batch.
    """

    weight_cosine: float
    weight_relative_error: float
    activation_cosine: float
    batch_mean_cosine: float
    relative_error: float
    exact_norm: float
    norm_ratio: float
    queries: int


def compare_with_exact(
    model: nn.Module, backward: Callable[[], None], losses: Sequence[nn.Module] = ()
) -> dict[str, GradientQuality]:
    """Run one batch with the layers' own rules and with exact backwards, and compare; leaves no trace behind.

    With several wrapped layers, the weights below one feel the estimates of all layers above them, as in training; the
    activations' errors are of each layer alone.

    Args:
        model: a module with layers whose backward is estimated, each differentiable or with a stand-in.
        backward: computes a loss of the model on one batch and backpropagates it; called twice, under the same random
            state.
        losses: modules beside the model that ``backward`` calls. Theirs is put back, too: a loss that differentiates
            a share of the rows draws the same ones in both runs, and in the run that is interrupted.

    Returns:
        By layer.

    Raises:
        ValueError: a layer has no exact backward to compare with.
    """
    blocks = {name: block for name, block in zbp_blocks(model).items() if block.zbp.mode != "bp"}
    comparisons = {name: _Comparison() for name in blocks}
    modules = list(dict.fromkeys(module for root in (model, *losses) for module in root.modules()))
    random_state = RandContext(*list(model.parameters())[:1])
    with _no_trace(modules):
        before = {name: block.zbp.count.queries for name, block in blocks.items()}
        for name, block in blocks.items():
            block.zbp.observer = comparisons[name]
        estimated = _gradients(model, backward, random_state)
        queries = {name: block.zbp.count.queries - before[name] for name, block in blocks.items()}
    with _no_trace(modules):
        for block in blocks.values():
            block.zbp.observer = None
            block.zbp.mode = "exact"
        truth = _gradients(model, backward, random_state)
    found = {}
    for name, block in blocks.items():
        below = [p for p in _parameters_before(model, block) if p in truth]
        zero = torch.zeros(())
        a = torch.cat([estimated.get(p, zero.expand(truth[p].shape)).flatten() for p in below]) if below else None
        b = torch.cat([truth[p].flatten() for p in below]) if below else None
        found[name] = comparisons[name].summary(a, b, queries[name])
    return found


class ZBPRecorder(TrainerCallback):
    """Compares estimated with exact gradients every so many steps of a Trainer, and logs what it finds.

    Logged per layer: everything in :class:`GradientQuality`, as ``zbp/<layer>/<name>``, and ``zbp/recorder_seconds``.
    The comparisons are of one batch throughout, the same on every call, and change nothing in the run.

    Args:
        trainer: whose model, loss and log are used; the recorder adds itself to its callbacks.
        every: steps between two comparisons; the first is after the first step.
        batch: inputs as the Trainer's collator makes them; None for the first ``rows`` of the training set.
        rows: how many.

    Attributes:
        history: one entry per comparison: ``step``, ``seconds``, and ``layers``, by name.

    Example::

        recorder = ZBPRecorder(trainer, every=100)
        trainer.train()
        recorder.figure("output/zbp.png")
    """

    def __init__(
        self,
        trainer: SentenceTransformerTrainer,
        every: int = 100,
        batch: dict[str, Any] | None = None,
        rows: int = 32,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive number of steps, got {every!r}.")
        self._trainer, self.every = trainer, every
        if batch is None:
            dataset = trainer.train_dataset
            if not hasattr(dataset, "select"):
                raise ValueError("The training set has no rows to select: give batch=..., as the collator makes it.")
            batch = trainer.data_collator([dataset[row] for row in range(min(rows, len(dataset)))])
        self._batch = batch
        self.history: list[dict[str, Any]] = []
        trainer.add_callback(self)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (state.global_step - 1) % self.every:
            return
        begin = time.perf_counter()
        loss, components = self._trainer.loss, deepcopy(self._trainer.accum_loss_components)
        losses = list(loss.values()) if isinstance(loss, dict) else [loss]
        losses = [each for each in losses if isinstance(each, nn.Module)]
        layers = compare_with_exact(self._trainer.model, self._backward, losses)
        self._trainer.accum_loss_components = components  # else the Trainer would log those of the comparison
        seconds = time.perf_counter() - begin
        entry = {name: asdict(quality) for name, quality in layers.items()}
        self.history.append({"step": state.global_step, "seconds": seconds, "layers": entry})
        logs = {f"zbp/{name}/{key}": value for name, of_layer in entry.items() for key, value in of_layer.items()}
        wanted = control.should_log
        self._trainer.log({**logs, "zbp/recorder_seconds": seconds})
        control.should_log = wanted  # the Trainer takes any log for its own, which is still to come

    def save(self, path: str | os.PathLike) -> Path:
        """Write the history as JSON; the file appears whole or not at all."""
        path = Path(path)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.history, indent=1))
        os.replace(unfinished, path)
        return path

    def figure(self, path: str | os.PathLike) -> Path:
        """Draw the cosines of all layers over the steps, as a PNG."""
        from matplotlib.figure import Figure

        if not self.history:
            raise ValueError("There is nothing to draw yet: no step that is recorded has been run.")
        figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        steps = [entry["step"] for entry in self.history]
        titles = {"weight_cosine": "weights below", "activation_cosine": "the layer's input, per sample"}
        for panel, (key, title) in zip(panels, titles.items(), strict=True):
            for name in self.history[0]["layers"]:
                values = [entry["layers"][name][key] for entry in self.history]
                panel.plot(steps, values, marker="o", label=name)
            panel.set(title=f"Gradient of {title}", xlabel="step", ylim=(-0.1, 1.05))
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("cosine with the exact gradient")
        panels[0].legend(fontsize="small")
        return save_png(figure, path)

    def _backward(self) -> None:
        device = next(self._trainer.model.parameters()).device
        inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in self._batch.items()}
        self._trainer.compute_loss(self._trainer.model, inputs).backward()


class _Comparison:
    """Sums over the backwards of one layer."""

    def __init__(self) -> None:
        self.cosines: list[Tensor] = []
        self.squares = torch.zeros(3, dtype=torch.float64)  # of the error, the truth and the estimate
        self.means: list[tuple[Tensor, Tensor]] = []

    def __call__(self, call: LayerCall, gradient: Tensor) -> None:
        truth = exact(call).double().cpu()
        gradient = gradient.double().cpu()
        rows = gradient.flatten(1), truth.flatten(1)
        self.cosines.append(cosine_similarity(*rows, dim=1))
        self.squares += torch.stack([x.square().sum() for x in (gradient - truth, truth, gradient)])
        self.means.append((gradient.mean(0).flatten(), truth.mean(0).flatten()))

    def summary(self, estimated: Tensor | None, truth: Tensor | None, queries: int) -> GradientQuality:
        error, norm, own = self.squares.sqrt().tolist()
        cosines = [cosine_similarity(a, b, dim=0) for a, b in self.means]
        none = float("nan")
        weights = none, none
        if estimated is not None and truth is not None:
            distance = (estimated - truth).norm() / truth.norm().clamp_min(1e-30)
            weights = float(cosine_similarity(estimated, truth, dim=0)), float(distance)
        return GradientQuality(
            weight_cosine=weights[0],
            weight_relative_error=weights[1],
            activation_cosine=float(torch.cat(self.cosines).mean()) if self.cosines else none,
            batch_mean_cosine=float(torch.stack(cosines).mean()) if cosines else none,
            relative_error=error / norm if norm else none,
            exact_norm=norm if self.cosines else none,
            norm_ratio=own / norm if norm else none,
            queries=queries,
        )


def _gradients(
    model: nn.Module, backward: Callable[[], None], random_state: RandContext
) -> dict[nn.Parameter, Tensor]:
    with random_state, torch.enable_grad():
        backward()
    return {p: p.grad.detach().float().cpu() for p in model.parameters() if p.grad is not None}


@contextmanager
def _no_trace(modules: list[nn.Module]) -> Iterator[None]:
    """Put back gradients, buffers, and the state that layers and losses keep from call to call."""
    gradients = [(p, p.grad) for module in modules for p in module.parameters(recurse=False)]
    buffers = [(x, x.clone()) for module in modules for x in module.buffers(recurse=False)]
    layers = [module for module in modules if isinstance(module, ZBPLayer)]
    layer_states = [
        {key: dict(value) if isinstance(value, dict) else value for key, value in vars(layer.zbp).items()}
        | {"count": deepcopy(layer.zbp.count)}
        for layer in layers
    ]
    stateful = [module for module in modules if hasattr(module, "replay_state") and module not in layers]
    states = [{key: value.clone() for key, value in module.replay_state().items()} for module in stateful]
    for parameter, _ in gradients:
        parameter.grad = None  # else a backward would add to the very tensors that are kept
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for layer, state in zip(layers, layer_states, strict=True):
            vars(layer.zbp).update(state)
        for module, state in zip(stateful, states, strict=True):
            module.load_replay_state(state)


def _parameters_before(model: nn.Module, block: nn.Module) -> list[nn.Parameter]:
    """Parameters of the modules that are registered before a block: in encoders, those below it."""
    before: list[nn.Parameter] = []
    for module in model.modules():
        if module is block:
            break
        before += module.parameters(recurse=False)
    return before
