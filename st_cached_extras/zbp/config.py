"""What one estimate of a backward is made of, as a value: validated, comparable, a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from st_cached_extras.zbp.research.channels import Stage, checked_stages, stages_to_json

PROBES = ("orthogonal", "rademacher", "gaussian", "sphere", "hadamard", "hadamard_cycle", "coordinate")
PARAMETER_MODES = ("auto", "local", "straight_through", "zo", "none")
# "auto" and "bp" are decided before a backward runs; the rules for the others register themselves (see modes.py).
KNOWN_MODES: set[str] = {"auto", "bp"}


@dataclass(frozen=True)
class Local:
    """Units of a layer in which a position acts on its neighbours alone, such as a convolution along a sequence.

    Args:
        radius: how far an input position reaches: output position t depends on input positions s with
            abs(t * stride - s) <= radius.
        stride: input positions per output position.
    """

    radius: int
    stride: int = 1

    def __post_init__(self) -> None:
        _check_count("Local.radius", self.radius, least=0)
        _check_count("Local.stride", self.stride)


Units: TypeAlias = Literal["sample", "token", "segments"] | Local


@dataclass(frozen=True)
class ZBPConfig:
    """How the backward of one layer is computed.

    Args:
        mode: what replaces the layer's input gradient g = J^T v, where v = d loss / d output.

            - ``"auto"``: ``"exact"`` if the layer has a differentiable stand-in that is right about it, ``"skip"`` if
              the layer is residual (same shape, and its Jacobian points along the identity), ``"broadcast"`` if it is
              near a mean ([B, T, C] to [B, C], and its Jacobian points along that of the mean), else ``"cd"``; asked
              of the layer by a few queries, once, and logged;
            - ``"cd"``, ``"fd"``: central (2 n queries) or forward differences (n + 1) along n random probes;
            - ``"jvp"``: forward-mode derivatives along them (n), for layers that have those;
            - ``"oracle"``: exact derivatives along them, which leaves the error of having few probes alone;
            - ``"exact"``: autograd through the layer, or through its differentiable stand-in where one is given;
            - ``"skip"``: straight-through, g = v, for equal shapes;
            - ``"broadcast"``: v spread evenly over the positions, for [B, T, C] to [B, C];
            - ``"bp"``: plain backpropagation, as if the layer were not wrapped;
            - ``"fa"``, ``"dfa"``, ``"drtp"``, ``"opzo"``, ``"zero"``, ``"noise"``, ``"capture"``, ``"replay"``,
              ``"slice"``, ``"score_k"``, ``"score_qk"``: baselines and instruments, see docs/zbp_research.md.
        n_probes: probes n; None for a sixth of the size of a unit, between 1 and 256.
        probe: their distribution, see :class:`~st_cached_extras.zbp.probes.Probes`.
        subspace: ``"full"``, or ``"error"``: probes among the top left singular vectors of v alone, [T, C] per
            sample. Biased: what lies outside is lost. In exchange the variance is that of ``subspace_rank * C``.
        subspace_rank: how many of those vectors.
        control: what is known exactly and not estimated: ``"identity"``, the path J = I (unbiased); ``"fit"``, the
            component of g along v (two more queries; its shrinking compounds over layers); ``"local"``, that along
            the gradient of the layer's differentiable stand-in (unbiased; two more queries and a backward through the
            stand-in, which need not be right: it only says where to look first); None for nothing.
        eps: step of the differences; None to choose it at the first backward from the readout's noise.
        eps_mode: ``"relative"`` to the RMS of a unit's input, or ``"absolute"``.
        units: what is estimated on its own: ``"sample"`` (a row, or a packed segment where the layer is given
            ``cu_seqlens``), ``"token"`` (right only for layers in which tokens do not mix), ``"segments"`` (insists on
            ``cu_seqlens``), or :class:`Local`.
        shrink: ``"mmse"`` multiplies the estimated part by 1 / (1 + relative variance): least squared error, and a
            norm that falls with every wrapped layer. None for unbiased.
        param_mode: gradients of the layer's own parameters: ``"local"``, autograd inside the layer;
            ``"straight_through"``, autograd inside its differentiable stand-in; ``"zo"``, forward differences of the
            parameters; ``"none"``; ``"auto"``: local where autograd is right about them, else none, logged.
        readout_noise: standard deviation of noise added to every output that a difference queries, relative to its
            RMS: what a noisier instrument would do.
        probe_chunk: probes that are queried at once; the memory of a backward grows with it, and with n not.
        mask_padding: no probe touches padding, so that its gradient is exactly zero.
        seed: of the private generator of probes, and of fixed feedback matrices.
        surrogate: a linear map, learned from the layer's inputs and outputs, is a control variate of cd, fd, jvp and
            oracle: what it predicts is not estimated (unbiased). Not with ``control``.
        surrogate_ema: share of its statistics that a forward leaves in place.
        surrogate_ridge: added to the covariance of the input, relative to its mean diagonal.
        feedback_scale: on the fixed matrices of fa, dfa and drtp.
        opzo_alpha: scale of the noise that teaches the matrix of opzo, relative to the RMS of the layer's input; None
            where the loop calls ``opzo_update`` itself.
        opzo_decay: share of that matrix that an update leaves in place.
        coordinates: (first, after_last) of the features that mode slice estimates.
        window: positions up to a query's own whose scores score_k and score_qk probe; None for all.
        measurement: stages (Droop, Noise, Quantise) that every reading passes.
        transport: stages that the error passes on its way to the layer.

    Raises:
        TypeError, ValueError: an argument that is none of these, by name.
    """

    mode: str = "auto"
    n_probes: int | None = None
    probe: str = "orthogonal"
    subspace: Literal["full", "error"] = "full"
    subspace_rank: int = 1
    control: Literal["fit", "identity", "local"] | None = None
    eps: float | None = None
    eps_mode: Literal["relative", "absolute"] = "relative"
    units: Units = "sample"
    shrink: Literal["mmse"] | None = None
    param_mode: str = "auto"
    readout_noise: float = 0.0
    probe_chunk: int = 1
    mask_padding: bool = True
    seed: int = 0
    surrogate: bool = False
    surrogate_ema: float = 0.99
    surrogate_ridge: float = 0.1
    feedback_scale: float = 1.0
    opzo_alpha: float | None = 0.1
    opzo_decay: float = 0.99
    coordinates: tuple[int, int] | None = None
    window: int | None = None
    measurement: tuple[Stage, ...] = ()
    transport: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, sorted(KNOWN_MODES))
        _check_choice("probe", self.probe, PROBES)
        _check_choice("subspace", self.subspace, ("full", "error"))
        _check_choice("control", self.control, ("fit", "identity", "local", None))
        _check_choice("eps_mode", self.eps_mode, ("relative", "absolute"))
        _check_choice("shrink", self.shrink, ("mmse", None))
        _check_choice("param_mode", self.param_mode, PARAMETER_MODES)
        if not isinstance(self.units, Local):
            _check_choice("units", self.units, ("sample", "token", "segments"), also=" or Local(radius, stride)")
        if self.n_probes is not None:
            _check_count("n_probes", self.n_probes)
        _check_count("subspace_rank", self.subspace_rank)
        _check_count("probe_chunk", self.probe_chunk)
        _check_count("seed", self.seed, least=0)
        if self.eps is not None:
            _check_number("eps", self.eps, above=0.0)
        _check_number("readout_noise", self.readout_noise, at_least=0.0)
        for name in ("mask_padding", "surrogate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.subspace == "error" and self.units != "sample":
            raise ValueError(
                f"subspace='error' takes the singular vectors of a whole sample, got units={self.units!r}. Use "
                "units='sample', or subspace='full'."
            )
        if isinstance(self.units, Local):
            self._check_local()
        self._check_research()

    def _check_local(self) -> None:
        for name, value in (("control", self.control), ("shrink", self.shrink)):
            if value in ("fit", "local", "mmse"):
                raise ValueError(
                    f"{name}={value!r} needs units that do not overlap, got units={self.units!r}. Use "
                    f"{name}=None, or units='sample'."
                )
        if self.mode == "oracle":
            raise ValueError("mode='oracle' needs units that do not overlap, got Local. Use units='sample'.")

    def _check_research(self) -> None:
        for name in ("measurement", "transport"):
            object.__setattr__(self, name, checked_stages(name, getattr(self, name)))
        _check_number("feedback_scale", self.feedback_scale, above=0.0)
        _check_number("surrogate_ridge", self.surrogate_ridge, above=0.0)
        for name in ("surrogate_ema", "opzo_decay"):
            _check_number(name, getattr(self, name), at_least=0.0)
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)!r}.")
        if self.opzo_alpha is not None:
            _check_number("opzo_alpha", self.opzo_alpha, above=0.0)
        if self.window is not None:
            _check_count("window", self.window)
        if self.surrogate and (self.control is not None or isinstance(self.units, Local)):
            raise ValueError(
                f"surrogate=True is a control variate of its own, got control={self.control!r} and units="
                f"{self.units!r}. Use control=None and units that do not overlap."
            )
        if self.coordinates is None:
            return
        object.__setattr__(self, "coordinates", tuple(self.coordinates))
        if len(self.coordinates) != 2:
            raise ValueError(f"coordinates must be (first, after_last), got {self.coordinates!r}.")
        first, after = self.coordinates
        _check_count("coordinates", first, least=0)
        _check_count("coordinates", after, least=first + 1)

    def replace(self, **changes: Any) -> ZBPConfig:
        """A configuration with some arguments changed, validated."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """One line of JSON, from which :meth:`from_json` makes an equal configuration."""
        stages = {name: stages_to_json(getattr(self, name)) for name in ("measurement", "transport")}
        return json.dumps(asdict(self) | stages)

    @classmethod
    def from_json(cls, text: str) -> ZBPConfig:
        """The configuration that :meth:`to_json` wrote."""
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            found = sorted(values.keys() - known) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"Not the JSON of a ZBPConfig: found {found}, expected some of {sorted(known)}.")
        if isinstance(values.get("units"), dict):
            values["units"] = Local(**values["units"])
        return cls(**values)


def _check_choice(name: str, value: Any, choices: Any, also: str = "") -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}{also}, got {value!r}.")


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def _check_number(name: str, value: Any, above: float | None = None, at_least: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if above is not None and not above < value < float("inf"):
        raise ValueError(f"{name} must be above {above} and finite, got {value!r}.")
    if at_least is not None and not at_least <= value < float("inf"):
        raise ValueError(f"{name} must be at least {at_least} and finite, got {value!r}.")
