"""What instruments do to numbers on their way, as small stages that are put in a row.

A *measurement* channel is passed by every reading of an estimate, a *transport* channel by the error that arrives at a
layer: ``ZBPConfig(mode="cd", measurement=(Noise(0.05), Quantise(8)), transport=(Droop(0.1),))``.

A stage maps values [k, ...] to values; what is sent or read together shares the first axis: the readings of one probe,
or the error of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


@dataclass(frozen=True)
class Droop:
    """A held value that decays until its turn to be read: times exp(-rate · p), p in [0, 1) from first to last.

    The order is that of the probes for readings, and of the last axis for an error.

    Args:
        rate: what is lost at the end is 1 - exp(-rate).
    """

    rate: float

    def __post_init__(self) -> None:
        _check("Droop.rate", self.rate)

    def __call__(self, values: Tensor, progress: Tensor, generator: torch.Generator) -> Tensor:
        return values * torch.exp(-self.rate * progress)


@dataclass(frozen=True)
class Noise:
    """Gaussian noise.

    Args:
        deviation: its standard deviation.
        relative: to the RMS of the values that share the first axis; False for the unit of the values themselves.
    """

    deviation: float
    relative: bool = True

    def __post_init__(self) -> None:
        _check("Noise.deviation", self.deviation)

    def __call__(self, values: Tensor, progress: Tensor, generator: torch.Generator) -> Tensor:
        draws = torch.randn(values.shape, generator=generator, device=values.device, dtype=values.dtype)
        scale = values.square().mean(_others(values), keepdim=True).sqrt() if self.relative else 1.0
        return values + self.deviation * scale * draws


@dataclass(frozen=True)
class Quantise:
    """A converter of so many bits: the nearest of 2^bits - 1 equal steps between ±full_scale, saturating beyond.

    Args:
        bits: at least 2.
        full_scale: None for the largest magnitude among the values that share the first axis.
    """

    bits: int
    full_scale: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or self.bits < 2:
            raise ValueError(f"Quantise.bits must be an integer from 2, got {self.bits!r}.")
        if self.full_scale is not None:
            _check("Quantise.full_scale", self.full_scale, above=True)

    def __call__(self, values: Tensor, progress: Tensor, generator: torch.Generator) -> Tensor:
        largest = values.abs().amax(_others(values), keepdim=True)
        scale = largest if self.full_scale is None else torch.full_like(largest, self.full_scale)
        steps = 2 ** (self.bits - 1) - 1
        step = scale.clamp_min(torch.finfo(values.dtype).tiny) / steps
        return (values / step).round().clamp(-steps, steps) * step


Stage: TypeAlias = Droop | Noise | Quantise
_STAGES: dict[str, type[Stage]] = {stage.__name__: stage for stage in (Droop, Noise, Quantise)}


def pass_stages(stages: Sequence[Stage], values: Tensor, progress: Tensor, generator: torch.Generator) -> Tensor:
    """Values [k, ...] after all stages; ``progress`` broadcasts to them."""
    for stage in stages:
        values = stage(values, progress, generator)
    return values


def arriving(call: LayerCall) -> LayerCall:
    """The call with the error that its transport channel leaves; the call itself where there is none."""
    return call if not call.config.transport else replace(call, v=transported(call, call.v))


def transported(call: LayerCall, error: Tensor) -> Tensor:
    """An error [B, ...] after the transport channel, in its own dtype."""
    if not call.config.transport:
        return error
    values = error.to(torch.promote_types(error.dtype, torch.float32))
    progress = torch.arange(values.shape[-1], device=values.device, dtype=values.dtype) / values.shape[-1]
    return pass_stages(call.config.transport, values, progress, call.generator("transport")).to(error.dtype)


class Measured:
    """Derivatives along directions, as a measurement channel passes them on, probe after probe.

    Args:
        along: from directions [k, ...] to readings [k, ...].
        call: whose configuration and generator are used.
        n: readings in all.
    """

    def __init__(self, along: Callable[[Tensor], Tensor], call: LayerCall, n: int) -> None:
        self._along, self._stages, self._n = along, call.config.measurement, n
        self._generator = call.generator("measurement")
        self._read = 0

    def __call__(self, u: Tensor) -> Tensor:
        return torch.cat([self._one(reading) for reading in self._along(u).split(1)])

    def _one(self, reading: Tensor) -> Tensor:
        # One by one, so that the draws do not depend on how many probes are queried at once.
        progress = torch.full_like(reading, self._read / self._n)
        self._read += 1
        return pass_stages(self._stages, reading, progress, self._generator)


def stages_to_json(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """A row of stages as plain values."""
    return [{"stage": type(stage).__name__, **asdict(stage)} for stage in stages]


def checked_stages(name: str, stages: Any) -> tuple[Stage, ...]:
    """A tuple of stages, from stages or from what :func:`stages_to_json` gave.

    Raises:
        TypeError, ValueError: something else is among them.
    """
    if not isinstance(stages, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of Droop, Noise and Quantise, got {stages!r}.")
    checked = []
    for stage in stages:
        if isinstance(stage, dict) and stage.get("stage") in _STAGES:
            stage = _STAGES[stage["stage"]](**{key: value for key, value in stage.items() if key != "stage"})
        if not isinstance(stage, (Droop, Noise, Quantise)):
            raise TypeError(f"{name} must hold Droop, Noise and Quantise, got {stage!r}.")
        checked.append(stage)
    return tuple(checked)


def _others(values: Tensor) -> list[int]:
    """All axes but the first."""
    return list(range(1, values.ndim))


def _check(name: str, value: Any, above: bool = False) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    if not fits or (above and value == 0):
        raise ValueError(f"{name} must be a finite number {'above' if above else 'from'} 0, got {value!r}.")
