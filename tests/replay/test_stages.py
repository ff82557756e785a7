"""Staged replay: the gradients of one backward through everything, with the graph of one mini-batch of one stage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras.replay import FeatureGradientReplay, ParityError, Stage, Staged
from st_cached_extras.testing.dense_rbf import DenseRBF
from st_cached_extras.testing.ranks import run_on_ranks

ROWS, SIZES = 8, (3, 3, 2)


class Generator(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6))

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            return self.net(x)
        return self.net(x["noise"]) + 0.1 * x["label"][:, None]


def decoder(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(dropout), nn.GELU(), nn.Unflatten(1, (3, 4)))


def encoders() -> dict[str, nn.Module]:
    return {
        "flat": nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh()),
        "tokens": nn.Sequential(nn.Linear(4, 7), nn.SiLU()),
    }


def make(dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0):
    """Generator, decoder and encoders; all of the last two trainable, so that a test sees what reaches them."""
    torch.manual_seed(seed)
    parts = Generator(dropout).to(dtype), decoder(dropout).to(dtype), nn.ModuleDict(encoders()).to(dtype)
    return parts


def stages_of(parts, frozen: bool = False, sizes=(None, None, None)) -> list[Stage]:
    generator, decode, encode = parts
    return [
        Stage("generator", generator, sizes[0]),
        Stage("decoder", decode, sizes[1], frozen),
        Stage("encoders", dict(encode), sizes[2], frozen),
    ]


def end_to_end(parts, x):
    generator, decode, encode = parts
    clip = decode(generator(x))
    return {name: encoder(clip) for name, encoder in encode.items()}


def cotangents_like(features, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in features.items()}


def dot(features, cotangents):
    return sum((features[name] * cotangents[name]).sum() for name in features)


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def noise(dtype=torch.float64, rows=ROWS, seed=1):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_close(found, expected, tolerance):
    assert (found - expected).norm() / expected.norm() <= tolerance


# ------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("sizes", [(None, None, None), (8, 3, 2), (1, 8, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
def test_staged_equals_one_backward_through_everything(sizes, dtype, tolerance, seed):
    parts, expected_parts = make(dtype=dtype, seed=seed), make(dtype=dtype, seed=seed)
    x, expected_x = (noise(dtype, seed=seed).requires_grad_() for _ in range(2))
    expected = end_to_end(expected_parts, expected_x)
    cotangents = cotangents_like(expected)
    dot(expected, cotangents).backward()

    first = Staged(*stages_of(parts, sizes=sizes)).collect(x)
    features = first.replay()
    for name in expected:
        assert not first.features[name].requires_grad
        assert_close(features[name], expected[name].detach(), tolerance)
    dot(features, cotangents).backward()
    for part, expected_part in zip(parts, expected_parts, strict=True):
        assert_close(gradients(part), gradients(expected_part), tolerance)
    assert_close(x.grad, expected_x.grad, tolerance)


def test_inputs_by_name_with_labels_that_have_no_gradient():
    parts, expected_parts = make(), make()
    x = {"noise": noise(), "label": torch.arange(ROWS) % 3}
    expected = end_to_end(expected_parts, x)
    cotangents = cotangents_like(expected)
    dot(expected, cotangents).backward()
    dot(Staged(*stages_of(parts)).collect(x).replay(), cotangents).backward()
    assert_close(gradients(parts[0]), gradients(expected_parts[0]), 1e-12)


def test_a_value_of_several_tensors_may_pass_between_stages():
    parts, expected_parts = make(), make()
    split = lambda x: {"low": x[:, :3], "high": x[:, 3:], "row": torch.arange(len(x))}  # noqa: E731
    join = lambda x: torch.cat([x["low"], 2 * x["high"]], 1)  # noqa: E731
    generator, decode, encode = expected_parts
    clip = decode(join(split(generator(noise()))))
    expected = {name: encoder(clip) for name, encoder in encode.items()}
    cotangents = cotangents_like(expected)
    dot(expected, cotangents).backward()
    first, *rest = stages_of(parts)
    staged = Staged(first, ("split", split), ("join", join), *rest)
    dot(staged.collect(noise()).replay(), cotangents).backward()
    assert_close(gradients(parts[0]), gradients(expected_parts[0]), 1e-12)


@pytest.mark.parametrize("selection", ["rows", "mini_batches", "suffix"])
@pytest.mark.parametrize("differentiated", [3, ROWS])
def test_through_the_protocol_it_gives_the_gradient_of_the_selected_rows(selection, differentiated):
    parts, expected_parts = make(), make()
    staged = Staged(*stages_of(parts, frozen=True, sizes=(None, 2, 1)))
    replay = FeatureGradientReplay(
        DenseRBF(uses_reference=False),
        target_local_samples=ROWS,
        differentiated_local_samples=differentiated,
        selection=selection,
    )
    passes = [staged.collect(part) for part in noise().split(SIZES)]
    for one in passes:
        replay.add(one.features)
    result = replay.finalize()
    replay.replay(lambda index: passes[index].replay())

    features = end_to_end(expected_parts, noise())
    injected = {name: torch.zeros_like(x).split(SIZES) for name, x in features.items()}
    for index, cotangents in zip(result.replay_batch_indices, result.synchronized_cotangents, strict=True):
        for name, cotangent in cotangents.items():
            injected[name][index].copy_(cotangent)
    dot(features, {name: torch.cat(parts) for name, parts in injected.items()}).backward()
    assert_close(gradients(parts[0]), gradients(expected_parts[0]), 1e-12)


# -------------------------------------------------------------------------------------------------- randomness


def test_stochastic_stages_draw_the_same_numbers_again_in_every_mini_batch():
    parts = make(dropout=0.5)
    staged = Staged(*stages_of(parts, sizes=(2, 3, None)), tolerance=1e-12)
    torch.manual_seed(3)
    first = staged.collect(noise())
    state = torch.get_rng_state()
    torch.rand(7)  # the stream has moved on when the backward comes
    outside = torch.get_rng_state()
    dot(first.replay(), cotangents_like(first.features)).backward()
    assert torch.equal(torch.get_rng_state(), outside)

    # By hand: every mini-batch of the generator draws its mask, then every one of the decoder.
    expected_parts = make(dropout=0.5)
    torch.manual_seed(3)
    latents = torch.cat([expected_parts[0](part) for part in noise().split(2)])
    clips = torch.cat([expected_parts[1](part) for part in latents.split(3)])
    assert torch.equal(torch.get_rng_state(), state)
    expected = {name: encoder(clips) for name, encoder in expected_parts[2].items()}
    dot(expected, cotangents_like(expected)).backward()
    for part, expected_part in zip(parts, expected_parts, strict=True):
        assert_close(gradients(part), gradients(expected_part), 1e-12)


def test_autocast_of_the_first_pass_holds_in_the_second():
    parts = make(dtype=torch.float32)
    staged = Staged(*stages_of(parts), tolerance=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        first = staged.collect(noise(torch.float32))
    assert first.features["tokens"].dtype == torch.bfloat16
    features = first.replay()
    dot(features, cotangents_like(features)).backward()
    assert gradients(parts[0]).isfinite().all()


# ------------------------------------------------------------------------------------------------ frozen stages


def test_frozen_stages_hand_gradients_on_and_keep_none():
    parts, expected_parts = make(), make()
    expected = end_to_end(expected_parts, noise())
    cotangents = cotangents_like(expected)
    dot(expected, cotangents).backward()
    dot(Staged(*stages_of(parts, frozen=True)).collect(noise()).replay(), cotangents).backward()
    assert_close(gradients(parts[0]), gradients(expected_parts[0]), 1e-12)
    assert all(p.grad is None for part in parts[1:] for p in part.parameters())
    assert all(p.requires_grad for part in parts[1:] for p in part.parameters())


def test_a_frozen_first_stage_is_left_alone():
    parts = make()
    parts[0].requires_grad_(False)
    expected_parts = make()
    cotangents = cotangents_like(end_to_end(parts, noise()))
    dot(end_to_end(expected_parts, noise()), cotangents).backward()
    dot(Staged(*stages_of(parts)).collect(noise()).replay(), cotangents).backward()
    assert all(p.grad is None for p in parts[0].parameters())
    assert_close(gradients(parts[1]), gradients(expected_parts[1]), 1e-12)


def test_a_stage_that_cuts_the_graph_is_named():
    generator, decode, encode = make()
    cut = Staged(("generator", generator), ("codec", lambda x: decode(x.detach())), ("encoders", dict(encode)))
    features = cut.collect(noise()).replay()
    with pytest.raises(ValueError, match=r"'codec' is not differentiable in its input.*detach"):
        dot(features, cotangents_like(features)).backward()


# ------------------------------------------------------------------------------------------------------ parity


def change_weights(parts):
    with torch.no_grad():
        next(parts[1].parameters()).add_(0.5)


def change_mode(parts):
    parts[1].eval()


def change_encoder(parts):
    with torch.no_grad():
        next(parts[2]["tokens"].parameters()).add_(0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_weights, "Stage 'decoder'"),
        (change_mode, "Stage 'decoder'"),
        (change_encoder, "Stage 'encoders', branch 'tokens',"),
    ],
)
def test_a_stage_that_changed_between_the_passes_is_named_before_it_hands_on_a_gradient(change, named):
    parts = make(dropout=0.3)
    first = Staged(*stages_of(parts)).collect(noise())
    change(parts)
    with pytest.raises(ParityError, match=f"{named} computed something else when it ran again"):
        dot(first.replay(), cotangents_like(first.features)).backward()
    assert all(p.grad is None for p in parts[0].parameters())


def test_random_numbers_from_outside_of_torch_break_parity_and_an_infinite_tolerance_compares_nothing():
    generator, decode, encode = make()
    calls = iter(range(100))

    def stages():
        return ("generator", generator), ("noisy", lambda x: decode(x) + next(calls)), ("encoders", dict(encode))

    first = Staged(*stages()).collect(noise())
    with pytest.raises(ParityError, match="'noisy'"):
        dot(first.replay(), cotangents_like(first.features)).backward()
    first = Staged(*stages(), tolerance=math.inf).collect(noise())
    dot(first.replay(), cotangents_like(first.features)).backward()


# ------------------------------------------------------------------------------------------------------ memory


class CountedGraphs(nn.Module):
    """Counts the bytes that autograd holds for a stage, and with whom they are held at the same time."""

    def __init__(self, name: str, stage: nn.Module, live: dict[str, int], seen: list[dict[str, int]]) -> None:
        super().__init__()
        self.name, self.stage, self.live, self.seen = name, stage, live, seen

    def forward(self, x):
        class Held:
            def __init__(held, tensor):
                held.tensor, held.size = tensor.detach(), tensor.numel()  # an output would hold itself
                self.live[self.name] = self.live.get(self.name, 0) + held.size
                self.seen.append(dict(self.live))

            def __del__(held):
                self.live[self.name] -= held.size

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            return self.stage(x)


def test_one_mini_batch_of_one_stage_has_a_graph_at_any_time():
    generator, decode, encode = make()
    live, seen = {}, []
    counted = [CountedGraphs(name, stage, live, seen) for name, stage in (("g", generator), ("d", decode))]
    branches = {name: CountedGraphs(name, encoder, live, seen) for name, encoder in encode.items()}

    clip = counted[1](counted[0](noise()))
    features = {name: encoder(clip) for name, encoder in branches.items()}
    whole = max(seen, key=lambda one: sum(one.values()))
    assert all(whole[name] > 0 for name in ("g", "d", "flat", "tokens"))
    del clip, features
    seen.clear()

    stages = Stage("g", counted[0], 2), Stage("d", counted[1], 2), Stage("e", branches, 2)
    first = Staged(*stages).collect(noise())
    assert not seen
    features = first.replay()
    assert not seen
    dot(features, cotangents_like(features)).backward()
    assert {name for one in seen for name, size in one.items() if size} == set(whole)
    for one in seen:
        assert sum(size > 0 for size in one.values()) == 1
    for name, size in whole.items():
        # A quarter of the rows, and at most the stage's weights besides.
        assert max(one.get(name, 0) for one in seen) < 0.75 * size


def test_rows_that_are_not_replayed_keep_nothing_but_their_features():
    first = Staged(*stages_of(make())).collect(noise(), replayed=False)
    assert {name: len(x) for name, x in first.features.items()} == {"flat": ROWS, "tokens": ROWS}
    assert len(first._values) == 1
    with pytest.raises(ValueError, match="collect them with replayed=True"):
        first.replay()


def test_a_module_says_its_own_mini_batch_size():
    seen = []

    class Sized(nn.Linear):
        mini_batch_size = 3

        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    staged = Staged(("one", Sized(4, 4)), Stage("two", Sized(4, 4), 8))
    staged.collect(noise(torch.float32))
    assert seen == [3, 3, 2, 8]


# ------------------------------------------------------------------------------------------------------- ranks


def distributed_gradient(rows):
    rank = torch.distributed.get_rank()
    parts = make()
    wrapped = DistributedDataParallel(parts[0])
    staged = Staged(*stages_of((wrapped, *parts[1:]), frozen=True, sizes=(2, 3, 1)))
    own = noise(rows=sum(rows)).split(rows)[rank]
    replay = FeatureGradientReplay(
        DenseRBF(uses_reference=False), target_local_samples=len(own), differentiated_local_samples=len(own)
    )
    for _ in range(2):  # the second step finds the reducer as the first left it
        wrapped.zero_grad()
        passes = [staged.collect(part) for part in own.split(2)]
        for one in passes:
            replay.add(one.features)
        replay.finalize()
        replay.replay(lambda index: passes[index].replay(), model=wrapped)  # noqa: B023
        replay.commit()
    return gradients(parts[0]).numpy()


@pytest.mark.parametrize("rows", [(4, 4), (3, 5)])
def test_two_ranks_under_ddp_equal_one_process(rows):
    parts = make()
    features = end_to_end(parts, noise())
    result = DenseRBF(uses_reference=False).value_and_cotangents({name: x.detach() for name, x in features.items()})
    dot(features, result.cotangents).backward()
    first, second = map(torch.from_numpy, run_on_ranks(distributed_gradient, 2, rows))
    assert torch.equal(first, second)
    assert_close(first, gradients(parts[0]), 1e-12)


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        ([], ValueError, "at least one stage"),
        ([("a", nn.Identity()), ("a", nn.Identity())], ValueError, "a name of its own"),
        ([("a", 3)], TypeError, "Stage 'a' must be a callable or a mapping of callables"),
        ([("a", {})], TypeError, "Stage 'a' must be a callable"),
        ([Stage("a", nn.Identity(), 0)], ValueError, "Stage 'a': mini_batch_size must be a number of rows, got 0"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages, error, message):
    with pytest.raises(error, match=message):
        Staged(*stages)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan])
def test_a_tolerance_must_be_above_zero(tolerance):
    with pytest.raises(ValueError, match="tolerance"):
        Staged(("a", nn.Identity()), tolerance=tolerance)


def test_a_stage_that_loses_rows_or_returns_no_tensor_is_named():
    with pytest.raises(ValueError, match=r"Stage 'half' was given 8 rows, and returned \[4, 4\]"):
        Staged(("half", lambda x: x[::2])).collect(noise())
    with pytest.raises(TypeError, match=r"Stage 'e', branch 'x', must return tensors, got dict"):
        Staged(("e", {"x": lambda x: {"y": x}})).collect(noise())
