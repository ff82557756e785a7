"""A block's forward is bitwise that of its layer, its parameters' gradients backprop's, and its queries replay it."""

import copy
import logging
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from st_cached_extras.testing.tiny_models import gradients, relative_error
from st_cached_extras.zbp import ZBPBlock, ZBPConfig, register_mode
from st_cached_extras.zbp.config import KNOWN_MODES
from st_cached_extras.zbp.modes import RULES


class Rounded(nn.Module):
    """A linear layer whose output comes in steps, from a kernel without a graph."""

    def __init__(self, width=6, out=5, step=0.05):
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.step = step

    def forward(self, x):
        with torch.no_grad():
            return (self.linear(x) / self.step).round() * self.step


class Dropped(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale=1.0, *, shift=0.0):
        return torch.dropout(torch.tanh(self.linear(x)), 0.4, self.training) * scale + shift


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The layer .* is differentiable")
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        yield


def seeded(module_class, *args, **kwargs):
    torch.manual_seed(0)
    return module_class(*args, **kwargs)


def inputs(rows=4, width=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator).requires_grad_()


def step(module, x, seed=5, **kwargs):
    """Output, gradients of input and parameters, and the random state after, of one forward and backward."""
    module.zero_grad()
    x.grad = None
    torch.manual_seed(seed)
    y = module(x, **kwargs)
    y.square().sum().backward()
    return y.detach(), x.grad, gradients(module), torch.get_rng_state()


EXACT_BASIS = ZBPConfig(mode="cd", n_probes=6, eps=1e-3)


@pytest.mark.parametrize("mode", ["cd", "fd", "jvp", "oracle", "exact", "skip", "bp", "auto"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_forward_and_random_stream_are_the_layer_s_bit_for_bit(mode, chunk):
    layer, x = seeded(Dropped), inputs()
    expected, *_, state = step(layer, x)
    y, *_, after = step(ZBPBlock(layer, ZBPConfig(mode=mode, n_probes=4, probe_chunk=chunk)), x)
    assert torch.equal(y, expected) and torch.equal(after, state)


@pytest.mark.parametrize("chunk", [1, 2, 6])
@pytest.mark.parametrize(("mode", "allowed"), [("cd", 1e-3), ("fd", 5e-3), ("jvp", 1e-5), ("oracle", 1e-5)])
def test_every_query_draws_the_forward_s_dropout(mode, allowed, chunk):
    layer, x = seeded(Dropped), inputs()
    _, expected, of_parameters, _ = step(layer, x)
    config = EXACT_BASIS.replace(mode=mode, probe_chunk=chunk)
    _, found, found_parameters, _ = step(ZBPBlock(layer, config), x)
    assert relative_error({"x": found}, {"x": expected}) <= allowed
    assert relative_error({k.removeprefix("f."): g for k, g in found_parameters.items()}, of_parameters) <= 1e-5


def test_evaluation_and_no_grad_ask_nothing_of_the_layer_twice():
    calls = []
    layer = seeded(Dropped)
    layer.register_forward_hook(lambda *_: calls.append(1))
    block = ZBPBlock(layer, EXACT_BASIS).eval()
    with torch.no_grad():
        block(inputs())
    assert len(calls) == 1 and block.zbp.calls == 0 and block.zbp.count.calibration_queries == 0


# --------------------------------------------------------------------------------------- layers without a backward


def test_below_a_layer_without_a_backward_gradients_are_right_within_the_steps_of_its_output():
    layer = seeded(Rounded, step=1e-3)
    below = nn.Linear(6, 6)
    x = inputs().detach()
    v = torch.randn(4, 5)
    block = ZBPBlock(layer, ZBPConfig(mode="cd", n_probes=6, eps=0.2, param_mode="none"))
    (block(below(x)) * v).sum().backward()
    truth = torch.autograd.grad((layer.linear(below(x)) * v).sum(), below.weight)[0]
    assert relative_error({"": below.weight.grad}, {"": truth}) <= 0.01
    assert truth.norm() > 1


class Forbidding(nn.Module):
    """Raises when it is called with a graph being recorded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x):
        if torch.is_grad_enabled():
            raise RuntimeError("this layer has no autograd")
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("param_mode", ["none", "zo"])
@pytest.mark.parametrize("mode", ["cd", "fd", "jvp", "auto"])
def test_no_autograd_is_called_inside_where_none_is_asked_for(mode, param_mode):
    x = inputs()
    block = ZBPBlock(Forbidding(), ZBPConfig(mode=mode, n_probes=6, param_mode=param_mode))
    block(x).sum().backward()
    assert x.grad.norm() > 0
    assert (block.f.weight.grad is None) == (param_mode == "none")


def test_parameters_are_trained_locally_where_autograd_is_right_about_them_and_not_where_it_is_not(caplog):
    with caplog.at_level(logging.INFO, "st_cached_extras"):
        right, wrong = ZBPBlock(seeded(Dropped), EXACT_BASIS), ZBPBlock(seeded(Rounded), EXACT_BASIS)
        for block in (right, wrong):
            block(inputs()).sum().backward()
    assert right.zbp.param_mode == "local" and right.f.linear.weight.grad is not None
    assert wrong.zbp.param_mode == "none" and wrong.f.linear.weight.grad is None
    assert "param_mode='local'" in caplog.text and "autograd is wrong about its parameters" in caplog.text


def test_local_parameters_of_a_layer_without_a_backward_are_refused():
    block = ZBPBlock(seeded(Rounded), EXACT_BASIS.replace(param_mode="local"))
    with pytest.raises(ValueError, match="param_mode='local', but autograd inside the layer"):
        block(inputs())


def test_a_stand_in_gives_the_exact_gradient_and_trains_the_parameters():
    layer, x = seeded(Rounded), inputs()
    y, v = layer(x), torch.randn(4, 5)
    truth = torch.autograd.grad((layer.linear(x) * v).sum(), [x, layer.linear.weight])
    for mode, param_mode in (("exact", "straight_through"), ("cd", "straight_through"), ("exact", "local")):
        config = ZBPConfig(mode=mode, n_probes=6, eps=2.0, param_mode=param_mode)
        block = ZBPBlock(layer, config, local=layer.linear)
        block.zero_grad()
        x.grad = None
        out = block(x)
        assert torch.equal(out, y)
        (out * v).sum().backward()
        assert relative_error({"": x.grad}, {"": truth[0]}) <= (1e-6 if mode == "exact" else 0.1)
        assert torch.allclose(layer.linear.weight.grad, truth[1], atol=1e-6)


def test_forward_differences_of_parameters_are_right_on_average():
    layer, x, v = seeded(Rounded, step=1e-4), inputs().detach(), torch.randn(4, 5)
    truth = torch.autograd.grad((layer.linear(x) * v).sum(), [layer.linear.weight, layer.linear.bias])
    truth = torch.cat([g.flatten() for g in truth])
    draws = []
    for seed in range(200):
        config = ZBPConfig(mode="cd", n_probes=4, eps=0.1, param_mode="zo", seed=seed)
        block = ZBPBlock(layer, config)
        block.zero_grad()
        (block(x) * v).sum().backward()
        draws.append(torch.cat([layer.linear.weight.grad.flatten(), layer.linear.bias.grad]))
    draws = torch.stack(draws)
    variance = (35 - 1) / 4
    found = (draws - truth).square().sum(1).mean() / truth.square().sum()
    assert found == pytest.approx(variance, rel=0.15)
    assert (draws.mean(0) - truth).norm() / truth.norm() <= 2 * (variance / 200) ** 0.5
    assert block.zbp.count.parameter_queries == 8 and block.zbp.count.queries == 0


# ----------------------------------------------------------------------------------------------------- pooling stages


class Pool(nn.Module):
    """A pool over the positions that are not padding, then a linear layer: [B, T, C] to [B, C]."""

    def __init__(self, kind="mean", noise=0.3, width=16):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.eye(width) + noise * torch.randn(width, width) / width**0.5)

    def forward(self, x, attention_mask=None):
        mask = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask
        if self.kind == "difference":  # of the first half and the second: no mean of anything
            half = x.shape[1] // 2
            return (x[:, :half].mean(1) - x[:, half:].mean(1)) @ self.weight
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) @ self.weight


MASK = torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2])


@pytest.mark.parametrize("mask", [None, MASK])
def test_auto_broadcasts_over_a_pool_that_is_near_a_mean_and_points_the_right_way(mask, caplog):
    layer, x, v = seeded(Pool), torch.randn(2, 6, 16, requires_grad=True), torch.randn(2, 16)
    block = ZBPBlock(layer, ZBPConfig(param_mode="none"), name="pool")
    with caplog.at_level(logging.INFO, "st_cached_extras"):
        (block(x, attention_mask=mask) * v).sum().backward()
    assert block.zbp.mode == "broadcast" and block.zbp.count.queries == 0
    assert "mode='broadcast', the cosine of its Jacobian and a mean over positions is" in caplog.text
    share = torch.ones(2, 6) if mask is None else mask
    assert torch.allclose(x.grad, v[:, None] * (share / share.sum(1, keepdim=True))[..., None])
    truth = torch.autograd.grad((layer(x, attention_mask=mask) * v).sum(), x)[0]
    assert torch.cosine_similarity(x.grad.flatten(), truth.flatten(), dim=0) > 0.9
    again = ZBPBlock(layer, ZBPConfig(param_mode="none"), name="pool")
    again.load_replay_state(block.replay_state())
    assert again.zbp.mode == "broadcast"


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: Pool("difference"), (2, 6, 16)),
        (lambda: Pool(noise=30.0), (2, 6, 16)),  # the mean, turned into another space
        (lambda: lambda x: -x.mean(1), (2, 6, 16)),
        (lambda: lambda x: x.mean(1)[:, :8], (2, 6, 16)),  # another width: no broadcast is defined
        (lambda: lambda x: x.mean(1), (6, 16)),  # nor from [B, C]
    ],
)
def test_auto_estimates_pools_that_are_no_mean(layer, shape):
    torch.manual_seed(0)
    block = ZBPBlock(layer(), ZBPConfig(param_mode="none", n_probes=2, eps=0.1))
    block(torch.randn(shape, requires_grad=True)).sum().backward()
    assert block.zbp.mode == "cd" and block.zbp.count.queries == 4


# -------------------------------------------------------------------------------------------------- the skip path


@pytest.mark.parametrize("mode", ["cd", "skip", "auto"])
def test_the_skip_path_is_exact_and_skipping_is_that_path_alone(mode):
    x, v = inputs(), torch.randn(4, 6)
    block = ZBPBlock(seeded(Dropped).eval(), EXACT_BASIS.replace(mode=mode), skip="identity")
    (block(x) * v).sum().backward()
    if mode == "cd":
        truth = torch.autograd.grad(((block.f(x) + x) * v).sum(), x)[0]
        assert relative_error({"": x.grad}, {"": truth}) <= 1e-3
    else:
        assert torch.equal(x.grad, v) and block.zbp.count.queries == 0


def test_a_skip_module_is_trained_exactly():
    x, v = inputs(), torch.randn(4, 5)
    skip = nn.Linear(6, 5)
    block = ZBPBlock(seeded(Rounded), EXACT_BASIS.replace(param_mode="none", eps=0.5), skip=skip)
    (block(x) * v).sum().backward()
    truth = torch.autograd.grad((skip(x) * v).sum(), [skip.weight, x])
    assert torch.allclose(skip.weight.grad, truth[0], atol=1e-6)
    assert not torch.allclose(x.grad, truth[1], atol=1e-2)


def test_without_an_estimated_input_gradient_nothing_is_queried_and_nothing_flows():
    x = inputs()
    block = ZBPBlock(seeded(Dropped), EXACT_BASIS, estimate_input_grad=False)
    block(x).sum().backward()
    assert x.grad is None and block.f.linear.weight.grad.norm() > 0
    assert block.zbp.count.queries == 0 and block.zbp.calls == 1


# --------------------------------------------------------------------------------------------- arguments and outputs


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, other=None):
        y = torch.tanh(self.linear(x))
        return y, y.mean(), "text"


def test_of_a_tuple_the_first_entry_carries_the_gradient():
    x = inputs()
    y, mean, text = ZBPBlock(seeded(Pair), EXACT_BASIS)(x)
    assert y.requires_grad and not mean.requires_grad and text == "text"
    y.sum().backward()
    truth = torch.autograd.grad(seeded(Pair)(x)[0].sum(), x)[0]
    assert relative_error({"": x.grad}, {"": truth}) <= 1e-3


def test_other_arguments_are_handed_on_in_every_query():
    layer, x = seeded(Dropped), inputs()
    kwargs = {"scale": torch.tensor(3.0), "shift": 1.0}
    expected = step(layer, x, **kwargs)
    found = step(ZBPBlock(layer, EXACT_BASIS), x, **kwargs)
    assert torch.equal(found[0], expected[0])
    assert relative_error({"": found[1]}, {"": expected[1]}) <= 1e-3


@pytest.mark.parametrize("other", [lambda t: t, lambda t: [t], lambda t: {"deep": (1, t)}])
def test_another_differentiable_argument_is_refused(other):
    with pytest.raises(ValueError, match=r"The argument 'other' of the layer .* is differentiable, too"):
        ZBPBlock(seeded(Pair), EXACT_BASIS)(inputs(), other=other(torch.ones(1, requires_grad=True)))


@pytest.mark.parametrize("x", [torch.tensor([[1, 2]]), {"input_ids": 1}, "text"])
def test_what_is_no_tensor_of_numbers_is_refused(x):
    with pytest.raises(TypeError, match="where a floating-point tensor is expected"):
        run = ZBPBlock(lambda z: z, EXACT_BASIS, name="top")
        run(x)


def test_outputs_without_a_tensor_are_refused():
    with pytest.raises(TypeError, match="The layer 'top' returned dict"):
        ZBPBlock(lambda z: {"y": z}, EXACT_BASIS.replace(param_mode="none"), name="top")(inputs())


def test_batch_norm_in_train_mode_is_refused():
    block = ZBPBlock(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), EXACT_BASIS)
    with pytest.raises(ValueError, match="BatchNorm in train mode"):
        block(inputs())
    block.eval()(inputs()).sum().backward()


def test_partitioned_parameters_are_refused():
    block = ZBPBlock(seeded(Dropped), EXACT_BASIS, name="top")
    block.f.linear.weight.ds_id = 7
    with pytest.raises(ValueError, match="'top' are partitioned by DeepSpeed ZeRO-3"):
        block(inputs())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"f": 3}, TypeError, "f must be a module or a function"),
        ({"skip": "residual"}, TypeError, "skip must be"),
        ({"config": {"mode": "cd"}}, TypeError, "config must be a ZBPConfig"),
        ({"config": ZBPConfig(param_mode="straight_through")}, ValueError, "give it as local="),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        ZBPBlock(**{"f": nn.Linear(6, 6), **arguments})


# ------------------------------------------------------------------------------------------------- state and copies


def test_two_sequence_lengths_and_two_forwards_before_one_backward():
    layer = seeded(Dropped)
    block = ZBPBlock(layer, ZBPConfig(mode="cd", n_probes=24, eps=1e-3))
    a = torch.randn(2, 3, 6, requires_grad=True)
    b = torch.randn(2, 4, 6, requires_grad=True)
    torch.manual_seed(0)
    (block(a).square().sum() + block(b).square().sum()).backward()
    found = a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    torch.manual_seed(0)
    (layer(a).square().sum() + layer(b).square().sum()).backward()
    assert relative_error({"b": found[1]}, {"b": b.grad}) <= 1e-3
    # 24 probes of 18 dimensions: a basis, exact, and a third of another.
    assert relative_error({"a": found[0]}, {"a": a.grad}) <= 1.0


def test_samples_may_be_counted_by_several_axes():
    """[B, T, C] with two of them: every token a sample, as token units would have it."""
    layer, x = seeded(Dropped).eval(), torch.randn(2, 3, 6, requires_grad=True)
    ZBPBlock(layer, EXACT_BASIS, batch_dims=2)(x).square().sum().backward()
    truth = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert relative_error({"": x.grad}, {"": truth}) <= 1e-3


def test_the_step_is_chosen_once_logged_and_counted_apart(caplog):
    block = ZBPBlock(seeded(Dropped), ZBPConfig(mode="cd", n_probes=3, param_mode="none"))
    with caplog.at_level(logging.INFO, "st_cached_extras"):
        for _ in range(3):
            block(inputs()).sum().backward()
    assert caplog.text.count("eps = ") == 1
    assert block.zbp.count.queries == 3 * 6 and block.zbp.count.calibration_queries > 0


def test_a_noisy_stepped_layer_gets_a_large_step_and_a_smooth_one_a_small_one():
    generator = torch.Generator().manual_seed(0)

    def noisy(x):
        y = torch.tanh(x)
        return ((y + 0.05 * torch.randn(y.shape, generator=generator)) * 16).round() / 16

    chosen = []
    for f in (torch.tanh, noisy):
        block = ZBPBlock(f, ZBPConfig(mode="cd", n_probes=3, param_mode="none"))
        block(torch.randn(64, 32, requires_grad=True)).sum().backward()
        chosen.append(block.zbp.eps)
    assert chosen[0] <= 1e-2 and chosen[1] >= 0.1


def test_resuming_draws_the_probes_that_an_uninterrupted_run_draws():
    def run(block, steps):
        found = []
        for _ in range(steps):
            x = inputs()
            block(x).square().sum().backward()
            found.append(x.grad)
        return found

    config = ZBPConfig(mode="auto", n_probes=2, param_mode="auto")
    whole = run(ZBPBlock(seeded(Rounded), config, name="top"), 4)
    first = ZBPBlock(seeded(Rounded), config, name="top")
    run(first, 2)
    state = first.replay_state()
    assert {key: value.numel() for key, value in state.items()} == dict.fromkeys(state, 1)
    second = ZBPBlock(seeded(Rounded), config, name="top")
    second.load_replay_state(state)
    assert all(torch.equal(a, b) for a, b in zip(run(second, 2), whole[2:], strict=True))
    assert second.zbp.count.calibration_queries == 0
    assert not torch.equal(whole[0], whole[1]), "every call draws anew"
    assert not torch.equal(run(ZBPBlock(seeded(Rounded), config, name="other"), 1)[0], whole[0])
    fresh = ZBPBlock(seeded(Rounded), config, name="top")
    fresh.load_replay_state(ZBPBlock(seeded(Rounded), config).replay_state())
    assert fresh.zbp.mode is None and fresh.zbp.eps is None


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_independent(copier):
    block = ZBPBlock(seeded(Dropped), EXACT_BASIS, name="top")
    twin = copier(block)
    expected = step(block, inputs())
    found = step(twin, inputs())
    assert torch.equal(found[1], expected[1])
    step(twin, inputs())
    assert block.zbp.calls == 1 and twin.zbp.calls == 2


def test_autocast_is_restored_in_every_query():
    layer, x = seeded(Dropped).eval(), inputs(rows=32)
    seen = []
    layer.linear.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = ZBPBlock(layer, ZBPConfig(mode="cd", n_probes=6))(x)
    y.float().square().sum().backward()
    assert set(seen) == {torch.bfloat16}
    truth = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert relative_error({"": x.grad}, {"": truth}) <= 0.15


def test_parameters_changed_in_place_before_the_backward_are_noticed():
    block = ZBPBlock(seeded(Dropped), EXACT_BASIS)
    y = block(inputs()).sum()
    with torch.no_grad():
        block.f.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_backward_cannot_be_differentiated_again():
    x = inputs()
    (gradient,) = torch.autograd.grad(ZBPBlock(seeded(Dropped), EXACT_BASIS)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        gradient.sum().backward()


def test_a_differentiable_layer_is_warned_about_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block = ZBPBlock(seeded(Dropped), EXACT_BASIS)
        for _ in range(2):
            block(inputs()).sum().backward()
        ZBPBlock(seeded(Rounded), EXACT_BASIS)(inputs()).sum().backward()
    messages = [str(w.message) for w in caught if "ZBP is for layers" in str(w.message)]
    assert len(messages) == 1 and "gradient checkpointing is exact" in messages[0]


@pytest.mark.parametrize(
    "changes", [{"mode": "exact"}, *({"param_mode": name} for name in ("none", "zo", "straight_through"))]
)
def test_no_layer_is_warned_about_that_is_checkpointed_already_or_asked_for_no_autograd(changes):
    local = nn.Linear(6, 6) if "straight_through" in changes.values() else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZBPBlock(seeded(Dropped), EXACT_BASIS.replace(**changes), local=local)(inputs()).sum().backward()


def test_compiled_code_breaks_its_graph_there_and_gives_the_same():
    block = ZBPBlock(seeded(Dropped).eval(), EXACT_BASIS)
    eager, x = copy.deepcopy(block), inputs()
    eager(x * 2).sum().backward()
    expected, x.grad = x.grad, None
    torch.compile(lambda z: block(z * 2).sum(), backend="eager")(x).backward()
    assert torch.allclose(x.grad, expected, atol=1e-6)


def test_a_rule_of_one_s_own_is_a_mode():
    name = "half_of_v"
    try:
        register_mode(name, lambda call: call.v / 2)
        x = inputs()
        ZBPBlock(seeded(Dropped).eval(), ZBPConfig(mode=name))(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 0.5))
        with pytest.raises(ValueError, match="There is a mode 'half_of_v' already"):
            register_mode(name, lambda call: call.v)
    finally:
        RULES.pop(name, None)
        KNOWN_MODES.discard(name)


RERUN = """
import torch
from torch import nn
from st_cached_extras.zbp import ZBPBlock, ZBPConfig

torch.manual_seed(0)
f, x = nn.Linear(6, 4), torch.randn(3, 6, requires_grad=True)
ZBPBlock(f, ZBPConfig(mode="cd", n_probes=2), name="top")(x).square().sum().backward()
result = x.grad.flatten().tolist()
"""


def test_a_rerun_in_a_process_of_another_hash_seed_is_identical():
    here = {}
    exec(RERUN, here)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{RERUN}\nprint(result)"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.strip() == str(here["result"])
