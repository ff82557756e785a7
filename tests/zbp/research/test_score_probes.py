"""Score probes give autograd's gradients for K and Q with a whole basis, and their windowed part within a window."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from st_cached_extras.testing.tiny_models import gradients, relative_error
from st_cached_extras.zbp import ZBPBlock, ZBPConfig, apply_zbp, estimate_vjp, zbp_stats
from st_cached_extras.zbp.estimators import LayerCall
from st_cached_extras.zbp.research.score_probes import ScoreSettings, probe_scores
from tests.zbp.research.cases import relative


class Attention(nn.Module):
    """Two heads of three features over [B, T, 6]."""

    def __init__(self, dropout=0.0, kv_heads=2, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = (nn.Linear(6, 6, dtype=torch.float64) for _ in "qo")
        self.k, self.v = (nn.Linear(6, 3 * kv_heads, dtype=torch.float64) for _ in "kv")
        self.dropout, self.kwargs = dropout, kwargs

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, **self.kwargs)
        return self.o(out.transpose(1, 2).flatten(2))


def step(module, x, v):
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    module(x).backward(v)
    return {"x": x.grad, **{name.removeprefix("f."): g for name, g in gradients(module).items()}}


def inputs(length=5):
    torch.manual_seed(1)
    return torch.randn(2, length, 6, dtype=torch.float64), torch.randn(2, length, 6, dtype=torch.float64)


MASK = torch.ones(5, 5, dtype=torch.bool).tril()
MASK[3] = False  # a row that attends to nothing
BIAS = torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)
BIAS[0, 1] = BIAS[2, 3:] = torch.finfo(torch.float64).min
KINDS = {
    "causal": {"is_causal": True},
    "all": {},
    "mask": {"attn_mask": MASK},
    "bias": {"attn_mask": BIAS},
    "scale": {"is_causal": True, "scale": 0.3},
    "groups": {"is_causal": True, "kv_heads": 1, "enable_gqa": True},
}
WHOLE = ZBPConfig(mode="score_qk", n_probes=5, eps=1e-4, param_mode="local")


@pytest.mark.parametrize("mode", ["score_k", "score_qk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_basis_gives_autograd_s_gradients(mode, kind):
    layer = Attention(**KINDS[kind])
    expected = step(layer, *inputs())
    for chunk in (1, 3):
        block = ZBPBlock(layer, WHOLE.replace(mode=mode, probe_chunk=chunk))
        found = step(block, *inputs())
        assert relative_error(found, expected) <= 1e-6
        assert all(relative(found[name], g) <= 1e-5 for name, g in expected.items() if g.norm() > 1e-6)
        assert block.zbp.count.queries == 2 * 5 and block.zbp.count.exact_backwards == 1


@pytest.mark.parametrize("mode", ["score_k", "score_qk"])
def test_few_probes_are_right_on_average_and_leave_v_and_what_is_not_asked_for_exact(mode):
    layer, (x, v) = Attention(is_causal=True), inputs()
    expected = step(layer, x, v)
    config = WHOLE.replace(mode=mode, n_probes=2, probe="rademacher")
    draws = [step(ZBPBlock(layer, config.replace(seed=seed)), x, v) for seed in range(80)]
    probed = {"k.weight"} | ({"q.weight"} if mode == "score_qk" else set())
    for name in ("q.weight", "k.weight", "v.weight", "o.weight"):
        stacked = torch.stack([draw[name] for draw in draws])
        spread = float((stacked - expected[name]).square().flatten(1).sum(1).mean().sqrt() / expected[name].norm())
        if name in probed:
            assert spread >= 0.1
            assert relative(stacked.mean(0), expected[name]) <= 3 * spread / 80**0.5
        else:
            assert spread <= 1e-12


def test_rows_err_independently():
    """Equal rows with errors of their own: their mean over 64 has a 64th of the variance of one."""
    S = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(1, 2, 32, 5)
    R = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).expand(1, 2, 32, 5)
    allowed = torch.ones(32, 5, dtype=torch.bool)
    P = S.softmax(-1)
    truth = (P * (R - (P * R).sum(-1, keepdim=True)))[0, 0, 0]
    means, single = [], []
    for seed in range(60):
        call = LayerCall(f=torch.tanh, x=S, v=R, config=WHOLE.replace(n_probes=2, seed=seed))
        settings = ScoreSettings(call, 0, True, 1.0, None, 0.0)
        rows = probe_scores(S, R, allowed, settings).reshape(64, 5)
        means.append((rows.mean(0) - truth).square().sum())
        single.append((rows - truth).square().sum(1).mean())
    ratio = float(torch.stack(means).mean() / torch.stack(single).mean())
    assert ratio * 64 == pytest.approx(1.0, rel=0.5)  # 60 draws of a sum of 5 squares: a deviation of about .1
    assert float(torch.stack(single).mean() / truth.square().sum()) == pytest.approx(5 / 2 - 1, rel=0.1)


def score_gradient(x, v, layer):
    """d loss / d scores by autograd, [B, H, T, T]."""
    q, k, value = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (layer.q, layer.k, layer.v))
    S = (q @ k.transpose(-1, -2) / 3**0.5).detach().requires_grad_()
    P = S.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    out = layer.o((P @ value).transpose(1, 2).flatten(2))
    return torch.autograd.grad(out, S, v)[0], q, k


@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_a_window_keeps_the_scores_of_the_last_positions_alone(window):
    layer, (x, v) = Attention(is_causal=True), inputs()
    dS, q, k = score_gradient(x, v, layer)
    behind = torch.arange(5)[:, None] - torch.arange(5)
    dS = dS * ((behind >= 0) & (behind < window))
    dK, dQ = dS.transpose(-1, -2) @ q / 3**0.5, dS @ k / 3**0.5
    of_k = torch.einsum("btc,bti->ci", dK.transpose(1, 2).flatten(2), x)
    of_q = torch.einsum("btc,bti->ci", dQ.transpose(1, 2).flatten(2), x)
    config = WHOLE.replace(window=window, n_probes=min(window, 5))
    found = step(ZBPBlock(layer, config), x, v)
    scale = of_k.norm() + of_q.norm() + 1e-3
    assert (found["k.weight"] - of_k).norm() / scale <= 1e-6
    assert (found["q.weight"] - of_q).norm() / scale <= 1e-6


def test_queries_of_other_lengths_stand_at_the_end_of_the_keys():
    """As with a cache: the window of the last queries reaches back from the last keys."""

    class Late(Attention):
        def forward(self, x):
            q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (self.q, self.k, self.v))
            mask = torch.ones(5, 5, dtype=torch.bool).tril()[3:]
            return self.o(scaled_dot_product_attention(q[..., 3:, :], k, v, mask).transpose(1, 2).flatten(2))

    layer, (x, v) = Late(), inputs()
    expected = step(layer, x, v[:, 3:])
    found = step(ZBPBlock(layer, WHOLE.replace(window=5)), x, v[:, 3:])
    assert relative_error(found, expected) <= 1e-6


def test_dropped_probabilities_are_those_of_the_forward():
    layer, (x, v) = Attention(dropout=0.4, is_causal=True).train(), inputs()
    expected = step(layer, x, v)
    assert relative_error(step(ZBPBlock(layer, WHOLE), x, v), expected) <= 1e-6


def test_a_decoder_layer_trains_its_keys_and_queries_through_probes():
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    model = transformers.Qwen2Model(config).eval()
    ids, mask = torch.tensor([[5, 6, 7, 8, 9], [5, 7, 9, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])

    def run():
        model.zero_grad()
        y = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        (y * mask[..., None] * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
        return gradients(model)

    expected = run()
    apply_zbp(model, "layers.1", ZBPConfig(mode="score_qk", n_probes=5))
    found = run()
    assert relative_error(found, expected) <= 1e-3
    for name in ("q_proj.weight", "k_proj.weight"):
        name = f"layers.1.self_attn.{name}"
        assert expected[name].norm() > 0 and relative(found[name], expected[name]) <= 1e-3
    [stats] = zbp_stats(model).values()
    assert stats["queries"] == 10 and stats["exact_backwards"] == 1


def test_layers_without_attention_and_trained_position_biases_are_refused():
    x, v = inputs()
    with pytest.raises(ValueError, match=r"never called .*scaled_dot_product_attention"):
        estimate_vjp(torch.tanh, x, v, ZBPConfig(mode="score_k"))
    layer = Attention(attn_mask=torch.zeros(5, 5, dtype=torch.float64, requires_grad=True))
    with pytest.raises(ValueError, match="has a position bias that is trained"):
        estimate_vjp(layer, x, v, ZBPConfig(mode="score_k"))
