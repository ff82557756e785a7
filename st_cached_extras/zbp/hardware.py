"""Simulated hardware to train through: an optical head that only measures, and int8 layers without a backward.

Both compute without a graph, as the real ones do, and both have a differentiable twin for the comparison with the
exact gradient, which the real ones have not.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor, nn
from torch.nn.functional import linear

from st_cached_extras.zbp.block import ZBPBlock
from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.probes import private_generator


class OpticalIntensity(nn.Module):
    """A camera behind a scattering medium: y = |A x|², A random and unknown, measured with noise and 8 bits.

    The modulator spends the same light on every input, x / RMS(x), so that y is 1 on average. Measurement noise is
    new at every call: no random state replays it.

    Args:
        in_features: pixels of the modulator, d.
        out_features: pixels of the camera.
        noise: standard deviation of a measurement relative to its value.
        bits: of the camera's converter, which saturates at ``full_scale``; None for none.
        seed: of the medium and of the noise.
        full_scale: intensity of the converter's last step.
        is_complex: whether A is complex, as of a medium that delays light, or real, as of an amplitude network.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        noise: float = 0.05,
        bits: int | None = 8,
        seed: int = 0,
        full_scale: float = 8.0,
        is_complex: bool = False,
    ) -> None:
        super().__init__()
        self.noise, self.bits, self.seed, self.full_scale = noise, bits, seed, full_scale
        self.measurements = 0
        generator = private_generator(torch.device("cpu"), seed, "medium")
        parts = 2 if is_complex else 1
        medium = torch.randn(parts, out_features, in_features, generator=generator) / (parts * in_features) ** 0.5
        self.register_buffer("medium", medium, persistent=False)  # real and, if complex, imaginary part

    def forward(self, x: Tensor) -> Tensor:
        """Measure: [..., d] to [..., out_features], without a graph."""
        with torch.no_grad():
            y = self.intensity(x)
            generator = private_generator(x.device, self.seed, "noise", self.measurements)
            self.measurements += 1
            # In place: a camera costs no time, and its simulation should cost little.
            y *= torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype).mul_(self.noise).add_(1)
            if self.bits is None:
                return y
            steps = (2**self.bits - 1) / self.full_scale
            return y.clamp_(0, self.full_scale).mul_(steps).round_().div_(steps)

    def intensity(self, x: Tensor) -> Tensor:
        """|A x|² without noise and converter, differentiable: what the laboratory does not have."""
        x = x * x.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
        field = linear(x, self.medium.flatten(0, 1)).unflatten(-1, self.medium.shape[:2])  # [..., parts, out_features]
        return field.square().sum(-2)


class LinearSurrogate(nn.Module):
    """y ≈ M x + c by ridge regression on the pairs that training passes by, forgotten exponentially.

    Args:
        in_features: size of x.
        out_features: size of y.
        memory: share of the statistics that a batch leaves in place.
        ridge: added to the covariance of x, relative to its mean diagonal.
    """

    def __init__(self, in_features: int, out_features: int, memory: float = 0.99, ridge: float = 0.1) -> None:
        super().__init__()
        self.memory, self.ridge = memory, ridge
        self.register_buffer("xx", torch.zeros(in_features + 1, in_features + 1), persistent=False)
        self.register_buffer("xy", torch.zeros(in_features + 1, out_features), persistent=False)

    @torch.no_grad()
    def observe(self, x: Tensor, y: Tensor) -> None:
        """Take in pairs, [B, in_features] and [B, out_features]."""
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1).to(self.xx.dtype)
        self.xx.mul_(self.memory).add_(x.T @ x)
        self.xy.mul_(self.memory).add_(x.T @ y.to(self.xy.dtype))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = len(self.xx)
            damping = self.ridge * self.xx.diagonal().mean().clamp_min(1e-12)
            M = torch.linalg.solve(self.xx + damping * torch.eye(size, device=x.device), self.xy)
        return x @ M[:-1] + M[-1]


class OpticalHead(Module):
    """A sentence-transformers module that passes sentence embeddings through :class:`OpticalIntensity`.

    Args:
        in_features: size of the embeddings.
        out_features: size of the head's.
        noise: see :class:`OpticalIntensity`.
        bits: likewise.
        seed: likewise.

    Attributes:
        block: the optics with an estimated backward; its stand-in is the exact intensity, for comparisons.
        ignored: while training, embeddings pass by the head as if it were not there.
        surrogate: observes the head's inputs and outputs, if there is one.
    """

    config_keys: ClassVar[list[str]] = ["in_features", "out_features", "noise", "bits", "seed"]

    def __init__(
        self, in_features: int, out_features: int = 512, noise: float = 0.05, bits: int | None = 8, seed: int = 0
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.noise, self.bits, self.seed = noise, bits, seed
        optics = OpticalIntensity(in_features, out_features, noise, bits, seed)
        config = ZBPConfig(mode="cd", param_mode="none", probe_chunk=16)
        self.block = ZBPBlock(optics, config, local=optics.intensity, name="optics", batched=True)
        self.ignored = False
        self.surrogate: LinearSurrogate | None = None

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        if self.ignored and self.training:
            return features
        x = features["sentence_embedding"]
        y = self.block(x)
        if self.surrogate is not None and self.training:
            self.surrogate.observe(x.detach(), y.detach())
        return {**features, "sentence_embedding": y}

    def get_embedding_dimension(self) -> int:
        return self.out_features

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        self.save_config(output_path)  # the medium is made from the seed


class Int8Linear(nn.Linear):
    """W8A8: weights in 8 bits per output channel, activations in 8 bits per token, no backward.

    A linear layer becomes one by :func:`to_int8`; its parameters stay.

    Attributes:
        fake: compute the same with a straight-through graph (fake quantisation).
    """

    fake: bool = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.fake and torch.is_grad_enabled()):
            return linear(_rounded_to_8_bits(x), _rounded_to_8_bits(self.weight), self.bias)


def to_int8(layer: nn.Module) -> nn.Module:
    """Let every linear layer inside compute in int8, without a backward, and freeze the layer's parameters."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = Int8Linear
    return layer.requires_grad_(False)


def fake_quantised(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward with its int8 layers differentiable, straight through the rounding: ``local`` of apply_zbp."""
    linears = [module for module in layer.modules() if isinstance(module, Int8Linear)]
    for module in linears:
        module.fake = True
    try:
        return getattr(layer, "plain_forward", layer.forward)(*args, **kwargs)
    finally:
        for module in linears:
            module.fake = False


def _rounded_to_8_bits(x: Tensor) -> Tensor:
    """x on a grid of 255 values per last axis, with the gradient of x."""
    step = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return x + ((x / step).round() * step - x).detach()
