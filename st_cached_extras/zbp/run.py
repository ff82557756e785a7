"""One forward of a layer and its estimated backward.

    forward   y = f(x), no graph; random state and autocast are noted
    backward  v = dL/dy  ──►  dL/dx: the mode's rule, from forward queries under that random state
                         └─►  dL/dθ: autograd inside the layer, its stand-in, forward differences, or nothing

Randomness is captured and restored as ``torch.utils.checkpoint`` does: every query draws the forward's dropout.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from sentence_transformers.base.losses import RandContext
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from st_cached_extras.distributed.world import World
from st_cached_extras.replay.passes import AutocastState
from st_cached_extras.zbp.arguments import LayerArguments, forward_signature
from st_cached_extras.zbp.detection import (
    LEAST_ALIGNMENT,
    has_backward,
    jacobian_alignment,
    parameters_have_backward,
)
from st_cached_extras.zbp.estimators import LayerCall, exact, without_queries
from st_cached_extras.zbp.modes import RULES, inside_of
from st_cached_extras.zbp.parameters import estimate_parameter_gradients, gradients_by_autograd
from st_cached_extras.zbp.research.channels import arriving
from st_cached_extras.zbp.research.surrogate import observe
from st_cached_extras.zbp.state import LayerState

logger = logging.getLogger(__name__)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.compiler.disable  # an estimate draws, restores random states and counts: a graph break
def run_layer(
    state: LayerState,
    module: nn.Module,
    forward: Callable[..., Any],
    local: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a layer so that its backward is the one of ``state.config``.

    Args:
        state: of the layer.
        module: whose parameters get gradients.
        forward: the layer as it is, tensor or tuple out.
        local: its differentiable stand-in, of the same arguments; None where autograd inside the layer itself is
            right or not wanted.
        args: of the call.
        kwargs: of the call.

    Returns:
        What the layer returns: of a tuple, the first entry carries the gradient, the others none.

    Raises:
        TypeError, ValueError: arguments, outputs or a layer that no estimate is right for.
    """
    if state.perturb is not None:
        return _perturbed(state, forward, args, kwargs)
    if not torch.is_grad_enabled() or state.mode == "bp":
        return forward(*args, **kwargs)
    arguments = LayerArguments(forward_signature(forward), state.name, args, kwargs)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not (trainable or arguments.x.requires_grad):
        return forward(*args, **kwargs)
    _check_trainable_here(module, state.name)
    arguments.check_cache_is_empty(module, state.name)
    x = arguments.release_input()
    run = LayerRun(state, arguments, forward, local, x)
    run.decide(x.detach(), trainable)
    run.parameters = trainable if state.param_mode != "none" else []
    y = EstimatedBackward.apply(x, run, *run.parameters)
    rest, run.rest = run.rest, None
    return y if rest is None else (y, *rest)


class LayerRun:
    """One forward of a layer and its backward.

    Args:
        state: of the layer.
        arguments: of this forward.
        forward: the layer as it is.
        local: its differentiable stand-in.
        x: the input, which is not kept: autograd saves it.

    Attributes:
        parameters: those that get gradients.
        rest: what the forward returned beside its first output, until it is fetched.
    """

    def __init__(
        self,
        state: LayerState,
        arguments: LayerArguments,
        forward: Callable[..., Any],
        local: Callable[..., Any] | None,
        x: Tensor,
    ) -> None:
        self.state, self._arguments, self._forward, self._local = state, arguments, forward, local
        self._random_state = RandContext(x)
        self._autocast = AutocastState.capture(x.device)
        self._signal = None if state.tap is None else state.tap.signal
        self.parameters: list[nn.Parameter] = []
        self.rest: tuple[Any, ...] | None = None

    def first_pass(self, x: Tensor) -> Tensor:
        """The layer's own forward, cache and all."""
        # Detached, because a black box may refuse a tensor that wants a gradient, as .numpy() does.
        out = self._arguments.call(self._forward, x.detach(), with_cache=True)
        y = _first_output(out, self.state.name)
        self.rest = tuple(out[1:]) if isinstance(out, (tuple, list)) else None
        if self.state.config.surrogate:
            observe(self.call(x, y), y)
        return y

    def query(self, x: Tensor) -> Tensor:
        """The layer again, under the random state and the autocast of the forward."""
        with self._random_state, self._autocast.restore():
            return _first_output(self._arguments.call(self._forward, x), self.state.name)

    def differentiable(self, x: Tensor) -> Tensor:
        """The layer for autograd: its stand-in, where there is one."""
        with self._random_state, self._autocast.restore():
            forward = self._forward if self._local is None else self._local
            return _first_output(self._arguments.call(forward, x), self.state.name)

    def decide(self, x: Tensor, trainable: list[nn.Parameter]) -> None:
        """Settle what the configuration leaves open, once, by asking the layer; warn where backprop would do."""
        state, config = self.state, self.state.config
        if state.mode is not None and state.param_mode is not None:
            return
        call = self.call(x, x)
        if state.mode is None:
            state.mode = self._decide_mode(call)
        if state.param_mode is not None:
            return
        with torch.no_grad():
            is_differentiable = has_backward(self.query, self.differentiable, x, call.generator("check"), state.count)
            right = not trainable or parameters_have_backward(
                self.query, self.differentiable, x, trainable, call.generator("check parameters"), state.count
            )
        if config.param_mode == "local" and not right:
            raise ValueError(
                f"param_mode='local', but autograd inside the layer {state.name!r} is missing or wrong about its "
                "parameters. Give a differentiable stand-in (local=...), or use param_mode='zo' or 'none'."
            )
        state.param_mode = "local" if trainable and right else "none"
        if config.param_mode == "auto" and trainable:
            frozen = "" if right else ": autograd is wrong about its parameters, which stay as they are"
            logger.info(f"ZBP layer {state.name!r}: param_mode={state.param_mode!r}{frozen}.")
        if is_differentiable and self._local is None and state.mode != "exact" and not state.warned.already:
            state.warned.already = True
            warnings.warn(
                f"The layer {state.name!r} is differentiable: gradient checkpointing is exact at the cost of about "
                "one more forward, with the memory of one layer. ZBP is for layers without a usable backward.",
                stacklevel=4,
            )

    def _decide_mode(self, call: LayerCall) -> str:
        """The highest step of the ladder that fits: a right stand-in, the residual path, a mean, differences."""
        state = self.state
        if self._local is not None:
            with torch.no_grad():
                right = has_backward(self.query, self.differentiable, call.x, call.generator("stand-in"), state.count)
            if right:
                logger.info(f"ZBP layer {state.name!r}: mode='exact', as its stand-in is right about it.")
                return "exact"
        if state.is_branch:
            logger.info(f"ZBP layer {state.name!r}: mode='skip', as the residual path beside it is exact.")
            return "skip"
        with torch.no_grad():
            shape = self.query(call.x).shape
            state.count.calibration_queries += 1
            guess = without_queries(call.x.shape, shape)
            if guess is None:
                logger.info(
                    f"ZBP layer {state.name!r}: mode='cd', as it maps {tuple(call.x.shape)} to {tuple(shape)}."
                )
                return "cd"
            alignment = jacobian_alignment(
                self.query,
                lambda v: RULES[guess](replace(call, v=v)),
                call.x,
                call.generator("alignment"),
                state.count,
                call.valid if call.config.mask_padding else None,
            )
        mode = guess if alignment >= LEAST_ALIGNMENT else "cd"
        of = {"skip": "the identity", "broadcast": "a mean over positions"}[guess]
        logger.info(
            f"ZBP layer {state.name!r}: mode={mode!r}, the cosine of its Jacobian and {of} is {alignment:.2f}."
        )
        return mode

    def backward(self, x: Tensor, v: Tensor, wants_input: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """dL/dx and dL/dθ from v = dL/dy."""
        begin, state, parameters = time.perf_counter(), self.state, self.parameters
        call = self.call(x, v)
        arrived = arriving(call)
        wants_input = wants_input and state.estimate_input_grad and not (state.is_branch and state.mode == "skip")
        by_autograd = parameters if state.param_mode in ("local", "straight_through") else []
        gradient: Tensor | None = None
        of_parameters: list[Tensor | None] = [None] * len(parameters)
        at_once = wants_input and bool(by_autograd) and RULES[state.mode] is exact
        with inside_of(call) if wants_input or by_autograd else nullcontext():
            if by_autograd:
                gradient, of_parameters = gradients_by_autograd(
                    self.differentiable, x, arrived.v, by_autograd, with_input=at_once
                )
                state.count.exact_backwards += at_once
            if wants_input and not at_once:
                gradient = RULES[state.mode](arrived)
        if parameters and state.param_mode == "zo":
            of_parameters = estimate_parameter_gradients(arrived, parameters)
        state.calls += 1
        state.eps = arrived.eps
        state.seconds += time.perf_counter() - begin
        if state.observer is not None and gradient is not None:
            state.observer(call, gradient)
        return gradient, of_parameters

    def call(self, x: Tensor, v: Tensor) -> LayerCall:
        """What a rule is told."""
        state, config = self.state, self.state.config
        return LayerCall(
            f=self.query,
            x=x.detach(),
            v=v,
            config=config if state.mode is None else config.replace(mode=state.mode),
            differentiable=self.differentiable,
            valid=self._arguments.valid(x),
            segments=self._arguments.segments(x),
            batch_dims=state.batch_dims,
            batched=state.batched,
            name=state.name,
            rank=World.current().rank,
            call=state.calls,
            count=state.count,
            eps=state.eps,
            memory=state.memory,
            signal=self._signal,
        )


class EstimatedBackward(torch.autograd.Function):
    """A layer's forward without a graph, and the backward of its run."""

    @staticmethod
    def forward(ctx, x: Tensor, run: LayerRun, *parameters: Tensor) -> Tensor:
        ctx.run = run
        # The parameters only so that autograd notices if they change in place before the backward.
        ctx.save_for_backward(x, *parameters)
        return run.first_pass(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, v: Tensor) -> tuple[Tensor | None, ...]:
        x, *_ = ctx.saved_tensors
        gradient, of_parameters = ctx.run.backward(x, v, ctx.needs_input_grad[0])
        return gradient, None, *of_parameters


def _perturbed(state: LayerState, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward with noise on the input, without a graph."""
    arguments = LayerArguments(forward_signature(forward), state.name, args, kwargs)
    x = arguments.release_input().detach()
    noisy = state.perturb(LayerRun(state, arguments, forward, None, x).call(x, x))
    return arguments.call(forward, noisy, with_cache=True)


def _first_output(out: Any, name: str) -> Tensor:
    y = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(y, Tensor) or not y.is_floating_point():
        found = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(
            f"The layer {name!r} returned {found}; expected a floating-point tensor, or a tuple that begins with one. "
            "Wrap a layer that returns hidden states."
        )
    return y


def _check_trainable_here(module: nn.Module, name: str) -> None:
    """Refuse what queries would silently spoil."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            f"The parameters of the layer {name!r} are partitioned by DeepSpeed ZeRO-3, and are not there when it is "
            "queried. Use ZeRO-1 or ZeRO-2, DistributedDataParallel, or one process."
        )
    for child in module.modules():
        if isinstance(child, BATCH_NORMS) and child.training and child.track_running_stats:
            raise ValueError(
                f"The layer {name!r} has a BatchNorm in train mode, whose statistics every query would change. "
                "Put it into eval mode, or use another normalisation."
            )
