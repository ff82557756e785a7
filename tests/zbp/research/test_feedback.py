"""Fixed and learned feedback: each rule is its formula, and what it needs from the model's output it finds there."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from st_cached_extras.losses import CachedInfoNCELoss
from st_cached_extras.testing.tiny_models import copy_columns, gradients, relative_error, text_columns, tiny_text_model
from st_cached_extras.zbp import (
    ErrorTap,
    ZBPBlock,
    ZBPConfig,
    apply_zbp,
    opzo_update,
    remove_zbp,
    set_mode,
    zbp_stats,
)
from tests.zbp.research.cases import TwoLayers, backward, dense_jacobian, memory, mlp, relative, tapped

TOP = "0.model.encoder.layer.1"

# ------------------------------------------------------------------------------------------------ feedback alignment


@pytest.mark.parametrize("shape", [(5, 4), (2, 7, 4), (1, 1, 4)])
@pytest.mark.parametrize(("out", "scale"), [(6, 1.0), (4, 0.3)])
def test_fa_is_v_times_its_matrix_for_every_token(shape, out, scale):
    block = ZBPBlock(mlp(4, out), ZBPConfig(mode="fa", feedback_scale=scale, param_mode="none"), name="layer")
    x, v = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], out, dtype=torch.float64)
    found = backward(block, x, v)
    B = memory(block, "fa.")
    assert B.shape == (out, 4)
    assert relative(found, scale * torch.einsum("...k,kc->...c", v, B)) <= 1e-6
    assert block.zbp.count.queries == block.zbp.count.exact_backwards == 0


def test_fa_shares_a_sample_s_signal_among_its_tokens_without_the_padding():
    def pool(x, attention_mask):
        return (x * attention_mask[..., None]).sum(1)[:, :3]

    block = ZBPBlock(pool, ZBPConfig(mode="fa"), name="pool")
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    x, v = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, dtype=torch.float64)
    block(x, attention_mask=mask).backward(v)
    B = memory(block, "fa.")
    for sample, length in ((0, 4), (1, 2)):
        for token in range(5):
            expected = v[sample] @ B / length if token < length else torch.zeros(4, dtype=torch.float64)
            assert torch.allclose(x.grad[sample, token], expected, atol=1e-6)


def test_fa_maps_all_of_a_sample_between_other_shapes():
    block = ZBPBlock(nn.Conv2d(2, 3, 2).double(), ZBPConfig(mode="fa", param_mode="none"), name="convolution")
    x, v = torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.randn(2, 3, 3, 3, dtype=torch.float64)
    found = backward(block, x, v)
    B = memory(block, "fa.")
    assert B.shape == (27, 32)
    assert relative(found.flatten(1), v.flatten(1) @ B) <= 1e-6


def test_fa_keeps_the_norm_on_average_and_with_the_identity_the_residual_path():
    block = ZBPBlock(lambda x: x * 2.0, ZBPConfig(mode="fa"), name="wide")
    x, v = torch.randn(64, 256, dtype=torch.float64), torch.randn(64, 256, dtype=torch.float64)
    plain = backward(block, x, v)
    # |vB|² / |v|² has a relative deviation of about (2 / 256)^.5 a row, and rows of one matrix are alike.
    assert plain.norm() / v.norm() == pytest.approx(1.0, abs=0.1)
    block.zbp.configure(ZBPConfig(mode="fa", control="identity"))
    assert relative(backward(block, x, v), plain + v) <= 1e-12
    narrow = ZBPBlock(mlp(4, 6), ZBPConfig(mode="fa", control="identity", param_mode="none"))
    with pytest.raises(ValueError, match="control='identity' needs a layer that keeps the shape"):
        backward(narrow, torch.randn(2, 4).double(), torch.randn(2, 6).double())


MATRICES = """
import torch
from torch import nn
from st_cached_extras.zbp import ErrorTap, ZBPBlock, ZBPConfig

result = []
for mode in ("fa", "dfa"):
    model = nn.Sequential(nn.Linear(6, 4), ZBPBlock(nn.Linear(4, 5), ZBPConfig(mode=mode, seed=3), name="top"))
    ErrorTap(model)
    torch.rand({draws})
    model(torch.randn(3, 6)).square().sum().backward()
    result += next(iter(model[1].zbp.memory.values())).flatten().tolist()
"""


def matrices_here():
    here = {}
    exec(MATRICES.format(draws=3), here)
    return here["result"]


def test_matrices_are_the_same_in_another_process():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{MATRICES.format(draws=11)}\nprint(result)"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.strip() == str(matrices_here())


def test_matrices_depend_on_seed_name_kind_and_sizes_alone():
    fa, dfa = matrices_here()[:20], matrices_here()[20:]
    assert fa != dfa

    def matrix(**changes):
        arguments = {"seed": 3, "name": "top", "size": 4} | changes
        block = ZBPBlock(
            mlp(arguments["size"], 5),
            ZBPConfig(mode="fa", seed=arguments["seed"], param_mode="none"),
            name=arguments["name"],
        )
        x = torch.randn(2, arguments["size"]).double()
        backward(block, x, torch.randn(2, 5).double())
        return memory(block, "fa.").flatten()

    assert torch.equal(matrix(), torch.tensor(fa).double())
    assert all(matrix(**change)[0] != fa[0] for change in ({"seed": 4}, {"name": "other"}, {"size": 6}))


@pytest.mark.parametrize("mode", ["fa", "dfa", "opzo"])
def test_sequences_may_change_their_length_from_step_to_step(mode):
    torch.manual_seed(0)
    config = ZBPConfig(mode=mode, param_mode="none")
    model = nn.Sequential(nn.Linear(4, 4), ZBPBlock(mlp(4, 3).float(), config, name="top"))
    ErrorTap(model)
    for length in (5, 2, 9):
        model(torch.randn(2, length, 4)).square().sum().backward()
    matrices = [key for key in model[1].zbp.memory if not key.startswith(("opzo.weight", "opzo.updates"))]
    assert len(matrices) == 1
    assert model[0].weight.grad.isfinite().all() and model[0].weight.grad.norm() > 0


# ------------------------------------------------------------------------------------------------- direct feedback


def test_dfa_on_two_layers_makes_the_update_that_is_computed_by_hand():
    """Nøkland's equations for mean squared error: e = 2 (y − t) / N, dW2 = e h^T, dW1 = (B e ∘ (1 − h²)) x^T."""
    model = tapped((5, 4, 3), "dfa", param_mode="local")
    x, t = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    nn.functional.mse_loss(model(x), t).backward()
    W1, W2 = model.first.weight.detach(), model.second.f.weight.detach()
    h = torch.tanh(x @ W1.T)
    e = 2 * (h @ W2.T - t) / 18
    B = memory(model.second, "dfa.")
    assert relative(model.first.weight.grad, ((e @ B) * (1 - h * h)).T @ x) <= 1e-6
    assert relative(model.second.f.weight.grad, e.T @ h) <= 1e-12


def test_dfa_ignores_what_comes_back_through_the_layers_above():
    """The error is that of the output, whatever scale and non-linearity lie between, and the skip passes nothing."""
    torch.manual_seed(0)
    block = ZBPBlock(mlp(4, 4), ZBPConfig(mode="dfa", param_mode="none"), skip="identity", name="low")
    model = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ErrorTap(model)
    x, e = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    model(x).backward(e)
    assert relative(model[0].weight.grad, (e @ memory(block, "dfa.")).T @ x) <= 1e-6
    skipping = nn.Linear(4, 4).double()
    block.skip = skipping
    model.zero_grad()
    model(x).backward(e)
    assert relative(model[0].weight.grad, (e @ memory(block, "dfa.")).T @ x) <= 1e-6
    assert skipping.weight.grad.norm() > 0, "what is beside the layer still learns"


def test_dfa_takes_the_error_of_each_token_where_the_output_is_a_sequence():
    model = tapped((5, 4, 3), "dfa", param_mode="none")
    x, e = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(2, 7, 3, dtype=torch.float64)
    model(x).backward(e)
    h = torch.tanh(x @ model.first.weight.detach().T)
    expected = torch.einsum("btc,bti->ci", (e @ memory(model.second, "dfa.")) * (1 - h * h), x)
    assert relative(model.first.weight.grad, expected) <= 1e-6


def drtp_gradient(model, x, target):
    model.zero_grad()
    model.error_tap.set_target(target)
    model(x).square().sum().backward()
    return model.first.weight.grad.clone()


def test_drtp_is_the_negated_target_through_its_matrix():
    model = tapped((5, 4, 3), "drtp", param_mode="none", feedback_scale=0.5)
    x, classes = torch.randn(4, 5, dtype=torch.float64), torch.tensor([2, 0, 1, -100])
    found = drtp_gradient(model, x, classes)
    B, h = memory(model.second, "drtp."), torch.tanh(x @ model.first.weight.detach().T)
    projected = torch.stack([B[2], B[0], B[1], 0 * B[0]])
    assert relative(found, -0.5 * (projected * (1 - h * h)).T @ x) <= 1e-6
    hot = torch.zeros(4, 3).double().index_put_((torch.arange(3), classes[:3]), torch.tensor(1.0).double())
    assert relative(drtp_gradient(model, x, hot), found) <= 1e-12


def test_a_target_is_of_one_forward_alone():
    model = tapped((5, 4, 3), "drtp", param_mode="none")
    x = torch.randn(2, 5, dtype=torch.float64)
    with torch.no_grad():
        model.error_tap.set_target(torch.tensor([0, 1]))
        model(x)  # an evaluation in between does not take it
    model(x).sum().backward()
    with pytest.raises(ValueError, match="mode='drtp' needs a labelled loss"):
        model(x).sum().backward()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([0, 1, 2]), r"shape \(3,\) .* expected are class indexes of shape \(2,\)"),
        (torch.randn(2, 4), r"shape \(2, 4\) and the dtype torch.float32"),
        (torch.tensor([0.5, 1.0]), r"shape \(2,\) and the dtype torch.float32"),
        (torch.tensor([0, 3]), r"has the class 3, and the model's output has 3 features"),
    ],
)
def test_targets_of_a_wrong_shape_are_refused(target, message):
    model = tapped((5, 4, 3), "drtp", param_mode="none")
    model.error_tap.set_target(target)
    with pytest.raises(ValueError, match=f"(?i){message}"):
        model(torch.randn(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["dfa", "drtp", "opzo"])
def test_a_layer_whose_output_nobody_watches_says_so(mode):
    model = TwoLayers((5, 4, 3), mode, param_mode="none")
    with pytest.raises(ValueError, match=r"outside of a forward that an ErrorTap watches. Call ErrorTap.of\(model\)"):
        model(torch.randn(2, 5, dtype=torch.float64)).sum().backward()


def test_an_error_that_never_passed_the_output_is_missed():
    model = tiny_text_model()
    apply_zbp(model, [-1], ZBPConfig(mode="dfa"))
    features = text_columns(model, 3)[0]
    with pytest.raises(ValueError, match=r"the loss reached the layer .* without passing the output"):
        model(dict(features))["token_embeddings"].sum().backward()
    ErrorTap.of(model, output="token_embeddings")
    model(dict(features))["token_embeddings"].sum().backward()


# ------------------------------------------------------------------------------------------------------- the tap


def gradient_alone(mode, columns, seed, loss):
    model = tiny_text_model(seed=seed)
    apply_zbp(model, [-1], ZBPConfig(mode=mode))
    loss([model(c)["sentence_embedding"] for c in copy_columns(columns)]).backward()
    return gradients(model)


@pytest.mark.parametrize("mode", ["dfa", "opzo"])
def test_two_models_do_not_mix(mode):
    """Forwards and backwards of two models, one inside the other: each gets what it gets alone."""
    models = [tiny_text_model(seed=seed) for seed in (0, 1)]
    columns = [text_columns(model, 4, columns=1, seed=seed) for seed, model in enumerate(models)]
    for model in models:
        apply_zbp(model, [-1], ZBPConfig(mode=mode))
    a, b = (model(copy_columns(c)[0])["sentence_embedding"] for model, c in zip(models, columns, strict=True))
    (a[0, 0].sin() + 3 * b[0, 1] + (a * a).sum() - (b * b).sum()).backward()
    for index, loss in enumerate(
        (lambda e: e[0][0, 0].sin() + (e[0] * e[0]).sum(), lambda e: 3 * e[0][0, 1] - (e[0] * e[0]).sum())
    ):
        expected = gradient_alone(mode, columns[index], index, loss)
        assert relative_error(gradients(models[index]), expected) <= 1e-6


def test_two_columns_through_one_model_before_one_backward_do_not_mix():
    columns = text_columns(tiny_text_model(), 4)

    def loss(embeddings):
        return embeddings[0].sum() * 2 - (embeddings[1] * embeddings[1]).sum()

    both = gradient_alone("dfa", columns, 0, loss)
    first = gradient_alone("dfa", columns[:1], 0, lambda e: e[0].sum() * 2)
    second = gradient_alone("dfa", columns[1:], 0, lambda e: -(e[0] * e[0]).sum())
    summed = {name: first[name] + second[name] for name in both}
    assert relative_error(both, summed) <= 1e-6
    assert relative_error(both, first) > 0.1


def three_layers():
    torch.manual_seed(0)
    block = ZBPBlock(mlp(4, 4), ZBPConfig(mode="dfa", param_mode="none"), name="middle")
    model = nn.Sequential(nn.Linear(5, 4), block, nn.Linear(4, 3)).double()
    ErrorTap(model)
    return model, [torch.randn(2, 5, dtype=torch.float64) for _ in "ab"], [torch.randn(2, 3).double() for _ in "ab"]


def test_backwards_that_are_interleaved_do_not_mix():
    """Half of a's backward, all of b's, and the other half of a's: of two columns, and of two models."""
    for shared in (True, False):
        model, (a, b), (e_a, e_b) = three_layers()
        other = model if shared else three_layers()[0]
        outputs = []
        model[1].register_forward_hook(lambda module, args, y, outputs=outputs: outputs.append(y))
        y_a, y_b = model(a), other(b)
        (upper,) = torch.autograd.grad(y_a, outputs[0], e_a)
        y_b.backward(e_b)
        model.zero_grad()
        outputs[0].backward(upper)
        assert relative(model[0].weight.grad, (e_a @ memory(model[1], "dfa.")).T @ a) <= 1e-6


def test_an_error_is_of_one_backward():
    model, (x, _), (first, second) = three_layers()
    y = model(x)
    y.backward(first, retain_graph=True)
    model.zero_grad()
    y.backward(second)
    assert relative(model[0].weight.grad, (second @ memory(model[1], "dfa.")).T @ x) <= 1e-6


def test_mini_batches_that_are_replayed_give_the_gradient_of_the_whole_batch():
    results = []
    for size in (8, 3, 2):
        model = tiny_text_model()
        apply_zbp(model, [-1], ZBPConfig(mode="dfa"))
        CachedInfoNCELoss(model, mini_batch_size=size)(text_columns(model, 8)).backward()
        results.append(gradients(model))
    assert relative_error(results[1], results[0]) <= 1e-5 and relative_error(results[2], results[0]) <= 1e-5
    below = {name: g for name, g in results[0].items() if "layer.0" in name}
    assert all(g.norm() > 0 for name, g in below.items() if "key.bias" not in name)


class Labelled(CachedInfoNCELoss):
    """A loss that is given labels."""

    def forward(self, sentence_features, labels=None):
        return super().forward(sentence_features)


def test_the_labels_of_a_cached_loss_reach_the_rows_that_they_belong_to():
    """Rows are sorted by length and cut into mini-batches: labels go with them."""
    results = []
    labels = torch.arange(8) % 5
    for size in (8, 3):
        model = tiny_text_model()
        apply_zbp(model, [-1], ZBPConfig(mode="drtp"))
        loss = Labelled(model, mini_batch_size=size)
        ErrorTap.of(model).watch(loss)
        loss(text_columns(model, 8), labels).backward()
        results.append(gradients(model))
        with pytest.raises(ValueError, match="watch wants a labelled loss, and Labelled was called without labels"):
            loss(text_columns(model, 8))
    assert relative_error(results[1], results[0]) <= 1e-5
    model = tiny_text_model()
    apply_zbp(model, [-1], ZBPConfig(mode="drtp"))
    loss = Labelled(model, mini_batch_size=3)
    ErrorTap.of(model).watch(loss)
    loss(text_columns(model, 8), labels.flip(0)).backward()
    assert relative_error(gradients(model), results[0]) > 0.1, "labels in another order are not the same"


def test_copies_have_taps_of_their_own_and_removing_leaves_none():
    model = tiny_text_model()
    columns = text_columns(model, 3, columns=1)
    apply_zbp(model, [-1], ZBPConfig(mode="dfa"))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.error_tap is not model.error_tap
        assert twin.get_submodule(TOP).zbp.tap is twin.error_tap
        twin(copy_columns(columns)[0])["sentence_embedding"].sum().backward()
        assert zbp_stats(twin)[TOP]["backward_calls"] == 1 and zbp_stats(model)[TOP]["backward_calls"] == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="has an ErrorTap already"):
        ErrorTap(model)
    remove_zbp(model)
    assert not hasattr(model, "error_tap") and not model._forward_hooks and not model._forward_pre_hooks


def test_a_forward_that_fails_leaves_the_tap_as_it_was():
    model = tapped((5, 4, 3), "dfa", param_mode="none")
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 9, dtype=torch.float64))
    assert model.error_tap.signal is None
    model(torch.randn(2, 5, dtype=torch.float64)).sum().backward()


# ---------------------------------------------------------------------------------------------------------- opzo


def linear_network(**changes):
    torch.manual_seed(0)
    config = ZBPConfig(mode="opzo", param_mode="none", opzo_alpha=None, **changes)
    block = ZBPBlock(nn.Linear(6, 5).double(), config, name="low")
    model = nn.Sequential(block, nn.Linear(5, 3).double())
    ErrorTap(model)
    return model


@pytest.mark.parametrize(("decay", "updates"), [(0.9, 1), (0.98, 5), (0.9, 40)])
def test_opzo_converges_to_the_transposed_jacobian_at_the_rate_of_its_formula(decay, updates):
    B, C, errors, means = 4, 6, [], []
    for seed in range(40):
        model = linear_network(seed=seed, opzo_decay=decay)
        J = model[1].weight.detach() @ model[0].f.weight.detach()  # [3, 6]
        x = torch.randn(B, C, dtype=torch.float64)
        for _ in range(updates):
            opzo_update(model, lambda: model(x), model(x), alpha=0.3)  # noqa: B023
        M = memory(model[0], "opzo.matrix")
        weight = model[0].zbp.memory["opzo.weight.3x6"]
        means.append(M / weight)
        errors.append(float((M / weight - J).square().sum() / J.square().sum()))
    expected = (C - 1) / B * (1 - decay) * (1 + decay**updates) / ((1 + decay) * (1 - decay**updates))
    # 40 runs: a relative standard deviation of about .05 to .1.
    assert sum(errors) / 40 == pytest.approx(expected, rel=0.3)
    assert relative(torch.stack(means).mean(0), J) <= 2 * (expected / 40) ** 0.5


def test_opzo_carries_the_output_error_by_what_it_learned():
    model = linear_network()
    x = torch.randn(4, 6, dtype=torch.float64)
    e = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"has no feedback matrix .* yet: set opzo_alpha"):
        backward(model, x, e)
    opzo_update(model, lambda: model(x), alpha=0.1)
    opzo_update(model, lambda: model(x), alpha=0.1)
    M = memory(model[0], "opzo.matrix") / model[0].zbp.memory["opzo.weight.3x6"]
    assert relative(backward(model, x, e), e @ M) <= 1e-12
    assert model[0].zbp.count.queries == 2


def test_opzo_of_tokens_learns_the_mean_jacobian_of_a_token():
    """A pooled output moves by 1 / T of what one token moves, and padding is not among the tokens."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 3, bias=False).double()

        def forward(self, x, attention_mask):
            self.seen = x.detach()
            mask = attention_mask[..., None]
            return (self.linear(x) * mask).sum(1) / mask.sum(1)

    block = ZBPBlock(Pooled(), ZBPConfig(mode="opzo", param_mode="none", opzo_alpha=None, opzo_decay=0.0), name="p")
    ErrorTap(block)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]).double()
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    total = 0
    for _ in range(400):
        opzo_update(block, lambda: block(x, attention_mask=mask), alpha=0.1)
        total = total + memory(block, "opzo.matrix") / block.zbp.memory["opzo.weight.3x4"]
        block.zbp.memory = {"opzo.updates": block.zbp.memory["opzo.updates"]}
    assert torch.equal(block.f.seen[:, 3], x[:, 3]) and (block.f.seen[:, :3] != x[:, :3]).all(), "padding stands still"
    # Per update: tokens disturb each other, (6 tokens · 4 features − 1) / 6 rows at most.
    assert relative(total / 400, block.f.linear.weight.detach() / 3) <= 4 * (12 / 400) ** 0.5 / 3
    leaf = x.clone().requires_grad_()
    opzo_update(block, lambda: block(x, attention_mask=mask), alpha=0.1)
    e = torch.randn(2, 3, dtype=torch.float64)
    block(leaf, attention_mask=mask).backward(e)
    M = memory(block, "opzo.matrix") / block.zbp.memory["opzo.weight.3x4"]
    assert relative(leaf.grad, (e @ M)[:, None] * mask[..., None]) <= 1e-12


def test_opzo_teaches_itself_after_every_forward_under_the_forward_s_own_dropout():
    torch.manual_seed(0)
    config = ZBPConfig(mode="opzo", param_mode="none", opzo_alpha=1e-3, opzo_decay=0.0)
    block = ZBPBlock(nn.Linear(3, 3, bias=False).double(), config, name="low")
    model = nn.Sequential(block, nn.Dropout(0.5))
    ErrorTap(model)
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(7)
    expected = nn.functional.dropout(block.f(x), 0.5)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    y = model(x)
    assert torch.equal(y, expected) and torch.equal(torch.get_rng_state(), after)
    # Other draws would move the output by as much as it is, 1e3 of this.
    M = memory(block, "opzo.matrix") / block.zbp.memory["opzo.weight.3x3"]
    assert M.abs().max() <= 10
    assert block.zbp.count.queries == 1
    y.sum().backward()
    assert model.eval()(x.detach()).requires_grad is False
    assert block.zbp.count.queries == 1, "nothing is learned where there is no backward"


def test_opzo_updates_of_what_cannot_be_are_refused():
    model = linear_network()
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"clean_output has the shape \(3, 3\) and the perturbed forward gave \(4, 3\)"
    ):
        opzo_update(model, lambda: model(x), torch.zeros(3, 3), alpha=0.1)
    with pytest.raises(ValueError, match="forward ran none of the model's layers"):
        opzo_update(model, lambda: x, x, alpha=0.1)
    with pytest.raises(ValueError, match="alpha must be above 0, got None"):
        opzo_update(model, lambda: model(x))
    assert model[0].zbp.perturb is None
    set_mode(model, "fa")
    with pytest.raises(ValueError, match="the model has none"):
        opzo_update(model, lambda: model(x), alpha=0.1)


def test_the_jacobian_of_the_small_network_is_what_the_tests_say():
    model = linear_network()
    x = torch.randn(6, dtype=torch.float64)
    assert (
        relative(dense_jacobian(lambda z: model[1](model[0].f(z)), x), (model[1].weight @ model[0].f.weight).detach())
        <= 1e-12
    )
