"""What a layer with an estimated backward remembers between its calls, and what of it goes into checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.estimators import LayerCall
from st_cached_extras.zbp.queries import QueryCount

if TYPE_CHECKING:
    from st_cached_extras.zbp.research.error_tap import ErrorTap
    from st_cached_extras.zbp.research.opzo import Perturbation

_MEMORY = "memory."
# What "auto" came to, as it is written to checkpoints.
_UNDECIDED = -1
_MODES = ("cd", "skip", "exact", "broadcast")
_PARAMETER_MODES = ("none", "local")


class Observer(Protocol):
    """Is shown every backward of a layer, for measurements."""

    def __call__(self, call: LayerCall, gradient: Tensor) -> None: ...


@dataclass
class Warned:
    """Whether the layers that share this have warned."""

    already: bool = False


@dataclass
class LayerState:
    """What a layer remembers between its calls.

    Attributes:
        config: how its backward is computed.
        name: part of the seed of its probes.
        estimate_input_grad: False stops gradients at its input.
        is_branch: the residual path is outside, so that skipping means no gradient through it.
        batch_dims: leading axes of its input that count samples.
        batched: it takes leading axes of probes.
        calls: backwards so far, the index of the next one's probes.
        eps: the step, once chosen.
        mode: what ``"auto"`` came to, once decided.
        param_mode: likewise.
        count: its queries.
        seconds: time spent in its backwards, on the host's clock.
        observer: is shown every backward.
        warned: shared by the layers of one model, which warn once.
        memory: tensors that the mode keeps from call to call; replaced, never changed in place.
        tap: watches the output of the model.
        perturb: puts noise on the layer's input, during one forward of opzo.
    """

    config: ZBPConfig
    name: str = ""
    estimate_input_grad: bool = True
    is_branch: bool = False
    batch_dims: int = 1
    batched: bool = False
    calls: int = 0
    eps: float | None = None
    mode: str | None = None
    param_mode: str | None = None
    count: QueryCount = field(default_factory=QueryCount)
    seconds: float = 0.0
    observer: Observer | None = None
    warned: Warned = field(default_factory=Warned)
    memory: dict[str, Tensor] = field(default_factory=dict)
    tap: ErrorTap | None = None
    perturb: Perturbation | None = None

    def __post_init__(self) -> None:
        self.configure(self.config)

    def configure(self, config: ZBPConfig) -> None:
        """Take another configuration; what was decided under the old one is decided anew."""
        self.config = config
        self.eps = config.eps
        self.mode = None if config.mode == "auto" else config.mode
        self.param_mode = None if config.param_mode in ("auto", "local") else config.param_mode

    def replay_state(self) -> dict[str, Tensor]:
        """What a resumed run needs to draw the probes that an uninterrupted one would."""
        mode = _MODES.index(self.mode) if self.config.mode == "auto" and self.mode in _MODES else _UNDECIDED
        decided = self.param_mode in _PARAMETER_MODES
        return {
            "calls": torch.tensor(self.calls),
            "eps": torch.tensor(float("nan") if self.eps is None else self.eps, dtype=torch.float64),
            "mode": torch.tensor(mode),
            "param_mode": torch.tensor(_PARAMETER_MODES.index(self.param_mode) if decided else _UNDECIDED),
            **{f"{_MEMORY}{key}": value for key, value in self.memory.items()},
        }

    def load_replay_state(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`replay_state` returned."""
        self.configure(self.config)
        self.calls = int(state["calls"])
        if self.config.eps is None and not bool(state["eps"].isnan()):
            self.eps = float(state["eps"])
        if self.config.mode == "auto" and int(state["mode"]) != _UNDECIDED:
            self.mode = _MODES[int(state["mode"])]
        if self.param_mode is None and int(state["param_mode"]) != _UNDECIDED:
            self.param_mode = _PARAMETER_MODES[int(state["param_mode"])]
        self.memory = {
            key.removeprefix(_MEMORY): value.clone() for key, value in state.items() if key.startswith(_MEMORY)
        }


class ZBPLayer:
    """What a module with an estimated backward offers, whether it was made as one or became one.

    Attributes:
        zbp: its state.
        grown_replay_state: prefix of entries of the replay state that appear, in sizes of their own, as it runs.
    """

    zbp: LayerState
    grown_replay_state = _MEMORY

    def replay_state(self) -> dict[str, Tensor]:
        """The state that a checkpoint needs; not a part of the module's own state dict, which stays as it was."""
        return self.zbp.replay_state()

    def load_replay_state(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`replay_state` returned."""
        self.zbp.load_replay_state(state)
