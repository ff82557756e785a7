"""FeatureGradientReplay: the gradients of plain autograd, honest bookkeeping, and nothing half done."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras.objectives import InfoNCE
from st_cached_extras.replay import FeatureGradientReplay, MiniBatchError, ReplayStateError
from st_cached_extras.testing.dense_rbf import DenseRBF
from st_cached_extras.testing.ranks import run_on_ranks

SIZES = (3, 2, 3)  # rows of the mini-batches; eight in all
ROWS = sum(SIZES)
BOUNDS = [0, 3, 5, 8]


class Generator(nn.Module):
    """Noise to features of two branches."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleDict({"image": nn.Linear(6, 3), "motion": nn.Linear(6, 4)})

    def forward(self, noise):
        hidden = torch.tanh(self.body(noise))
        return {"image": self.heads["image"](hidden), "motion": self.heads["motion"](hidden).view(-1, 2, 2)}


def noise_of(rank=0, dtype=torch.float64):
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(10 + rank), dtype=dtype)


def reference_of(rank=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(20 + rank)
    return {
        "image": torch.randn(5, 3, generator=generator, dtype=dtype),
        "motion": torch.randn(5, 2, 2, generator=generator, dtype=dtype),
    }


def make(b=ROWS, objective=None, **kwargs):
    objective = DenseRBF() if objective is None else objective
    return FeatureGradientReplay(
        objective,
        target_local_samples=ROWS,
        differentiated_local_samples=b,
        require_sample_id_alignment=False,
        **kwargs,
    )


def fill(replay, model, noise, reference=None, masks=None):
    for index, part in enumerate(noise.split(SIZES)):
        with torch.no_grad():
            features = model(part)
        share = None if reference is None else {name: x[index::3] for name, x in reference.items()}
        replay.add(features, share, selected=None if masks is None else masks.split(SIZES)[index])


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def plain_gradient(model, noise, reference, scale=1.0):
    model.zero_grad()
    features = model(noise)
    value = 0.0
    for name, x in features.items():
        x, r = x.flatten(1), reference[name].flatten(1)
        kernel = lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square())  # noqa: E731
        # cdist has no derivative at zero distance: the diagonal is constant.
        off = kernel(x, x).masked_fill(torch.eye(len(x), dtype=torch.bool), 0.0).sum() + len(x)
        value = value + off / len(x) ** 2 - 2 * kernel(x, r).mean() + kernel(r, r).mean()
    (scale * value).backward()
    return value.detach(), gradient_of(model)


def replayed_gradient(replay, model, noise, **kwargs):
    model.zero_grad()
    parts = noise.split(SIZES)
    replay.replay(lambda batch: model(parts[batch]), **kwargs)
    return gradient_of(model)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**10])
def test_a_replay_of_all_rows_is_plain_autograd(loss_scale):
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    value, expected = plain_gradient(model, noise, reference, loss_scale)
    replay = make(loss_scale=loss_scale)
    fill(replay, model, noise, reference)
    result = replay.finalize()
    assert torch.allclose(result.loss, value, rtol=1e-10)
    assert torch.allclose(result.optimized_loss, value * loss_scale, rtol=1e-10)
    assert torch.allclose(replayed_gradient(replay, model, noise), expected, rtol=1e-8, atol=1e-12 * loss_scale)


def test_synchronized_cotangents_want_nothing_more_from_a_trainer():
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay = make(b=3, loss_scale=4.0)
    fill(replay, model, noise, reference)
    result = replay.finalize()
    expected = replayed_gradient(replay, model, noise)
    model.zero_grad()
    for batch, cotangents in zip(result.replay_batch_indices, result.synchronized_cotangents, strict=True):
        features = model(noise.split(SIZES)[batch])
        torch.autograd.backward([features[name] for name in cotangents], list(cotangents.values()))
    assert torch.allclose(gradient_of(model), expected, rtol=1e-12)
    for local, synchronized in zip(result.local_cotangents, result.synchronized_cotangents, strict=True):
        assert all(torch.allclose(synchronized[k], local[k] * ROWS / 3 * 4.0) for k in local)


def draws(selection, model, noise, reference):
    """The gradient of every possible draw, its probability equal."""
    if selection == "mini_batches":
        choices = itertools.combinations(range(len(SIZES)), 2)  # round(3 x 5/8) of three
        for batches in choices:
            replay = make(b=5, selection="mini_batches")
            replay._draw = lambda count, drawn, batches=batches: torch.tensor(batches)
            fill(replay, model, noise, reference)
            yield replay, replayed_gradient_after(replay, model, noise)
        return
    for rows in itertools.combinations(range(ROWS), 3):
        mask = torch.zeros(ROWS, dtype=torch.bool)
        mask[list(rows)] = True
        replay = make(b=3)
        fill(replay, model, noise, reference, mask)
        yield replay, replayed_gradient_after(replay, model, noise)


def replayed_gradient_after(replay, model, noise):
    replay.finalize()
    return replayed_gradient(replay, model, noise)


@pytest.mark.parametrize("selection", ["rows", "mini_batches"])
def test_the_mean_over_all_draws_is_the_full_gradient_and_the_variance_that_of_the_formula(selection):
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    _, full = plain_gradient(model, noise, reference)
    found = torch.stack([gradient for _, gradient in draws(selection, model, noise, reference)])
    assert len(found) == (56 if selection == "rows" else 3)
    assert torch.allclose(found.mean(0), full, rtol=1e-8, atol=1e-10)
    units, drawn = (ROWS, 3) if selection == "rows" else (len(SIZES), 2)
    of_units = []
    for unit in range(units):
        mask = torch.zeros(ROWS, dtype=torch.bool)
        mask[[unit] if selection == "rows" else range(BOUNDS[unit], BOUNDS[unit + 1])] = True
        replay = make(b=int(mask.sum()))
        fill(replay, model, noise, reference, mask)
        of_units.append(replayed_gradient_after(replay, model, noise) * int(mask.sum()) / ROWS)
    of_units = torch.stack(of_units)
    spread = (of_units - of_units.mean(0)).square().sum() / (units - 1)
    variance = (found - full).square().sum(1).mean()
    assert variance.item() == pytest.approx((units * (units - drawn) / drawn * spread).item(), rel=1e-7)


def test_mini_batches_without_selected_rows_are_not_run_again():
    model, noise = Generator(), noise_of(dtype=torch.float32)
    replay = make(b=2, objective=DenseRBF(uses_reference=False), selection="suffix")
    fill(replay, model, noise)
    result = replay.finalize()
    assert replay.selected_rows.tolist() == [6, 7] and result.replay_batch_indices == (2,)
    ran = []
    replay.replay(lambda batch: ran.append(batch) or model(noise.split(SIZES)[batch]))
    assert ran == [2]
    assert all(not cotangent[0].any() and cotangent[1:].any() for cotangent in result.local_cotangents[0].values())


def test_a_contrastive_objective_and_its_learned_scale_are_replayed():
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(ROWS, 5, generator=generator) for name in ("anchor", "positive")}
    model = nn.Linear(5, 3)
    objective = InfoNCE(learnable_scale=True)
    replay = make(objective=objective, loss_scale=2.0)
    parts = [
        dict(zip(inputs, part, strict=True)) for part in zip(*(x.split(SIZES) for x in inputs.values()), strict=True)
    ]
    for part in parts:
        replay.add({name: model(x) for name, x in part.items()})
    result = replay.finalize()
    replay.replay(lambda batch: {name: model(x) for name, x in parts[batch].items()})
    assert objective.log_scale.grad.item() == pytest.approx(2.0 * result.parameter_cotangents["log_scale"].item())
    assert model.weight.grad.abs().sum() > 0


def test_the_result_counts_and_names_what_it_did():
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay = make(b=4, seed=7)
    ids = [tuple(f"clip-{row}" for row in range(*pair)) for pair in itertools.pairwise(BOUNDS)]
    for index, part in enumerate(noise.split(SIZES)):
        assert (
            replay.add(model(part), {name: x[index::3] for name, x in reference.items()}, sample_ids=ids[index])
            == index
        )
    result = replay.finalize()
    assert replay.finalize() is result
    assert (result.local_samples, result.global_samples, result.differentiated_samples) == (8, 8, 4)
    assert (result.reference_samples, result.world_size, result.world_factor) == (5, 1, 1)
    assert result.selection_weight == 2.0
    assert result.replay_sample_ids == tuple(ids[batch] for batch in result.replay_batch_indices)
    assert result.metadata["selection_seed"] == 7 and result.metadata["selection_step"] == 0
    assert all(isinstance(value, (int, float, str)) for value in result.metadata.values())


def test_commits_draw_anew_discards_draw_the_same_and_a_resumed_run_goes_on():
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay, drawn = make(b=3), []
    for _ in range(4):
        drawn.append(replay.selected_rows.tolist())
        fill(replay, model, noise, reference)
        replay.discard()
        assert replay.selected_rows.tolist() == drawn[-1]
        fill(replay, model, noise, reference)
        replay.finalize()
        replay.commit()
    assert len({tuple(rows) for rows in drawn}) > 1
    resumed = make(b=3)
    resumed.load_replay_state({"step": torch.tensor(2)})
    assert resumed.selected_rows.tolist() == drawn[2]
    assert replay.replay_state()["step"].item() == 4


# ------------------------------------------------------------------------------------------------- wrong calls


def features(rows=3, **changes):
    return {"image": torch.randn(rows, 3), "motion": torch.randn(rows, 2, 2), **changes}


def filled(**kwargs):
    replay = make(objective=DenseRBF(uses_reference=False), **kwargs)
    replay.add(features(3))
    return replay


NAN, INFINITE = torch.ones(2, 2, 2), torch.full((2, 3), float("inf"))
NAN[1, 0, 0] = float("nan")
BAD_FEATURES = {
    "a branch is missing": ({"image": torch.randn(2, 3)}, ValueError, "missing are motion"),
    "a branch is extra": (features(2, sound=torch.randn(2, 1)), ValueError, "not expected are sound"),
    "another geometry": (features(2, image=torch.randn(2, 4)), ValueError, r"must have the shape \[3\], got \[4\]"),
    "integers": (features(2, image=torch.ones(2, 3).long()), TypeError, "'image' must be a floating-point"),
    "no tensor": (features(2, image=[1.0]), TypeError, "'image' must be a floating-point tensor, got list"),
    "another dtype": (features(2, image=torch.randn(2, 3).double()), TypeError, "is torch.float64, and was"),
    "empty": (features(0), ValueError, "'image' is empty"),
    "NaN": (features(2, motion=NAN), ValueError, r"'motion' is not finite in row\(s\) 1\."),
    "infinity": (features(2, image=INFINITE), ValueError, r"'image' is not finite in row\(s\) 0, 1\."),
    "rows differ": (features(2, image=torch.randn(3, 3)), ValueError, "'motion' has 2 rows, and 'image' has 3"),
    "another device": (features(2, image=torch.empty(2, 3, device="meta")), ValueError, "is on meta, and the batch"),
    "too many": (features(6), ValueError, "holds 3 of 8 rows, and this mini-batch has 6"),
}


@pytest.mark.parametrize("case", BAD_FEATURES)
def test_a_mini_batch_that_does_not_fit_is_refused_and_leaves_no_trace(case):
    bad, error, message = BAD_FEATURES[case]
    replay = filled()
    with pytest.raises(error, match=message):
        replay.add(bad)
    assert replay.add(features(5)) == 1
    assert replay.finalize().local_samples == ROWS


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"selected": torch.ones(3, dtype=torch.bool)}, ValueError, "too many"),
        ({"selected": torch.ones(3)}, TypeError, r"selected must be a bool tensor \[3\]"),
        ({"sample_ids": ["a", "b"]}, ValueError, "got 2 for 3 rows"),
        ({"sample_ids": ["a", "", "c"]}, ValueError, r"sample_ids is empty in row\(s\) 1"),
        ({"sample_ids": "abc"}, TypeError, "sequence of strings"),
        ({"reference_features": features(2)}, ValueError, "uses no current reference"),
    ],
)
def test_bad_masks_ids_and_references_are_refused(kwargs, error, message):
    replay = make(b=2, objective=DenseRBF(uses_reference=False))
    with pytest.raises(error, match=message):
        replay.add(features(3), **kwargs)
    assert replay.add(features(3)) == 0


def test_ids_of_features_and_reference_must_be_there_and_in_step():
    replay = FeatureGradientReplay(DenseRBF(), target_local_samples=4, differentiated_local_samples=4)
    with pytest.raises(ValueError, match="needs reference_features"):
        replay.add(features(2))
    with pytest.raises(ValueError, match="reference_sample_ids is missing"):
        replay.add(features(2), features(2), sample_ids=["a", "b"])
    with pytest.raises(ValueError, match="out of step from row 1 on: 'b' and 'c'"):
        replay.add(features(2), features(2), sample_ids=["a", "b"], reference_sample_ids=["a", "c"])
    with pytest.raises(ValueError, match="reference_features: branch 'image' is not finite"):
        bad = features(2, image=torch.full((2, 3), float("nan")))
        replay.add(features(2), bad, sample_ids=["a", "b"], reference_sample_ids=["a", "b"])
    assert replay.add(features(2), features(2), sample_ids=["a", "b"], reference_sample_ids=["a", "b"]) == 0


def test_masks_are_for_all_mini_batches_or_for_none_and_as_many_as_announced():
    replay = make(b=4, objective=DenseRBF(uses_reference=False))
    replay.add(features(4), selected=torch.tensor([True, False, True, False]))
    with pytest.raises(ValueError, match="for all mini-batches of a batch, or for none"):
        replay.add(features(4))
    replay.add(features(4), selected=torch.tensor([True, False, False, False]))
    with pytest.raises(ValueError, match="masks select 3 rows, and differentiated_local_samples is 4"):
        replay.finalize()


def test_calls_in_the_wrong_state_are_refused_and_change_nothing():
    replay = filled()
    for call in (replay.commit, lambda: replay.replay(lambda batch: features())):
        with pytest.raises(ReplayStateError, match=r"still being collected; finalize\(\) it first"):
            call()
    with pytest.raises(ValueError, match="holds 3 of 8 rows"):
        replay.finalize()
    with pytest.raises(ReplayStateError, match="wants an empty batch"):
        replay.load_replay_state({"step": torch.tensor(3)})
    replay.add(features(5))
    replay.finalize()
    with pytest.raises(ReplayStateError, match=r"finalized; commit\(\) or discard\(\) it first"):
        replay.add(features(1))
    replay.commit()
    assert replay.step == 1 and replay.add(features(2)) == 0


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"target_local_samples": 0}, ValueError, "target_local_samples must be at least 1"),
        ({"differentiated_local_samples": 9}, ValueError, "at most target_local_samples, got 9 of 8"),
        ({"differentiated_local_samples": 1.5}, TypeError, "must be a number of rows"),
        ({"selection": "best"}, ValueError, "selection must be one of"),
    ],
)
def test_bad_arguments_are_named(kwargs, error, message):
    arguments = {"target_local_samples": 8, "differentiated_local_samples": 2, **kwargs}
    with pytest.raises(error, match=message):
        FeatureGradientReplay(DenseRBF(), **arguments)


# ------------------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("failure", [ValueError("no data"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_a_producer_that_fails_leaves_the_batch_to_be_replayed_again(failure):
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay = make()
    fill(replay, model, noise, reference)
    result = replay.finalize()
    expected = replayed_gradient(replay, model, noise)

    def producer(batch):
        if batch == 1:
            raise failure
        return model(noise.split(SIZES)[batch])

    if isinstance(failure, Exception):
        with pytest.raises(
            MiniBatchError, match=f"Mini-batch 1 could not be run again: {type(failure).__name__}"
        ) as info:
            replay.replay(producer)
        assert info.value.__cause__ is failure
    else:
        with pytest.raises(KeyboardInterrupt):
            replay.replay(producer)
    assert replay.finalize() is result
    assert torch.equal(replayed_gradient(replay, model, noise), expected)


def test_features_that_come_back_in_another_shape_are_named_by_mini_batch():
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay = make()
    fill(replay, model, noise, reference)
    replay.finalize()
    with pytest.raises(
        MiniBatchError, match=r"Mini-batch 1 .* branch 'image' came back as \[3, 3\], .* added as \[2, 3\]"
    ):
        replay.replay(lambda batch: model(noise[:3]))


@pytest.mark.parametrize("failure", [MemoryError(), KeyboardInterrupt()])
def test_an_objective_that_fails_leaves_the_batch_collected(failure):
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay = make()
    fill(replay, model, noise, reference)
    compute = replay.objective.value_and_cotangents

    def fail(*args, **kwargs):
        raise failure

    replay.objective.value_and_cotangents = fail
    with pytest.raises(type(failure)):
        replay.finalize()
    replay.objective.value_and_cotangents = compute
    assert replay.finalize().local_samples == ROWS


def test_offloading_changes_no_gradient_and_a_failed_one_nothing(monkeypatch):
    model, noise, reference = Generator().double(), noise_of(), reference_of()
    replay = make()
    fill(replay, model, noise, reference)
    replay.offload_to_cpu()
    replay.finalize()
    expected = replayed_gradient(replay, model, noise)
    collection, result = replay._collection, replay._result
    calls = []

    def fails_later(x):
        calls.append(x)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("no memory")
        return x.clone()

    for module in ("protocol", "collection"):
        monkeypatch.setattr(f"st_cached_extras.replay.{module}.to_cpu", fails_later)
    with pytest.raises(torch.OutOfMemoryError):
        replay.offload_to_cpu()
    assert replay._collection is collection and replay._result is result
    monkeypatch.undo()
    replay.offload_to_cpu()
    assert torch.equal(replayed_gradient(replay, model, noise), expected)


def test_features_are_held_once_and_detached():
    replay = make(objective=DenseRBF(uses_reference=False))
    mine = features(3, image=torch.randn(3, 3, requires_grad=True) * 1.0)
    replay.add(mine)
    held = replay._collection.features["image"]
    assert not held.requires_grad and held.untyped_storage().nbytes() == ROWS * 3 * 4
    mine["image"].data.zero_()
    assert held.any(), "a producer may use its buffers again"


# ------------------------------------------------------------------------------------------------------- ranks


def replay_on_ranks(by_hand: bool) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Generator()
    wrapped = DistributedDataParallel(model)
    replay = make(b=4, objective=DenseRBF(), seed=3)
    noise, reference = noise_of(rank, torch.float32), reference_of(rank, torch.float32)
    fill(replay, model, noise, reference)
    result = replay.finalize()
    parts = noise.split(SIZES)
    if by_hand:
        pairs = list(zip(result.replay_batch_indices, result.synchronized_cotangents, strict=True))
        for index, (batch, cotangents) in enumerate(pairs):
            wrapped.require_backward_grad_sync = index == len(pairs) - 1
            out = wrapped(parts[batch])
            torch.autograd.backward([out[name] for name in cotangents], list(cotangents.values()))
    else:
        replay.replay(lambda batch: wrapped(parts[batch]), model=wrapped)

    # One process: all features, their cotangents, of which each rank's selected rows count B/b.
    truth = Generator()
    everyone = truth(torch.cat([noise_of(r, torch.float32) for r in range(world)]))
    leaves = {name: x.detach().requires_grad_() for name, x in everyone.items()}
    references = [reference_of(r, torch.float32) for r in range(world)]
    value = DenseRBF().value_and_cotangents(
        leaves, reference={name: torch.cat([r[name] for r in references]) for name in leaves}
    )
    weight = torch.zeros(world * ROWS)
    for r in range(world):
        replay.world.rank = r
        weight[replay._draw(ROWS, 4) + r * ROWS] = ROWS / 4
    for name, x in everyone.items():
        shape = (-1, *[1] * (x.ndim - 1))
        x.backward(value.cotangents[name] * weight.view(shape), retain_graph=True)
    expected = gradient_of(truth)
    assert result.world_factor == world and result.global_samples == world * ROWS
    return float((gradient_of(model) - expected).norm() / expected.norm())


@pytest.mark.parametrize("by_hand", [True, False])
def test_two_ranks_under_ddp_equal_one_process(by_hand):
    assert max(run_on_ranks(replay_on_ranks, 2, by_hand)) <= 1e-6


def incomplete_on_rank_one() -> str:
    replay = make(objective=DenseRBF(uses_reference=False))
    replay.add(features(3 if dist.get_rank() else ROWS))
    try:
        replay.finalize()
    except RuntimeError as error:
        message = str(error)
    replay.discard()
    replay.add(features(ROWS))
    replay.finalize()
    return message


def test_an_incomplete_rank_is_named_on_all():
    for message in run_on_ranks(incomplete_on_rank_one, 2):
        assert "rank 1: ValueError: The batch is incomplete: it holds 3 of 8 rows" in message
