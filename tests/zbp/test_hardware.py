"""The simulated hardware does what its docstring says, and has no backward."""

import pickle

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from st_cached_extras.testing.tiny_models import relative_error, text_columns, tiny_text_model
from st_cached_extras.zbp import ZBPConfig, apply_zbp, zbp_blocks, zbp_stats
from st_cached_extras.zbp.hardware import (
    Int8Linear,
    LinearSurrogate,
    OpticalHead,
    OpticalIntensity,
    fake_quantised,
    to_int8,
)
from st_cached_extras.zbp.ladder import int8_arms, optical_arms, with_int8_layers, with_optical_head
from st_cached_extras.zbp.state import LayerState


@pytest.mark.parametrize("is_complex", [True, False])
def test_intensities_are_squared_magnitudes(is_complex):
    optics = OpticalIntensity(6, 5, noise=0.0, bits=None, is_complex=is_complex)
    x = torch.randn(4, 6)
    medium = torch.complex(*optics.medium) if is_complex else optics.medium[0]
    scaled = x / x.square().mean(1, keepdim=True).sqrt()
    expected = torch.stack([(medium @ row.to(medium.dtype)).abs().square() for row in scaled])
    assert torch.allclose(optics(x), expected, atol=1e-5)
    assert torch.allclose(optics(torch.stack([x, 3 * x])), torch.stack([expected, expected]), atol=1e-5)
    many = OpticalIntensity(64, 8192, noise=0.0, bits=None, is_complex=is_complex)(torch.randn(1, 64))
    # Exponentially distributed, or chi-squared with one degree of freedom.
    assert many.mean() == pytest.approx(1.0, abs=0.1)
    assert many.var() == pytest.approx(1.0 if is_complex else 2.0, rel=0.2)


def test_measurements_are_noisy_in_steps_saturate_and_have_no_graph():
    optics = OpticalIntensity(6, 2000, noise=0.05, bits=None)
    x = torch.randn(1, 6, requires_grad=True)
    first, second, true = optics(x), optics(x), optics.intensity(x)
    assert not first.requires_grad and true.requires_grad
    assert ((first - second) / true.detach() / 2**0.5).std() == pytest.approx(0.05, rel=0.1)
    coarse = OpticalIntensity(6, 2000, noise=0.0, bits=3, full_scale=2.0)(x)
    assert set((coarse * 7 / 2).round().long().unique().tolist()) == set(range(8)) and coarse.max() == 2.0
    state = torch.get_rng_state()
    optics(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pickle.loads(pickle.dumps(optics))(x), OpticalIntensity.forward(optics, x))


def test_a_surrogate_finds_a_linear_map_and_forgets():
    torch.manual_seed(0)
    surrogate = LinearSurrogate(5, 3, memory=0.5, ridge=1e-6)
    maps = [torch.randn(5, 3), torch.randn(5, 3)]
    for matrix in maps:
        for _ in range(60):
            x = torch.randn(32, 5)
            surrogate.observe(x, x @ matrix + 1.0)
    x = torch.randn(4, 5, requires_grad=True)
    assert torch.allclose(surrogate(x), x @ maps[1] + 1.0, atol=1e-3)
    surrogate(x).sum().backward()
    assert torch.allclose(x.grad, maps[1].sum(1).expand(4, 5), atol=1e-3)


def test_int8_layers_round_have_no_graph_and_a_fake_quantised_twin():
    layer = nn.Linear(16, 8)
    x = torch.randn(4, 16, requires_grad=True)
    exact = layer(x)
    assert to_int8(layer) is layer and type(layer) is Int8Linear and not layer.weight.requires_grad
    y = layer(x)
    assert not y.requires_grad
    assert 0 < relative_error({"": y}, {"": exact}) < 0.02
    levels = (layer.weight / (layer.weight.abs().amax(1, keepdim=True) / 127)).round()
    rounded = levels * layer.weight.abs().amax(1, keepdim=True) / 127
    steps = x.abs().amax(1, keepdim=True) / 127
    assert torch.allclose(y, (x / steps).round() * steps @ rounded.T + layer.bias, atol=1e-5)
    twin = fake_quantised(layer, x)
    assert torch.equal(twin, y) and twin.requires_grad and not layer.fake
    twin.sum().backward()
    assert torch.allclose(x.grad, rounded.sum(0).expand(4, 16), atol=1e-5)


def test_a_head_in_a_model_is_saved_and_loaded_with_its_medium(tmp_path):
    model = with_optical_head(tiny_text_model(), 24, seed=3).eval()
    model.save_pretrained(str(tmp_path), create_model_card=False)
    loaded = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert isinstance(loaded[-1], OpticalHead) and loaded.get_embedding_dimension() == 24
    assert (loaded.encode(["w1 w2"]) == model.encode(["w1 w2"])).all()


def trained_below(model, columns):
    model.zero_grad()
    embeddings = model(dict(columns[0]))["sentence_embedding"]
    if not embeddings.requires_grad:
        return None
    (embeddings * torch.arange(embeddings.numel()).view_as(embeddings).sin()).sum().backward()
    return model.get_submodule("0.model.encoder.layer.0.intermediate.dense").weight.grad


def test_every_arm_of_the_optical_ladder_trains_the_encoder_but_the_first():
    for arm in optical_arms((3,)):
        model = with_optical_head(tiny_text_model(), 24)
        arm.prepare(model)
        columns = text_columns(model, 6)
        if arm.name == "linear surrogate":
            trained_below(model, columns)  # the first batch is what it learns from
        gradient = trained_below(model, columns)
        assert gradient is not None and bool(gradient.isfinite().all())
        if arm.trains:
            assert gradient.norm() > 0, arm.name
        queries = sum(of_layer["queries"] for of_layer in zbp_stats(model).values())
        assert (queries > 0) == (arm.name in ("ZBP, 3 probes", "ZBP, 3 probes beside surrogate", "nothing trained"))
        expected = 16 if arm.name == "head ignored" else 24
        assert model(dict(columns[0]))["sentence_embedding"].shape == (6, expected)
        model.eval()
        assert model(dict(columns[0]))["sentence_embedding"].shape == (6, 24)


def test_every_arm_of_the_int8_ladder_trains_the_layer_below_and_freezes_those_in_int8():
    names = ["0.model.encoder.layer.1"]
    gradients = {}
    for arm in int8_arms(names, (3,)):
        model = with_int8_layers(tiny_text_model(), names)
        arm.prepare(model)
        gradients[arm.name] = trained_below(model, text_columns(model, 6))
        assert gradients[arm.name] is not None, arm.name
        assert all(p.grad is None for p in model.get_submodule(names[0]).parameters())
    assert len(gradients) == 6
    exact = gradients.pop("exact")
    float_model = tiny_text_model()
    truth = trained_below(float_model, text_columns(float_model, 6))
    assert relative_error({"": exact}, {"": truth}) <= 0.1
    assert relative_error({"": gradients["autograd as it is"]}, {"": truth}) > 0.1


def test_auto_takes_a_stand_in_that_is_right_and_the_residual_path_where_there_is_none_or_a_wrong_one(caplog):
    names, config = ["0.model.encoder.layer.1"], ZBPConfig(param_mode="none")
    chosen = {}
    with caplog.at_level("INFO"):
        for name, local in (("right", fake_quantised), ("none", None), ("wrong", lambda layer, x, *a, **k: 0 * x)):
            model = with_int8_layers(tiny_text_model(), names)
            apply_zbp(model, names, config, local=local)
            trained_below(model, text_columns(model, 6))
            [state] = [block.zbp for block in zbp_blocks(model).values()]
            chosen[name] = state.mode
            resumed = LayerState(config)
            resumed.load_replay_state(state.replay_state())
            assert resumed.mode == state.mode
    assert chosen == {"right": "exact", "none": "skip", "wrong": "skip"}
    assert "mode='exact', as its stand-in is right about it" in caplog.text


def test_no_backward_finds_the_head():
    model = with_optical_head(tiny_text_model(), 24)
    assert list(zbp_blocks(model)) == ["2.block"]
    model[-1].block = model[-1].block.f  # without its estimated backward
    assert list(apply_zbp(model, "no_backward", batch=text_columns(model, 6)[0])) == ["2.block"]
