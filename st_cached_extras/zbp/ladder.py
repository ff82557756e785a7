"""The arms of a comparison: one model under simulated hardware, trained in every way that there is.

Scenario "optical": the sentence embedding is measured behind a scattering medium; the encoder before it trains.
Scenario "int8": some layers compute in int8 without a backward; what trains is the encoder below them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sentence_transformers import SentenceTransformer
from torch import nn

from st_cached_extras.zbp.apply import apply_zbp
from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.hardware import LinearSurrogate, OpticalHead, fake_quantised, to_int8

Prepare = Callable[[SentenceTransformer], None]


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        name: of the arm.
        prepare: makes a model, with its hardware in place, train that way.
        trains: False for the model as it is.
    """

    name: str
    prepare: Prepare
    trains: bool = True


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


def optical_arms(probes: tuple[int, ...] = (16, 64)) -> list[Arm]:
    """Nothing trained, head ignored, linear surrogate, ZBP at several budgets, exact. Straight-through is not defined:
    the head changes the size of the vector."""
    return [
        Arm("nothing trained", lambda model: None, trains=False),
        Arm("head ignored", _ignore_head),
        Arm("linear surrogate", _use_surrogate),
        *(Arm(f"ZBP, {n} probes", _estimate_head(n)) for n in probes),
        Arm("exact", _differentiate_head),
    ]


def int8_arms(names: list[str], probes: tuple[int, ...] = (16,)) -> list[Arm]:
    """Nothing trained, autograd as it is (the residual path alone), straight-through, ZBP at several budgets, exact.

    Args:
        names: the int8 layers.
        probes: the budgets.
    """

    def layers(config: ZBPConfig) -> Prepare:
        return lambda model: _apply(model, names, config)

    return [
        Arm("nothing trained", lambda model: None, trains=False),
        Arm("autograd as it is", lambda model: None),
        Arm("straight-through", layers(ZBPConfig(mode="skip", param_mode="none"))),
        *(Arm(f"ZBP, {n} probes", layers(ZBPConfig(mode="cd", n_probes=n, param_mode="none"))) for n in probes),
        *(
            Arm(
                f"ZBP, {n} probes, identity control",
                layers(ZBPConfig(mode="cd", n_probes=n, param_mode="none", control="identity", shrink="mmse")),
            )
            for n in probes
        ),
        Arm("exact", layers(ZBPConfig(mode="exact", param_mode="none"))),
    ]


def _head_of(model: SentenceTransformer) -> OpticalHead:
    return next(module for module in model if isinstance(module, OpticalHead))


def _ignore_head(model: SentenceTransformer) -> None:
    _head_of(model).ignored = True


def _use_surrogate(model: SentenceTransformer) -> None:
    head = _head_of(model)
    head.surrogate = LinearSurrogate(head.in_features, head.out_features)
    head.block.local = head.surrogate
    head.block.zbp.configure(ZBPConfig(mode="exact", param_mode="none"))


def _estimate_head(n: int) -> Prepare:
    def prepare(model: SentenceTransformer) -> None:
        _head_of(model).block.zbp.configure(ZBPConfig(mode="cd", n_probes=n, param_mode="none", probe_chunk=16))

    return prepare


def _differentiate_head(model: SentenceTransformer) -> None:
    block: nn.Module = _head_of(model).block
    block.local = block.f.intensity
    block.zbp.configure(ZBPConfig(mode="exact", param_mode="none"))


def _apply(model: SentenceTransformer, names: list[str], config: ZBPConfig) -> None:
    apply_zbp(model, names, config, local=fake_quantised)
