"""The arms of a comparison: one model under simulated hardware, trained in every way that there is.

Scenario "optical": the sentence embedding is measured behind a scattering medium; the encoder before it trains.
Scenario "int8": some layers compute in int8 without a backward; what trains is the encoder below them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from st_cached_extras.cards.figures import save_png
from st_cached_extras.zbp.apply import apply_zbp, list_of_layers, set_mode
from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.hardware import LinearSurrogate, OpticalHead, fake_quantised, to_int8

Prepare = Callable[[SentenceTransformer], None]
# Intensities are positive: a cosine of c before the head is one of (1 + 2 c²) / 3 behind it, from 1/3 to 1.
HEAD_SCALE = 50.0


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        name: of the arm.
        prepare: makes a model, with its hardware in place, train that way.
        trains: False for the model as it is.
        estimates: whether gradients are estimated, so that a comparison with exact ones is of interest.
        scale: on cosine similarities, for a contrastive loss.
    """

    name: str
    prepare: Prepare
    trains: bool = True
    estimates: bool = False
    scale: float = 20.0


def keep_layers(model: SentenceTransformer, count: int) -> SentenceTransformer:
    """The model with the first layers of its encoder alone, also once it is saved and loaded."""
    _, layers = list_of_layers(model)
    del layers[count:]
    model.transformers_model.config.num_hidden_layers = len(layers)
    return model


def last_layers(model: SentenceTransformer, count: int) -> list[str]:
    """The names of the last layers of the encoder."""
    path, layers = list_of_layers(model)
    return [f"{path}.{index}" for index in range(len(layers))[-count:]]


def with_optical_head(model: SentenceTransformer, out_features: int = 512, seed: int = 0) -> SentenceTransformer:
    """The model with an :class:`OpticalHead` behind its sentence embedding."""
    head = OpticalHead(model.get_embedding_dimension(), out_features, seed=seed)
    model.append(head)
    return model


def with_int8_layers(model: SentenceTransformer, names: list[str]) -> SentenceTransformer:
    """The model with the named layers in int8, frozen."""
    for name in names:
        to_int8(model.get_submodule(name))
    return model


def optical_arms(probes: tuple[int, ...] = (16, 64), modes: tuple[str, ...] = ()) -> list[Arm]:
    """Nothing trained, head ignored, linear surrogate, ZBP at several budgets, by itself and with the surrogate as its
    control, exact. Straight-through is not defined: the head changes the size of the vector.

    Args:
        probes: the budgets.
        modes: further arms, each the name of a mode or the JSON of a ZBPConfig.
    """
    return [
        Arm("nothing trained", lambda model: None, trains=False),
        Arm("head ignored", _ignore_head),
        Arm("linear surrogate", _use_surrogate, scale=HEAD_SCALE),
        *(Arm(f"ZBP, {n} probes", _estimate_head(n), estimates=True, scale=HEAD_SCALE) for n in probes),
        # Not compared with exact gradients: the stand-in that a comparison would take for the truth is the surrogate.
        *(Arm(f"ZBP, {n} probes beside surrogate", _correct_surrogate(n), scale=HEAD_SCALE) for n in probes),
        Arm("exact", _differentiate_head, scale=HEAD_SCALE),
        *_mode_arms(modes, lambda config: lambda model: set_mode(model, **vars(config)), HEAD_SCALE),
    ]


def int8_arms(names: list[str], probes: tuple[int, ...] = (16,), modes: tuple[str, ...] = ()) -> list[Arm]:
    """Nothing trained, autograd as it is (the residual path alone), straight-through, ZBP at several budgets, exact.

    ZBP is shrunk to least squared error: a handful of probes of thousands of dimensions is mostly noise otherwise.

    Args:
        names: the int8 layers.
        probes: the budgets.
        modes: further arms, each the name of a mode or the JSON of a ZBPConfig.
    """

    def layers(config: ZBPConfig) -> Prepare:
        return lambda model: _apply(model, names, config)

    def estimated(n: int, **changes: Any) -> ZBPConfig:
        return ZBPConfig(mode="cd", n_probes=n, param_mode="none", shrink="mmse", **changes)

    return [
        Arm("nothing trained", lambda model: None, trains=False),
        Arm("autograd as it is", lambda model: None),
        Arm("straight-through", layers(ZBPConfig(mode="skip", param_mode="none")), estimates=True),
        *(Arm(f"ZBP, {n} probes", layers(estimated(n)), estimates=True) for n in probes),
        *(
            Arm(f"ZBP, {n} probes beside identity", layers(estimated(n, control="identity")), estimates=True)
            for n in probes
        ),
        Arm("exact", layers(ZBPConfig(mode="exact", param_mode="none"))),
        *_mode_arms(modes, layers, 20.0),
    ]


def _mode_arms(modes: tuple[str, ...], prepare: Callable[[ZBPConfig], Prepare], scale: float) -> list[Arm]:
    arms: dict[str, Arm] = {}
    for mode in modes:
        config = ZBPConfig.from_json(mode) if mode.startswith("{") else ZBPConfig(mode=mode, probe_chunk=16)
        name = f"mode {config.mode}"
        if name in arms:
            name = f"{name} ({len(arms) + 1})"
        arms[name] = Arm(name, prepare(config.replace(param_mode="none")), estimates=True, scale=scale)
    return list(arms.values())


def _head_of(model: SentenceTransformer) -> OpticalHead:
    return next(module for module in model if isinstance(module, OpticalHead))


def _ignore_head(model: SentenceTransformer) -> None:
    _head_of(model).ignored = True


def _use_surrogate(model: SentenceTransformer, config: ZBPConfig | None = None) -> None:
    head = _head_of(model)
    head.surrogate = LinearSurrogate(head.in_features, head.out_features)
    head.block.local = head.surrogate
    head.block.zbp.configure(ZBPConfig(mode="exact", param_mode="none") if config is None else config)


def _estimate_head(n: int) -> Prepare:
    def prepare(model: SentenceTransformer) -> None:
        _head_of(model).block.zbp.configure(ZBPConfig(mode="cd", n_probes=n, param_mode="none", probe_chunk=16))

    return prepare


def _correct_surrogate(n: int) -> Prepare:
    config = ZBPConfig(mode="cd", n_probes=n, control="local", shrink="mmse", param_mode="none", probe_chunk=16)
    return lambda model: _use_surrogate(model, config)


def _differentiate_head(model: SentenceTransformer) -> None:
    _head_of(model).block.zbp.configure(ZBPConfig(mode="exact", param_mode="none"))


def _apply(model: SentenceTransformer, names: list[str], config: ZBPConfig) -> None:
    apply_zbp(model, names, config, local=fake_quantised)


def ladder_figure(path: str | os.PathLike, recall: Mapping[str, float], candidates: int) -> Path:
    """Draw R@1 of every arm as a bar, and save the picture as a PNG.

    Args:
        path: where it goes.
        recall: R@1 by arm, between 0 and 1, in the order of the bars.
        candidates: among how many the right one was found.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.8 + 0.4 * len(recall)), dpi=120, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(recall), [100 * value for value in recall.values()], color="#1f5fa8")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel=f"R@1 among {candidates}, %", xlim=(0, 110 * max(recall.values())))
    axes.spines[["top", "right"]].set_visible(False)
    return save_png(figure, path)
