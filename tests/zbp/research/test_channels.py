"""What passes a channel is what its stages say, in their order, wherever it is put."""

import pytest
import torch

from st_cached_extras.zbp import Droop, Local, Noise, Quantise, ZBPBlock, ZBPConfig, estimate_vjp
from st_cached_extras.zbp.research.channels import pass_stages
from tests.zbp.research.cases import backward, mlp, relative


def passed(stages, values, progress=0.0):
    progress = torch.as_tensor(progress, dtype=values.dtype)
    return pass_stages(stages, values, progress, torch.Generator().manual_seed(0))


def test_droop_is_exponential_in_the_order():
    values = torch.ones(2, 5, dtype=torch.float64)
    progress = torch.arange(5) / 5
    assert torch.allclose(passed((Droop(0.7),), values, progress), torch.exp(-0.7 * progress.double()).expand(2, 5))


def test_noise_is_relative_to_what_is_sent_together_or_absolute():
    values = torch.tensor([[3.0, -3.0], [30.0, -30.0]]).repeat_interleave(4000, 1).double()
    errors = passed((Noise(0.1),), values) - values
    assert errors.std(1).tolist() == pytest.approx([0.3, 3.0], rel=0.05)
    errors = passed((Noise(0.1, relative=False),), values) - values
    assert errors.std(1).tolist() == pytest.approx([0.1, 0.1], rel=0.05)
    assert abs(float(errors.mean())) <= 4 * 0.1 / 16000**0.5


def test_converters_round_to_equal_steps_and_saturate():
    values = torch.linspace(-1, 1, 101, dtype=torch.float64)[None]
    found = passed((Quantise(3),), values)
    assert found.unique().tolist() == pytest.approx([-1, -2 / 3, -1 / 3, 0, 1 / 3, 2 / 3, 1])
    assert (found - values).abs().max() <= 1 / 6 + 1e-12
    found = passed((Quantise(3, full_scale=0.3),), values)
    assert found.abs().max() == pytest.approx(0.3) and len(found.unique()) == 7
    assert torch.equal(passed((Quantise(8),), torch.zeros(1, 4)), torch.zeros(1, 4))


def test_stages_act_in_their_order():
    values = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    progress = torch.tensor([0.0, 1.0])
    coarse, droop = Quantise(2), Droop(0.5)
    first = passed((droop, coarse), values, progress)
    second = passed((coarse, droop), values, progress)
    assert first.tolist() == [[1.0, 0.0]]
    assert second[0, 1] in (0.0, pytest.approx(torch.tensor(-0.5).exp().item()))


def case():
    torch.manual_seed(0)
    return mlp(6, 5), torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 5, dtype=torch.float64)


def test_a_transported_error_is_what_every_rule_and_the_parameters_receive():
    f, x, v = case()
    stages = (Droop(1.0), Quantise(4))
    progress = torch.arange(5).double() / 5
    arrived = passed(stages, v, progress)
    assert relative(arrived, v) > 0.1
    for mode in ("exact", "jvp"):
        config = ZBPConfig(mode=mode, n_probes=6, param_mode="local")
        truth, found = (ZBPBlock(f, config.replace(transport=t), name="layer") for t in ((), stages))
        expected = backward(truth, x, arrived)
        of_parameters = [p.grad.clone() for p in f.parameters()]
        f.zero_grad()
        assert relative(backward(found, x, v), expected) <= 1e-12
        assert all(torch.allclose(p.grad, g) for p, g in zip(f.parameters(), of_parameters, strict=True))
        f.zero_grad()
        direct = estimate_vjp(f, x, v, config.replace(transport=stages))
        assert relative(direct, estimate_vjp(f, x, arrived, config)) <= 1e-12


@pytest.mark.parametrize("mode", ["cd", "fd", "jvp", "oracle"])
@pytest.mark.parametrize("chunk", [1, 4, 6])
def test_readings_droop_from_probe_to_probe(mode, chunk):
    """A whole basis with the i-th reading scaled: the estimate is the gradient in that basis, scaled."""
    f, x, v = case()
    plain = ZBPConfig(mode=mode, n_probes=6, probe="coordinate", eps=1e-5, probe_chunk=chunk)
    drooping = plain.replace(measurement=(Droop(2.0),))
    g, found = (estimate_vjp(f, x, v, config) for config in (plain, drooping))
    factors = (found / g).sort(1, descending=True).values
    expected = torch.exp(-2.0 * torch.arange(6) / 6).double()
    assert torch.allclose(factors, expected.expand_as(factors), atol=1e-3)


@pytest.mark.parametrize("mode", ["cd", "jvp"])
def test_noise_of_readings_adds_the_variance_of_its_formula_and_no_bias(mode):
    """Readings of unit RMS r carry noise of deviation σ r: n probes of norm² d add d σ² r² / n to a row."""
    f, x, v = case()
    plain = ZBPConfig(mode=mode, n_probes=6, eps=1e-4)
    g = estimate_vjp(f, x, v, plain)
    noisy = plain.replace(measurement=(Noise(0.5),))
    draws = torch.stack([estimate_vjp(f, x, v, noisy.replace(seed=s)) for s in range(200)])
    variance = (draws - g).square().sum(2).mean()
    # E <g, u>² = |g|² per row, so that r² is the mean of |g|² over rows.
    expected = 6 * 0.25 * g.square().sum(1).mean() / 6
    assert variance == pytest.approx(float(expected), rel=0.1)
    assert relative(draws.mean(0), g) <= 3 * (0.25 / 200) ** 0.5


def test_chunks_do_not_change_what_is_measured():
    f, x, v = case()
    config = ZBPConfig(mode="jvp", n_probes=6, measurement=(Droop(0.5), Noise(0.2), Quantise(6)))
    found = [estimate_vjp(f, x, v, config.replace(probe_chunk=chunk)) for chunk in (1, 4, 6)]
    assert relative(found[1], found[0]) <= 1e-12 and relative(found[2], found[0]) <= 1e-12


def test_a_channel_measures_the_scores_of_attention_too():
    q = torch.randn(2, 3, 4, 6, dtype=torch.float64)

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(q, x, x, is_causal=True)

    x, v = torch.randn_like(q), torch.randn_like(q)
    config = ZBPConfig(mode="score_k", n_probes=4, eps=1e-4)
    plain, measured = (estimate_vjp(attend, x, v, config.replace(measurement=m)) for m in ((), (Noise(0.3),)))
    assert 0.01 < relative(measured, plain) < 1


def test_configurations_with_channels_survive_json():
    config = ZBPConfig(
        mode="cd",
        measurement=(Noise(0.05), Droop(0.1), Quantise(8, 2.0)),
        transport=(Noise(0.1, relative=False),),
        coordinates=(1, 4),
        window=3,
    )
    assert ZBPConfig.from_json(config.to_json()) == config
    assert config.replace(measurement=()).measurement == ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"measurement": Noise(0.1)}, TypeError, "measurement must be a tuple of Droop, Noise and Quantise"),
        ({"transport": ("noise",)}, TypeError, "transport must hold Droop, Noise and Quantise, got 'noise'"),
        ({"surrogate": 1}, TypeError, "surrogate must be True or False"),
        ({"surrogate": True, "control": "fit"}, ValueError, "surrogate=True is a control variate of its own"),
        ({"surrogate": True, "units": Local(1)}, ValueError, "surrogate=True is a control variate of its own"),
        ({"surrogate_ema": 1.0}, ValueError, "surrogate_ema must be below 1"),
        ({"surrogate_ridge": 0.0}, ValueError, "surrogate_ridge must be above 0"),
        ({"opzo_decay": -0.1}, ValueError, "opzo_decay must be at least 0"),
        ({"opzo_alpha": 0.0}, ValueError, "opzo_alpha must be above 0"),
        ({"feedback_scale": -1.0}, ValueError, "feedback_scale must be above 0"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"coordinates": (3, 3)}, ValueError, "coordinates must be at least 4, got 3"),
        ({"coordinates": (1, 2, 3)}, ValueError, r"coordinates must be \(first, after_last\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        ZBPConfig(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Droop(-1), "Droop.rate must be a finite number from 0"),
        (lambda: Noise(float("inf")), "Noise.deviation must be a finite number from 0"),
        (lambda: Quantise(1), "Quantise.bits must be an integer from 2"),
        (lambda: Quantise(8, 0.0), "Quantise.full_scale must be a finite number above 0"),
    ],
)
def test_stages_are_checked_too(make, message):
    with pytest.raises(ValueError, match=message):
        make()
