"""The surrogate is the ridge regression of its formula, and a control variate that is unbiased and does no harm."""

import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from st_cached_extras.zbp import ZBPBlock, ZBPConfig, estimate_vjp
from st_cached_extras.zbp.estimators import LayerCall
from st_cached_extras.zbp.probes import Probes
from st_cached_extras.zbp.research import surrogate
from st_cached_extras.zbp.research.layout import FeedbackLayout
from tests.zbp.research.cases import backward, mlp, relative

CONFIG = ZBPConfig(mode="cd", n_probes=2, probe="rademacher", eps=1e-4, param_mode="none", surrogate=True)


def linear_map_of(block, x, v):
    call = LayerCall(f=block.f, x=x, v=v, config=block.zbp.config, memory=block.zbp.memory)
    return surrogate.linear_map(call, FeedbackLayout(call, v.shape))


def test_the_map_is_weighted_ridge_regression():
    block = ZBPBlock(mlp(4, 3), CONFIG.replace(surrogate_ema=0.8, surrogate_ridge=0.05), name="layer")
    batches = [torch.randn(rows, 4, dtype=torch.float64) + 1 for rows in (5, 9, 7)]
    for x in batches:
        backward(block, x, torch.randn(len(x), 3, dtype=torch.float64))
    # Every batch counts as one, of age k with weight .8^k: written out, with a column of ones that is not shrunk.
    x = torch.cat(
        [
            0.8 ** ((2 - k) / 2) * torch.cat([b, torch.ones(len(b), 1)], 1) / len(b) ** 0.5
            for k, b in enumerate(batches)
        ]
    )
    y = torch.cat([0.8 ** ((2 - k) / 2) * block.f(b).detach() / len(b) ** 0.5 for k, b in enumerate(batches)])
    ridge = 0.05 * (x.T @ x).diagonal()[:4].mean() * torch.diag(torch.tensor([1.0, 1, 1, 1, 0]).double())
    M = torch.linalg.inv(x.T @ x + ridge) @ x.T @ y
    assert relative(linear_map_of(block, batches[0], y[:5]), M[:4]) <= 1e-9


def test_tokens_share_the_map_and_padding_is_not_among_the_pairs():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2).double()

        def forward(self, x, attention_mask):
            return self.linear(x) + 100.0 * (1 - attention_mask[..., None])

    block = ZBPBlock(Layer(), CONFIG.replace(surrogate_ridge=1e-9, n_probes=1), name="layer")
    for length in (6, 4):
        mask = torch.ones(2, length, dtype=torch.float64)
        mask[1, 3:] = 0
        x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
        block(x, attention_mask=mask).sum().backward()
    found = linear_map_of(block, x.detach(), torch.zeros(2, 4, 2).double())
    assert relative(found, block.f.linear.weight.detach().T) <= 1e-5


def test_a_linear_pooling_stage_is_predicted_whole_whatever_the_lengths():
    torch.manual_seed(0)
    linear = nn.Linear(3, 2).double()

    def pool(x, attention_mask):
        return linear((x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))

    block = ZBPBlock(pool, CONFIG.replace(surrogate_ridge=1e-9), name="pool")
    lengths = torch.arange(20) % 5 + 1
    mask = (torch.arange(5) < lengths[:, None]).double()
    x, v = torch.randn(20, 5, 3, dtype=torch.float64, requires_grad=True), torch.randn(20, 2, dtype=torch.float64)
    for _ in range(2):
        x.grad = None
        block(x, attention_mask=mask).backward(v)
    # The second call predicts with s = 1 what there is: nothing is left to the two probes of 15 dimensions.
    share = (mask / lengths[:, None])[..., None]
    assert relative(x.grad, (v @ linear.weight.detach())[:, None] * share) <= 1e-5


def warm(f, x, v, config, steps=5):
    """What a layer remembers after some steps."""
    block = ZBPBlock(f, config, name="layer")
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        backward(block, x + noise, v.roll(step, 0))
    return block.zbp.memory


def case(f, rows=6, size=4, out=3):
    torch.manual_seed(2)
    return f, torch.randn(rows, size, dtype=torch.float64), torch.randn(rows, out, dtype=torch.float64)


def test_a_whole_basis_is_exact_whatever_the_surrogate_says():
    """What is known and what is subtracted are the same, to the sign and the factor."""
    f, x, v = case(mlp(4, 3))
    memory = warm(f, x, v, CONFIG)
    assert float(memory["surrogate.fit.3x4"][0]) > 0
    truth = torch.func.vjp(f, x)[1](v)[0]
    for mode in ("cd", "jvp", "oracle"):
        config = CONFIG.replace(mode=mode, n_probes=4, probe="orthogonal")
        assert relative(estimate_vjp(f, x, v, config, memory=dict(memory)), truth) <= 1e-6


def test_it_is_unbiased_over_all_directions_that_can_be_drawn(monkeypatch):
    """One sign probe of three dimensions has eight values; the mean of the eight estimates is the gradient.

    A factor s that were fitted to the readings of its own call would be seen here.
    """
    f, x, v = case(mlp(3, 2), rows=1, size=3, out=2)
    memory = warm(f, x, v, CONFIG)
    truth = torch.func.vjp(f, x)[1](v)[0]
    estimates = []
    for signs in itertools.product((-1.0, 1.0), repeat=3):
        u = torch.tensor(signs, dtype=torch.float64).view(1, 1, 3)
        monkeypatch.setattr(Probes, "draw", lambda self, start, stop, u=u: u)
        estimates.append(estimate_vjp(f, x, v, CONFIG.replace(n_probes=1), memory=dict(memory)))
    estimates = torch.stack(estimates)
    assert (estimates - truth).norm() > 1e-3
    assert relative(estimates.mean(0), truth) <= 1e-7


def variance_of(f, x, v, config, calls=60):
    """Mean squared error over calls of one layer that goes on learning."""
    truth = torch.func.vjp(f, x)[1](v)[0]
    block = ZBPBlock(f, config, name="layer")
    return sum(float((backward(block, x, v) - truth).square().sum()) for _ in range(calls)) / calls


def even(x):
    """Intensities: the slope at x and at −x are opposite, and a linear map knows nothing."""
    torch.manual_seed(5)
    return (x @ torch.randn(8, 6, dtype=torch.float64)).square()


@pytest.mark.parametrize(("name", "most"), [("mlp", 0.2), ("linear", 0.1), ("even", 1.05)])
def test_the_variance_falls_with_what_is_linear_and_never_rises_by_more_than_a_twentieth(name, most):
    f = {"mlp": mlp(8, 6), "linear": nn.Linear(8, 6).double(), "even": even}[name]
    torch.manual_seed(3)
    x, v = torch.randn(64, 8, dtype=torch.float64), torch.randn(64, 6, dtype=torch.float64)
    off, on = (variance_of(f, x, v, CONFIG.replace(surrogate=s)) for s in (False, True))
    assert on <= most * off
    truth = torch.func.vjp(f, x)[1](v)[0]
    assert off == pytest.approx(float(7 / 2 * truth.square().sum()), rel=0.1)


def test_nothing_is_read_by_the_host_in_a_step():
    f, x, v = case(mlp(4, 3))

    def syncs(config):
        block = ZBPBlock(f, config, name="layer")
        for _ in range(2):
            backward(block, x, v)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            backward(block, x, v)
        reads = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
        return sum(event.count for event in profiler.key_averages() if event.key in reads)

    assert syncs(CONFIG) == syncs(CONFIG.replace(surrogate=False))


def test_layers_too_wide_for_a_regression_are_refused():
    block = ZBPBlock(lambda x: x[:, :2], CONFIG, name="wide")
    with pytest.raises(ValueError, match=r"surrogate=True would regress 2 on 9000 numbers for the layer 'wide'"):
        block(torch.randn(1, 9000, requires_grad=True))
