"""Distances between samples and an evaluator's figures are those of their definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor, nn

from st_cached_extras.encoders import FrozenEncoder
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference

SCRIPTS = Path(__file__).parents[2] / "training_scripts"


@pytest.fixture(autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(SCRIPTS))
        yield


def sample(rows: int, dim: int, seed: int) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def drawn(rows: tuple[int, int], dim: int, directions: int, seed: int) -> tuple[list[Tensor], np.ndarray]:
    """Which rows of each sample are compared, and the unit vectors [directions, D], as the seed draws them."""
    rng = torch.Generator().manual_seed(seed)
    kept = [torch.randperm(count, generator=rng)[: min(rows)] for count in rows]
    vectors = torch.randn(dim, directions, generator=rng).double().numpy()
    return kept, (vectors / np.linalg.norm(vectors, axis=0)).T


# ------------------------------------------------------------------------------------------- sliced Wasserstein


@pytest.mark.parametrize(("rows", "dim", "directions", "seed"), [(40, 1, 3, 0), (25, 3, 16, 1), (60, 7, 256, 2)])
def test_of_a_sample_and_its_shift_it_is_the_mean_length_of_the_shift_along_the_directions(
    rows, dim, directions, seed
):
    from generator_evaluation import sliced_wasserstein

    a, shift = sample(rows, dim, seed), 2 * sample(1, dim, 50 + seed)
    _, vectors = drawn((rows, rows), dim, directions, seed)
    expected = np.abs(vectors @ shift[0].double().numpy()).mean()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(9))
    found = sliced_wasserstein(a, (a + shift)[order], directions, seed)
    assert found == pytest.approx(expected, rel=1e-5)
    assert sliced_wasserstein(a, a[order], directions, seed) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("dim", [2, 5])
def test_its_directions_are_spread_evenly_over_the_sphere(dim):
    from generator_evaluation import sliced_wasserstein

    shift = torch.arange(1.0, dim + 1)
    # The mean of |<s, direction>| over the sphere
    expected = float(shift.norm()) * math.gamma(dim / 2) / (math.sqrt(math.pi) * math.gamma((dim + 1) / 2))
    found = [sliced_wasserstein(torch.zeros(2, dim), shift.expand(2, dim), 20_000, seed) for seed in (0, 1)]
    assert found == pytest.approx([expected] * 2, rel=0.02)
    assert found[0] != found[1]


@pytest.mark.parametrize(("rows", "dim"), [((30, 30), 4), ((50, 20), 3), ((15, 70), 6)])
def test_it_is_the_mean_of_the_distances_of_scipy_also_between_samples_of_different_sizes(rows, dim):
    from generator_evaluation import sliced_wasserstein

    a, b = sample(rows[0], dim, 3), 1.5 * sample(rows[1], dim, 4) + 0.5
    kept, vectors = drawn(rows, dim, 32, 5)
    a_kept, b_kept = (x[chosen].double().numpy() for x, chosen in zip((a, b), kept, strict=True))
    expected = [wasserstein_distance(a_kept @ vector, b_kept @ vector) for vector in vectors]
    assert sliced_wasserstein(a, b, 32, 5) == pytest.approx(np.mean(expected), rel=1e-5)


def test_the_larger_sample_is_thinned_out_at_random_and_not_cut_off():
    from generator_evaluation import sliced_wasserstein

    line = torch.arange(1000.0)[:, None]
    even = line[::10]
    assert sliced_wasserstein(line, even) < 100  # its first hundred are 450 away
    assert sliced_wasserstein(even, line) < 100
    assert sliced_wasserstein(torch.ones(7, 1), torch.full((3, 1), 4.0)) == pytest.approx(3)


# ------------------------------------------------------------------------------------------------- the evaluator

SIDE, FRAMES, CLIPS = 24, 3, 10
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


class Colours(nn.Module):
    """Mean colours of a clip, and of its first frame."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, clips: Tensor) -> Tensor:
        return (clips[:, 0] if self.first else clips.mean(1)).mean((2, 3))


class Judge:
    """Says of each clip what a table has, and sees its first four pixels."""

    groups = ("shape", "colour")

    def __init__(self, table: Sequence[tuple[bool, bool]]) -> None:
        self.table = torch.tensor(table)

    def features(self, clips: Tensor) -> Tensor:
        return clips.flatten(1)[:, :4]

    def read(self, clips: Tensor, captions: Sequence[str]) -> Tensor:
        assert len(clips) == len(captions) == len(self.table)
        return self.table


def noise(seed: int) -> Tensor:
    """Clips uint8 [CLIPS, FRAMES, 3, SIDE, SIDE], each of a colour of its own."""
    rng = np.random.default_rng(seed)
    colours = rng.uniform(0, 200, (CLIPS, FRAMES, 3, 1, 1))
    return torch.from_numpy((colours + rng.uniform(0, 55, (CLIPS, FRAMES, 3, SIDE, SIDE))).astype(np.uint8))


def squares(captions: Sequence[str]) -> Tensor:
    """A white square that moves as each caption says, float [n, FRAMES, 3, SIDE, SIDE]."""
    clips = torch.zeros(len(captions), FRAMES, 3, SIDE, SIDE)
    for clip, caption in zip(clips, captions, strict=True):
        _, way, speed = caption.split()
        for time, frame in enumerate(clip):
            column, row = (9 + WAYS[way][axis] * time * {"slowly": 1, "quickly": 3}[speed] for axis in (0, 1))
            frame[:, row : row + 6, column : column + 6] = 1
    return clips


def squared_mmd(x: np.ndarray, reference: np.ndarray, sigma: float, scales: Sequence[float]) -> float:
    """The squared maximum mean discrepancy under gaussians, its means over all pairs, i = j included."""

    def mean_kernel(a: np.ndarray, b: np.ndarray) -> float:
        squared = ((a[:, None] - b[None]) ** 2).sum(-1) / sigma**2
        return float(np.mean([np.exp(-squared / (2 * scale**2)) for scale in scales]))

    return mean_kernel(x, x) - 2 * mean_kernel(x, reference) + mean_kernel(reference, reference)


def make_evaluator(judge: Judge, batch_size: int):
    """An evaluator of two encoders; the features of its clips and of the reference's, joined to their conditions."""
    from generator_evaluation import GeneratorEvaluator

    clips, others = noise(0), noise(1)
    encoders = {"whole": FrozenEncoder(Colours(first=False)), "first frame": FrozenEncoder(Colours(first=True))}
    conditions, of_others = sample(CLIPS, 2, 6), sample(CLIPS, 2, 7)
    references = {
        name: NystromReference.fit(
            encoder(others.float() / 255),
            condition=of_others,
            condition_weight=0.3,
            landmarks=CLIPS,
            sigma=0.4,
            name=name,
        )
        for name, encoder in encoders.items()
    }
    captions = ["square left slowly"] * CLIPS
    evaluator = GeneratorEvaluator(
        MultiEncoderMMD(references),
        encoders,
        judge,
        clips,
        captions,
        conditions,
        others,
        batch_size=batch_size,
        batches=3,
    )

    def joined(real: Tensor, condition: Tensor) -> dict[str, np.ndarray]:
        pixels = real.double().numpy() / 255
        means = {"whole": pixels.mean((1, 3, 4)), "first frame": pixels[:, 0].mean((2, 3))}
        return {name: np.concatenate([x, 0.3 * condition.double().numpy()], axis=1) for name, x in means.items()}

    return evaluator, joined(clips, conditions), joined(others, of_others)


@pytest.mark.parametrize(("batch_size", "rows"), [(4, 4), (64, CLIPS)])
def test_floors_are_the_mean_over_batches_of_the_discrepancy_of_real_clips(batch_size, rows):
    evaluator, features, reference = make_evaluator(Judge([(True, True)] * CLIPS), batch_size)
    assert [len(set(batch.tolist())) for batch in evaluator.batches] == [rows] * 3
    assert len({tuple(batch.tolist()) for batch in evaluator.batches}) == 3
    for name, floor in evaluator.floors.items():
        values = [squared_mmd(features[name][b.numpy()], reference[name], 0.4, (0.5, 1, 2)) for b in evaluator.batches]
        assert floor == pytest.approx(np.mean(values), rel=1e-3)
    assert set(evaluator.floors) == {"whole", "first frame"}


def test_a_generator_that_returns_the_real_clips_scores_the_floors():
    from generator_evaluation import sliced_wasserstein

    evaluator, _, _ = make_evaluator(Judge([(True, False)] * CLIPS), 4)
    asked = []

    def generate(captions: Sequence[str]) -> Tensor:
        asked.extend(captions)
        return noise(0).movedim(2, -1)

    found = evaluator(generate)
    assert asked == evaluator.captions
    assert {name: found[f"mmd/{name}"] for name in evaluator.floors} == pytest.approx(evaluator.floors, rel=1e-5)
    assert found["sliced_wasserstein"] == pytest.approx(0, abs=1e-7)
    assert (found["read/shape"], found["read/colour"], found["read/shape and colour"]) == (1, 0, 0)
    first, second = (x.float().flatten(1)[:, :4] / 255 for x in (noise(1), noise(0)))
    assert evaluator.floor_distance == pytest.approx(sliced_wasserstein(first, second), rel=1e-6)
    assert evaluator.floor_distance > 0.05
    far = evaluator(lambda captions: torch.full((CLIPS, FRAMES, SIDE, SIDE, 3), 255, dtype=torch.uint8))
    assert all(far[f"mmd/{name}"] > 2 * floor for name, floor in evaluator.floors.items())


def test_what_is_read_are_shares_of_the_clips():
    table = [(True, True), (True, False), (True, True), (False, True), (False, False)]
    evaluator, _, _ = make_evaluator(Judge([(True, True)] * CLIPS), 4)
    evaluator.judge = Judge(table)
    shown = [
        "square left slowly",
        "square up quickly",
        "square right slowly",
        "square down quickly",
        "square up slowly",
    ]
    asked = [*shown[:2], "square left slowly", "square down slowly", shown[4]]  # another direction, another speed
    found = evaluator.read(squares(shown), asked)
    assert found == pytest.approx({"shape": 3 / 5, "colour": 3 / 5, "shape and colour": 2 / 5, "motion": 3 / 5})
