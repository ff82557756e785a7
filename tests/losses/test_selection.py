"""Selected rows: unbiased exactly, with the variance of the formula; never embedded twice where not selected."""

import copy
import itertools

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.replay.selection import check_differentiated, count_differentiated, draw_rows
from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import copy_columns, gradients, text_columns, tiny_text_model, to_float64
from tests.distributed import ddp_cases

ROWS, SELECTED = 8, 3
SUBSETS = list(itertools.combinations(range(ROWS), SELECTED))


def flat_gradient(loss, columns, rows=None):
    if rows is not None:
        inner = loss.loss if isinstance(loss, MatryoshkaLoss) else loss
        inner.select_rows = lambda count, rank: torch.tensor(rows)
    loss.zero_grad()
    loss(copy_columns(columns), None).backward()
    return torch.cat([g.flatten() for name, g in sorted(gradients(loss.model).items())])


def make(columns=2, dropout=0.0, **kwargs):
    model = tiny_text_model(hidden=8, layers=1, dropout=dropout)
    model, inputs = to_float64(model, text_columns(model, ROWS, columns))
    return CachedInfoNCELoss(model, mini_batch_size=2, scale=5.0, **kwargs), inputs


@pytest.mark.parametrize("matryoshka", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}]
)
def test_the_mean_over_all_draws_is_the_full_gradient_and_the_variance_that_of_the_formula(options, matryoshka):
    loss, columns = make(3, **options)
    wrapped = MatryoshkaLoss(loss.model, loss, [8, 4]) if matryoshka else loss
    full = flat_gradient(wrapped, columns)
    loss.differentiated_samples = SELECTED
    draws = torch.stack([flat_gradient(wrapped, columns, subset) for subset in SUBSETS])
    of_rows = torch.stack([flat_gradient(wrapped, columns, [row]) / ROWS for row in range(ROWS)])
    assert torch.allclose(of_rows.sum(0), full, rtol=1e-10, atol=1e-12)
    assert torch.allclose(draws.mean(0), full, rtol=1e-10, atol=1e-12)
    spread = (of_rows - of_rows.mean(0)).square().sum() / (ROWS - 1)
    variance = (draws - full).square().sum(1).mean()
    assert variance.item() == pytest.approx((ROWS * (ROWS - SELECTED) / SELECTED * spread).item(), rel=1e-10)
    assert variance > 1e-3 * full.square().sum(), "a selection that changes nothing proves nothing"
    for mutant in (SELECTED / ROWS, ROWS / SELECTED):  # without the weight, and with it twice
        assert not torch.allclose(mutant * draws.mean(0), full, rtol=0.1)


def test_all_rows_selected_are_the_full_gradient_bit_for_bit():
    loss, columns = make()
    full = flat_gradient(loss, columns)
    for everything in (ROWS, ROWS + 5, 1.0):
        loss.differentiated_samples = everything
        assert torch.equal(flat_gradient(loss, columns), full)


def test_a_fixed_suffix_of_sorted_rows_is_biased():
    loss, columns = make()
    order = columns[1]["attention_mask"].sum(1).argsort()
    columns = [{k: v[order] if torch.is_tensor(v) else v for k, v in column.items()} for column in columns]
    full = flat_gradient(loss, columns)
    loss.differentiated_samples = SELECTED
    suffix = flat_gradient(loss, columns, range(ROWS - SELECTED, ROWS))
    assert (suffix - full).norm() > 0.05 * full.norm()


def test_rows_that_are_not_selected_are_embedded_once():
    loss, columns = make(differentiated_samples=3)
    seen = []
    loss.model[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0]["input_ids"])))
    value = loss(copy_columns(columns), None)
    collected = list(seen)
    assert sorted(collected) == sorted(2 * [2, 1, 2, 2, 1])  # three selected rows and five others, per column
    value.backward()
    assert sorted(seen[len(collected) :]) == [1, 1, 2, 2]


def test_dropout_is_replayed_for_the_selected_rows():
    loss, columns = make(dropout=0.3, differentiated_samples=3)
    seen = []
    loss.model.register_forward_hook(lambda module, args, out: seen.append(out["sentence_embedding"].detach().clone()))
    value = loss(copy_columns(columns), None)
    collected = list(seen)
    value.backward()
    for replayed in seen[len(collected) :]:
        assert any(x.shape == replayed.shape and torch.equal(x, replayed) for x in collected)


def test_every_training_forward_draws_anew_and_evaluation_does_not_count():
    loss, columns = make(differentiated_samples=3)
    drawn = []
    select = loss.select_rows
    loss.select_rows = lambda count, rank: drawn.append(select(count, rank)) or drawn[-1]
    for _ in range(3):
        loss(copy_columns(columns), None)
        with torch.no_grad():
            loss(copy_columns(columns), None)
    assert len(drawn) == 3 and len({tuple(rows.tolist()) for rows in drawn}) > 1
    assert loss.selection_step == 3

    resumed, _ = make(differentiated_samples=3)
    resumed.load_replay_state({"selection_step": torch.tensor(1)})
    assert torch.equal(resumed.select_rows(ROWS, 0), drawn[1])
    assert not torch.equal(resumed.select_rows(ROWS, 0), draw_rows(ROWS, 3, seed=1, step=1, rank=0))


def test_draws_are_uniform_without_replacement_and_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    draws = [draw_rows(5, 2, seed=0, step=step, rank=0) for step in range(4000)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(len(set(rows.tolist())) == 2 and rows.tolist() == sorted(rows.tolist()) for rows in draws)
    pairs = torch.zeros(5, 5)
    for first, second in draws:
        pairs[first, second] += 1
    counts = pairs[pairs > 0]
    assert len(counts) == 10
    # Each of ten pairs is expected 400 times, standard deviation 19: beyond 5 of them once in a million tests.
    assert (counts - 400).abs().max() < 95


@pytest.mark.parametrize(
    ("given", "count", "expected"), [(None, 7, 7), (3, 7, 3), (9, 7, 7), (0.5, 8, 4), (1.0, 7, 7), (0.01, 7, 1)]
)
def test_a_number_or_a_share_of_rows_is_counted(given, count, expected):
    assert count_differentiated(given, count) == expected


@pytest.mark.parametrize(
    ("given", "error"), [(0, ValueError), (-1, ValueError), (0.0, ValueError), (1.5, ValueError), ("3", TypeError)]
)
def test_what_is_neither_is_refused_by_name(given, error):
    with pytest.raises(error, match="differentiated_samples must be"):
        check_differentiated("differentiated_samples", given)
    with pytest.raises(error, match="differentiated_samples must be"):
        CachedInfoNCELoss(tiny_text_model(), differentiated_samples=given)


def test_it_is_in_the_configuration_and_the_state():
    loss, _ = make(differentiated_samples=0.25)
    assert loss.get_config_dict()["differentiated_samples"] == 0.25
    assert loss.replay_state()["selection_step"].item() == 0
    assert make()[0].replay_state() == {}


def selected_step_on_ranks(gather: bool) -> float:
    """Relative error of a step with selected rows under DDP, against the same rows in one process."""
    import torch.distributed as dist
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from torch.nn.parallel import DistributedDataParallel

    case = ddp_cases.Case(rows=(9, 6), gather=gather)
    world, rank, b = dist.get_world_size(), dist.get_rank(), 4
    model = ddp_cases.make_model(case)
    truth = copy.deepcopy(model)
    loss = CachedInfoNCELoss(model, mini_batch_size=3, gather_across_devices=gather, differentiated_samples=b)
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    loss(ddp_cases.make_columns(case, model, [rank], 0), None).backward()

    # In one process: d loss / d embeddings of all rows, of which only the selected ones are propagated, times B/b.
    plain: nn.Module = MultipleNegativesRankingLoss(truth)
    groups = [list(range(world))] if gather else [[r] for r in range(world)]
    for group in groups:
        columns = ddp_cases.make_columns(case, truth, group, 0)
        embeddings = [truth(column)["sentence_embedding"] for column in columns]
        leaves = [x.detach().requires_grad_() for x in embeddings]
        (plain.compute_loss_from_embeddings(leaves, None) / len(groups)).backward()
        weights = []
        for r in group:
            weight = torch.zeros(case.rows[r])
            weight[draw_rows(case.rows[r], b, seed=0, step=0, rank=r)] = case.rows[r] / b
            weights.append(weight)
        weight = torch.cat(weights)[:, None]
        torch.autograd.backward(embeddings, [leaf.grad * weight for leaf in leaves])
    found, expected = gradients(model), gradients(truth)
    difference = sum((found[name] - expected[name]).square().sum() for name in expected)
    return float((difference / sum(g.square().sum() for g in expected.values())).sqrt())


@pytest.mark.parametrize("gather", [True, False])
def test_two_ranks_with_selected_rows_equal_one_process(gather):
    assert max(run_on_ranks(selected_step_on_ranks, 2, gather)) <= 2e-6
