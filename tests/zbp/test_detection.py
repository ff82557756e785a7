"""Layers that drop or falsify gradients are found, stock layers are not suspected, residual ones are recognised."""

import warnings

import pytest
import torch
from torch import nn

from st_cached_extras.testing.tiny_models import copy_columns, text_columns, tiny_text_model, tiny_video_model
from st_cached_extras.zbp import ZBPConfig, apply_zbp, zbp_blocks
from st_cached_extras.zbp.detection import has_backward, jacobian_alignment, shifted
from st_cached_extras.zbp.hardware import OpticalIntensity, to_int8
from st_cached_extras.zbp.probes import private_generator
from st_cached_extras.zbp.queries import QueryCount


def generator(seed=0):
    return private_generator(torch.device("cpu"), seed)


class Lambda(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class WrongSign(torch.autograd.Function):
    """A backward that somebody got wrong."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, v):
        return -2 * v


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


BROKEN = {
    "round": lambda x: (8 * x).round() / 8,
    "detached": lambda x: torch.tanh(x.detach()),
    "no_grad": torch.no_grad()(torch.tanh),
    "numpy": lambda x: torch.from_numpy(x.numpy() ** 3) if not x.requires_grad else _refuse(),
    "no backward": NoBackward.apply,
    "wrong sign": WrongSign.apply,
    "half of it": lambda x: torch.tanh(x) + 3 * torch.tanh(x).detach(),
    "int8": None,
    "optical": None,
}


def _refuse():
    raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


def broken(name):
    torch.manual_seed(0)
    if name == "int8":
        return to_int8(nn.Linear(16, 16))
    return OpticalIntensity(16, 24) if name == "optical" else Lambda(BROKEN[name])


STOCK = {
    "linear": lambda: nn.Linear(16, 16),
    "convolution": lambda: nn.Sequential(nn.Unflatten(-1, (4, 4)), nn.Conv1d(4, 4, 3), nn.Flatten()),
    "layer norm": lambda: nn.LayerNorm(16),
    "gelu": lambda: nn.GELU(),
    "relu": lambda: nn.ReLU(),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.3),
    "mlp": lambda: nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)),
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "recurrent": lambda: nn.GRU(16, 16, batch_first=True),
    "constant": lambda: Lambda(lambda x: torch.ones_like(x)),
}


class Sandwich(nn.Module):
    """A model around one layer."""

    def __init__(self, layer, sequence):
        super().__init__()
        self.below, self.layer, self.above = nn.Linear(16, 16), layer, nn.Tanh()
        self.sequence = sequence

    def forward(self, x):
        y = self.layer(self.below(x))
        return self.above(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize("name", BROKEN)
def test_a_layer_without_a_right_backward_is_found(name):
    model, x = Sandwich(broken(name), False), torch.randn(32, 16)
    assert list(apply_zbp(model, "no_backward", ZBPConfig(mode="cd", param_mode="none"), batch=x)) == ["layer"]
    model(x).sum().backward()
    assert model.below.weight.grad.norm() > 0


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", STOCK)
def test_stock_layers_are_not_suspected(name, train):
    torch.manual_seed(0)
    sequence = name in ("encoder", "recurrent")
    model = Sandwich(STOCK[name](), sequence).train(train)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 5, 16) if sequence else torch.randn(8, 16)
        with pytest.raises(ValueError, match=r"every one of the \d+ modules that ran has a right backward"):
            apply_zbp(model, "no_backward", batch=x)


@pytest.mark.parametrize("make", [tiny_text_model, tiny_video_model])
def test_whole_encoders_are_not_suspected(make):
    model = make(dropout=0.1)
    if make is tiny_text_model:
        batch = text_columns(model, 4)[0]
    else:
        from st_cached_extras.testing.tiny_models import random_clips

        batch = model.preprocess(random_clips(2))
    with pytest.raises(ValueError, match="every one of the"):
        apply_zbp(model, "no_backward", batch=copy_columns([batch])[0])


def test_in_an_encoder_the_smallest_broken_modules_are_found_and_nothing_else_is_touched():
    model = tiny_text_model(dropout=0.1)
    to_int8(model.get_submodule("0.model.encoder.layer.1.intermediate"))
    state = torch.get_rng_state()
    found = apply_zbp(model, "no_backward", ZBPConfig(mode="cd", n_probes=2), batch=text_columns(model, 4)[0])
    assert list(found) == ["0.model.encoder.layer.1.intermediate.dense"] == list(zbp_blocks(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_models_gradients_are_not_touched_by_looking():
    model = Sandwich(broken("round"), False)
    apply_zbp(model, "no_backward", batch=torch.randn(8, 16))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("factor", [0.4, 0.6, 1.4, 1.6])
def test_within_half_is_right_and_beyond_it_is_not(factor):
    """A backward that is ``factor`` times the derivative of a linear map."""
    x = torch.randn(4, 8)
    count = QueryCount()
    found = has_backward(
        lambda z: 3 * z, lambda z: 3 * factor * z + (3 - 3 * factor) * z.detach(), x, generator(), count
    )
    assert (
        found == (abs(factor - 1) < 0.5)
        and count.calibration_queries == (9 if found else 9 + 32 + 32)
        and count.queries == 0
    )


@pytest.mark.parametrize(
    ("f", "low", "high"),
    [
        (lambda x: x, 0.95, 1.05),
        (lambda x: -5 * x, -1.05, -0.95),
        (lambda x: x.flip(-1), -0.1, 0.1),
        # |J|² = d + d for the identity and an independent map of the same size: 1/√2.
        (lambda x: x + x @ ORTHOGONAL, 0.6, 0.8),
    ],
)
def test_alignment_with_the_identity_is_the_cosine_of_jacobians(f, low, high):
    x = torch.randn(16, 64)
    with torch.no_grad():
        assert low <= jacobian_alignment(f, lambda v: v, x, generator(), QueryCount()) <= high


@pytest.mark.parametrize("seed", range(3))
def test_alignment_is_the_cosine_of_the_dense_jacobian_and_the_rule_s_matrix(seed):
    """Averaged over draws, for linear maps from 3 x 8 to 4 numbers that share a part, with and without padding."""
    A, B = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).unbind()
    A = A + 0.5 * B
    x = torch.randn(3, 8, dtype=torch.float64)
    for valid in (None, torch.tensor([[True], [True], [False]])):
        of_inputs = torch.ones(24) if valid is None else valid.expand(3, 8).flatten()
        truth = torch.nn.functional.cosine_similarity((A * of_inputs).flatten(), (B * of_inputs).flatten(), dim=0)

        def rule(v, of_inputs=of_inputs):
            return (v @ B * of_inputs).view(3, 8)

        found = [
            jacobian_alignment(lambda z: A @ z.flatten(), rule, x, generator(draw), QueryCount(), valid)
            for draw in range(400)
        ]
        assert sum(found) / len(found) == pytest.approx(float(truth), abs=0.08)


ORTHOGONAL = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).Q


def test_shifted_parameters_come_back_to_the_bit_even_after_an_error():
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
    kept = [parameter.detach().clone() for parameter in parameters]
    directions = [torch.ones(3), torch.ones(2, 2)]
    with pytest.raises(RuntimeError), shifted(parameters, directions, 0.1):
        assert torch.allclose(parameters[0], kept[0] + 0.1)
        raise RuntimeError
    assert all(torch.equal(a, b) for a, b in zip(parameters, kept, strict=True))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        yield
