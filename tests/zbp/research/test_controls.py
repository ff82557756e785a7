"""Controls and slices are what they say, count the exact backpropagation that they run, and modes can be switched."""

import pytest
import torch
from torch import nn

from st_cached_extras.testing.estimator_check import dense_vjp
from st_cached_extras.testing.tiny_models import copy_columns, text_columns, tiny_text_model
from st_cached_extras.zbp import (
    ZBPBlock,
    ZBPConfig,
    apply_zbp,
    compare_with_exact,
    estimate_vjp,
    reset_queries,
    set_mode,
    total_queries,
    zbp_stats,
)
from tests.zbp.research.cases import backward, mlp, relative


def case(shape=(5, 4), out=6, seed=0):
    f = mlp(shape[-1], out, seed)
    return f, torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], out, dtype=torch.float64)


def block_of(f, mode, **changes):
    return ZBPBlock(f, ZBPConfig(mode=mode, param_mode="none", **changes), name="layer")


def test_zero_is_zero_and_asks_nothing():
    f, x, v = case()
    block = block_of(f, "zero")
    assert backward(block, x, v).count_nonzero() == 0
    assert block.zbp.count.queries == block.zbp.count.exact_backwards == 0


def test_noise_has_each_sample_s_norm_and_no_direction():
    f, x, v = case((200, 3, 8))
    truth = torch.func.vjp(f, x)[1](v)[0].detach()
    block = block_of(f, "noise")
    first, second = backward(block, x, v), backward(block, x, v)
    for found in (first, second):
        assert torch.allclose(found.flatten(1).norm(dim=1), truth.flatten(1).norm(dim=1), rtol=1e-12)
        cosines = nn.functional.cosine_similarity(found.flatten(1), truth.flatten(1), dim=1)
        # Of 200 samples in 24 dimensions: mean 0 within (200 · 24)^-.5, root mean square 24^-.5.
        assert abs(float(cosines.mean())) <= 4 / (200 * 24) ** 0.5
        assert cosines.square().mean().sqrt() == pytest.approx(24**-0.5, rel=0.2)
    assert not torch.allclose(first, second)
    assert block.zbp.count.exact_backwards == 2


def test_captured_errors_are_exact_and_are_injected_in_turn_whatever_arrives():
    f, x, v = case()
    block = block_of(f, "capture")
    kept = [backward(block, x, factor * v) for factor in (1, -2)]
    assert relative(kept[1], dense_vjp(f, x, -2 * v)) <= 1e-10
    block.zbp.configure(block.zbp.config.replace(mode="replay"))
    injected = [backward(block, torch.randn_like(x), torch.randn_like(v)) for _ in range(3)]
    assert torch.equal(injected[0], kept[0]) and torch.equal(injected[1], kept[1])
    assert torch.equal(injected[2], kept[0])
    assert block.zbp.count.exact_backwards == 2 and block.zbp.count.queries == 0
    with pytest.raises(ValueError, match=r"has a gradient of shape \(5, 4\) in turn 3, .* is \(2, 4\)"):
        backward(block, x[:2], v[:2])


def test_replaying_before_capturing_is_refused():
    f, x, v = case()
    with pytest.raises(ValueError, match=r"the layer 'layer' has none: run set_mode\(model, 'capture'\)"):
        backward(block_of(f, "replay"), x, v)


@pytest.mark.parametrize(("shape", "coordinates"), [((5, 8), (2, 5)), ((3, 4, 8), (0, 8)), ((3, 4, 8), (7, 8))])
@pytest.mark.parametrize("chunk", [1, 7])
def test_slices_are_estimated_and_the_rest_is_exact(shape, coordinates, chunk):
    f, x, v = case(shape)
    a, b = coordinates
    truth = torch.func.vjp(f, x)[1](v)[0].detach()
    size = x[0].numel() // 8 * (b - a)
    whole = ZBPConfig(mode="slice", coordinates=coordinates, n_probes=size, eps=1e-4, probe_chunk=chunk)
    assert relative(estimate_vjp(f, x, v, whole), truth) <= 1e-6

    few = whole.replace(n_probes=max(1, size // 3), probe="rademacher")
    draws = torch.stack([estimate_vjp(f, x, v, few.replace(seed=s)) for s in range(150)])
    outside = torch.ones(8, dtype=torch.bool)
    outside[a:b] = False
    assert torch.allclose(draws[..., outside], truth[..., outside].expand(150, *truth[..., outside].shape))
    if size > 1:
        error = (draws - truth)[..., a:b].square().flatten(1).sum(1).mean()
        expected = (size - 1) / few.n_probes
        assert error / truth[..., a:b].square().sum() == pytest.approx(expected, rel=0.15)


def test_a_slice_says_that_it_ran_exact_backpropagation_and_takes_no_other_coordinates():
    f, x, v = case()
    block = block_of(f, "slice", coordinates=(0, 2), n_probes=2, eps=1e-3)
    backward(block, x, v)
    assert block.zbp.count.exact_backwards == 1 and block.zbp.count.queries == 4
    with pytest.raises(ValueError, match=r"coordinates=\(1, 5\), but the input of the layer 'layer' has 4 features"):
        backward(block_of(f, "slice", coordinates=(1, 5)), x, v)
    with pytest.raises(ValueError, match="mode='slice' estimates some features and no others"):
        backward(block_of(f, "slice"), x, v)


# --------------------------------------------------------------------------------------------------- all of a model


def test_every_mode_that_runs_exact_backpropagation_says_so_and_no_other_does():
    exact, others = {}, {}
    for mode in ("exact", "oracle", "noise", "capture", "slice", "cd", "skip", "fa", "dfa", "opzo", "zero"):
        model = tiny_text_model()
        columns = text_columns(model, 3, columns=1)
        apply_zbp(model, [-1], ZBPConfig(mode=mode, n_probes=2, eps=1e-2, coordinates=(0, 4)))
        model(copy_columns(columns)[0])["sentence_embedding"].sum().backward()
        [stats] = zbp_stats(model).values()
        (exact if stats["exact_backwards"] else others)[mode] = stats["exact_backwards"]
    assert exact == dict.fromkeys(("exact", "oracle", "noise", "capture", "slice"), 1)
    assert others.keys() == {"cd", "skip", "fa", "dfa", "opzo", "zero"}


def test_modes_are_switched_and_queries_counted_anew_while_the_cycle_of_probes_goes_on():
    model = tiny_text_model()
    columns = text_columns(model, 3, columns=1)
    apply_zbp(model, [0, 1], ZBPConfig(mode="fd", probe="hadamard_cycle", n_probes=3, eps=1e-2, param_mode="none"))

    def step():
        model.zero_grad()
        model(copy_columns(columns)[0])["sentence_embedding"].square().sum().backward()
        return model.get_submodule("0.model.embeddings.word_embeddings").weight.grad.clone()

    first, second = step(), step()
    assert total_queries(model) == 2 * 2 * 4
    reset_queries(model)
    assert total_queries(model) == 0
    assert all(stats["seconds"] == 0 and stats["backward_calls"] == 2 for stats in zbp_stats(model).values())
    third = step()
    assert total_queries(model) == 2 * 4
    # Another model that was never reset goes through the same rows.
    twin = tiny_text_model()
    apply_zbp(twin, [0, 1], ZBPConfig(mode="fd", probe="hadamard_cycle", n_probes=3, eps=1e-2, param_mode="none"))
    for expected in (first, second, third):
        twin.zero_grad()
        twin(copy_columns(columns)[0])["sentence_embedding"].square().sum().backward()
        assert torch.equal(twin.get_submodule("0.model.embeddings.word_embeddings").weight.grad, expected)

    set_mode(model, "zero")
    assert step().count_nonzero() == 0 and total_queries(model) == 2 * 4
    set_mode(model, "cd", n_probes=5, eps=None)
    step()
    assert total_queries(model) == 2 * 4 + 2 * 10, "what chooses a step is not among them"
    assert all(stats["calibration_queries"] > 0 for stats in zbp_stats(model).values())


def test_set_mode_changes_all_layers_or_none():
    model = tiny_text_model()
    with pytest.raises(ValueError, match=r"the model has none\. Call apply_zbp"):
        set_mode(model, "zero")
    apply_zbp(model, [0, 1], ZBPConfig(mode="cd"))
    with pytest.raises(ValueError, match="mode must be one of"):
        set_mode(model, "sideways")
    with pytest.raises(ValueError, match="n_probes must be at least 1"):
        set_mode(model, "fd", n_probes=0)
    assert {block.zbp.config.mode for block in model.modules() if hasattr(block, "zbp")} == {"cd"}
    set_mode(model, "dfa")
    assert model.error_tap is not None


def test_capturing_begins_anew_when_it_is_set_again():
    model = nn.Sequential(nn.Linear(3, 3), block_of(nn.Linear(3, 3), "capture"))
    for rows in (4, 2):
        set_mode(model, "capture")
        model(torch.randn(rows, 3)).sum().backward()
        assert sum(key.startswith("captured") for key in model[1].zbp.memory) == 1
        set_mode(model, "replay")
        model(torch.randn(rows, 3)).sum().backward()


def test_comparisons_leave_no_trace_in_what_modes_learn():
    model = nn.Sequential(nn.Linear(3, 3), block_of(nn.Linear(3, 3), "opzo"))
    set_mode(model, "opzo", opzo_decay=0.5)
    x = torch.randn(8, 3)
    model(x).sum().backward()
    before = dict(model[1].zbp.memory)
    found = compare_with_exact(model, lambda: model(x).square().sum().backward())
    after = model[1].zbp.memory
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert found["1"].queries == 1 and -1 <= found["1"].weight_cosine <= 1
