"""References: coefficients against dense algebra, closed-form truths, streams, and how good landmarks are."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.objectives.mmd import fit as fitting
from tests.objectives.mmd.dense import KERNELS, dense_kernel

SCALES = (0.5, 1.0, 2.0)


def gaussian_rows(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def landmarks_of(reference: NystromReference, block: int = 0) -> Tensor:
    return reference.landmarks[block].double() + reference.center[block].double()


# ------------------------------------------------------------------------------------------- against dense algebra


@pytest.mark.parametrize("kernel", KERNELS)
def test_coefficients_solve_for_the_mean_kernel_over_the_whole_reference(kernel):
    x = gaussian_rows(90, 6) + 2
    reference = NystromReference.fit(x, landmarks=12, kernel=kernel, scales=SCALES, jitter=1e-3)
    z, sigma, scales = landmarks_of(reference), reference.sigma[0], reference.kernel.scales
    K = dense_kernel(kernel, scales, sigma, z, z)
    mean_kernel = dense_kernel(kernel, scales, sigma, z, x.double()).mean(dim=2)
    for alpha, gram, mu in zip(reference.alpha[0].double(), K, mean_kernel, strict=True):
        if kernel != "energy":
            residual = gram @ alpha + 1e-3 * alpha - mu
        else:  # the same up to a constant, that of the constraint
            residual = gram @ alpha + 1e-3 * gram.abs().mean() * alpha - mu
            residual = residual - residual.mean()
            assert alpha.sum().item() == pytest.approx(1)
        assert residual.abs().max() <= 1e-5
    k_rr = dense_kernel(kernel, scales, sigma, x.double(), x.double()).mean()
    assert reference.k_rr[0] == pytest.approx(float(k_rr), rel=1e-9)


@pytest.mark.parametrize("layout", ["flatten", "per_token", "mean"])
def test_layouts_are_references_of_what_they_stand_for(layout):
    x = gaussian_rows(60, 3, 4)
    options = dict(landmarks=8, scales=SCALES)
    reference = NystromReference.fit(x, layout=layout, **options)
    blocks = {"flatten": [x.flatten(1)], "mean": [x.mean(dim=1)], "per_token": list(x.unbind(dim=1))}[layout]
    assert reference.landmarks.shape == (len(blocks), 8, blocks[0].shape[1])
    for index, block in enumerate(blocks):
        single = NystromReference.fit(block, **options)
        assert reference.sigma[index] == pytest.approx(single.sigma[0])
        assert reference.k_rr[index] == pytest.approx(single.k_rr[0])
        assert torch.allclose(reference.alpha[index], single.alpha[0], atol=1e-5)


def test_a_condition_is_fitted_behind_the_features():
    x, c = gaussian_rows(60, 5), gaussian_rows(60, 2, seed=1)
    joint = NystromReference.fit(x, condition=c, condition_weight=0.7, landmarks=9)
    plain = NystromReference.fit(torch.cat([x, 0.7 * c], dim=1), landmarks=9)
    assert joint.sample_shape == (5,) and joint.condition_size == 2
    assert torch.equal(joint.landmarks, plain.landmarks) and torch.equal(joint.alpha, plain.alpha)
    pairs = NystromReference.fit(list(zip(x.split(7), c.split(7), strict=True)), condition_weight=0.7, landmarks=9)
    assert torch.allclose(pairs.alpha, joint.alpha, atol=1e-5)


def test_a_center_changes_where_landmarks_are_stored_and_nothing_else():
    x, students = gaussian_rows(60, 5) + 3, {"x": gaussian_rows(20, 5, seed=1) + 3.3}
    results = [
        MultiEncoderMMD({"x": NystromReference.fit(x, landmarks=10, center=center)}).value_and_cotangents(students)
        for center in (True, False)
    ]
    assert torch.allclose(results[0].cotangents["x"], results[1].cotangents["x"], rtol=1e-3, atol=1e-5)


def test_parts_made_elsewhere_give_the_same_objective():
    x, students = gaussian_rows(60, 5) + 1, {"x": gaussian_rows(20, 5, seed=1)}
    fitted = NystromReference.fit(x, landmarks=10)
    parts = NystromReference.from_parts(
        landmarks=landmarks_of(fitted).float(),
        alpha=fitted.alpha[0],
        sigma=fitted.sigma[0],
        k_rr=fitted.k_rr[0],
        scales=fitted.kernel.scales,
    )
    results = [
        MultiEncoderMMD({"x": each}, normalize=False).value_and_cotangents(students) for each in (fitted, parts)
    ]
    assert torch.allclose(results[0].loss, results[1].loss, atol=1e-6)
    assert torch.allclose(results[0].cotangents["x"], results[1].cotangents["x"], atol=1e-7)


# ------------------------------------------------------------------------------------------------ closed-form truths


def test_two_point_masses():
    distance, sigma = 1.3, 0.9
    reference = NystromReference.from_parts(landmarks=torch.zeros(1, 3), alpha=torch.ones(1), sigma=sigma, k_rr=1.0)
    x = torch.zeros(5, 3)
    x[:, 0] = distance
    result = MultiEncoderMMD({"x": reference}, normalize=False).value_and_cotangents({"x": x})
    k = math.exp(-(distance**2) / (2 * sigma**2))
    assert result.loss.item() == pytest.approx(2 - 2 * k, rel=1e-6)
    # Rows that coincide do not push each other: all force is the reference's, (2/B) k d/σ².
    expected = torch.zeros(5, 3)
    expected[:, 0] = 2 / 5 * k * distance / sigma**2
    assert torch.allclose(result.cotangents["x"], expected, rtol=1e-5, atol=1e-7)


def test_two_gaussians_are_as_far_apart_as_the_formula_says():
    # E k(x, y) for x ~ N(a, s²I), y ~ N(b, t²I): (σ²/(σ²+s²+t²))^(D/2) exp(−|a−b|²/2(σ²+s²+t²)).
    D, sigma, s, t, shift = 3, 1.5, 1.0, 1.2, 0.8

    def mean_kernel(variance: float, squared: float = 0.0) -> float:
        return (sigma**2 / (sigma**2 + variance)) ** (D / 2) * math.exp(-squared / (2 * (sigma**2 + variance)))

    truth = mean_kernel(2 * s**2) + mean_kernel(2 * t**2) - 2 * mean_kernel(s**2 + t**2, D * shift**2)
    real = t * gaussian_rows(8000, D, seed=1)
    reference = NystromReference.fit(real, landmarks=300, sigma=sigma, scales=(1.0,))
    mmd = MultiEncoderMMD({"x": reference}, statistic="u", normalize=False)
    found = mmd.value_and_cotangents({"x": s * gaussian_rows(8000, D) + shift}).loss.item()
    # 5 standard errors of the U-statistic and of the reference, each about 2 sqrt(Var k̄ / 8000) with Var k̄ < 0.01.
    assert found == pytest.approx(truth, abs=5 * 2 * math.sqrt(2 * 0.01 / 8000)) and truth > 0.08


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_distributions_give_the_floor(kernel):
    B, real = 64, gaussian_rows(3000, 4, seed=2)
    reference = NystromReference.fit(real, landmarks=300, kernel=kernel)
    mmd = MultiEncoderMMD({"x": reference}, normalize=False)
    raws = torch.stack(
        [mmd.value_and_cotangents({"x": gaussian_rows(B, 4, seed=100 + n)}).loss for n in range(60)]
    ).double()
    floor = (reference.kernel.at_zero - reference.k_rr[0]) / B
    # The mean of 60 batches, within 5 of its standard errors and what 3000 rows know of the law.
    assert abs(raws.mean() - floor) <= 5 * raws.std() / math.sqrt(60) + floor * B / 3000
    assert raws.std() / math.sqrt(60) < 0.1 * floor  # so that a factor of two fails
    u = MultiEncoderMMD({"x": reference}, normalize=False, statistic="u")
    raws = torch.stack([u.value_and_cotangents({"x": gaussian_rows(B, 4, seed=100 + n)}).loss for n in range(60)])
    assert abs(raws.mean()) <= 5 * raws.std() / math.sqrt(60) + floor * B / 3000 and raws.min() < 0


# --------------------------------------------------------------------------------------------- how good landmarks are


def attraction_error(reference: NystromReference, real: Tensor, x: Tensor) -> float:
    """Relative L2 error of the attraction's gradient against that of all rows of the reference."""
    gradients = []
    for z, alpha in ((landmarks_of(reference), reference.alpha[0].double()), (real.double(), None)):
        leaf = x.double().requires_grad_()
        k = dense_kernel("gaussian", reference.kernel.scales, reference.sigma[0], leaf, z)
        alpha = alpha if alpha is not None else torch.full((len(k), len(z)), 1 / len(z), dtype=torch.float64)
        torch.einsum("snm,sm->", k, alpha).backward()
        gradients.append(leaf.grad)
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def test_the_error_falls_with_landmarks_and_one_coefficient_set_per_scale_is_better_than_one_for_all():
    digits = torch.tensor(load_digits().data, dtype=torch.float32)
    real, x = digits[:1500], digits[1500:1600]
    errors = {}
    for count in (50, 200, 800):
        reference = NystromReference.fit(real, landmarks=count, scales=SCALES)
        errors[count] = attraction_error(reference, real, x)
    assert errors[50] > 1.5 * errors[200] and errors[200] > 3 * errors[800] and errors[800] < 0.003
    single = NystromReference.fit(real, landmarks=200, scales=SCALES)
    z, sigma = landmarks_of(single), single.sigma[0]
    K = dense_kernel("gaussian", SCALES, sigma, z, z).mean(dim=0)
    mu = dense_kernel("gaussian", SCALES, sigma, z, real.double()).mean(dim=(0, 2))
    alpha = torch.linalg.solve(K + 1e-6 * torch.eye(len(z), dtype=torch.float64), mu)
    single.alpha.copy_(alpha.expand(1, 3, -1))
    assert attraction_error(single, real, x) > 3 * errors[200]


def test_k_means_finds_clusters_and_moves_centers_that_nothing_is_near():
    corners = torch.tensor([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0], [9.0, 9.0]])
    x = (corners[:, None] + 0.1 * gaussian_rows(4 * 50, 2).view(4, 50, 2)).flatten(0, 1)
    centers = fitting.k_means(x, 8, seed=0)
    # Every corner has a center, as chance alone would not see to.
    assert (torch.cdist(corners.double(), centers).min(dim=1).values < 0.3).all()
    duplicates = torch.cat([torch.zeros(50, 2), x])
    assert len(fitting.k_means(duplicates, 30, seed=0).unique(dim=0)) >= 29


# ------------------------------------------------------------------------------------------------ streams of batches


@pytest.mark.parametrize("make", [list, tuple, lambda parts: torch.utils.data.DataLoader(parts, batch_size=None)])
def test_batches_give_what_the_tensor_gives(make):
    x = gaussian_rows(300, 6)
    whole = NystromReference.fit(x, landmarks=20)
    parts = NystromReference.fit(make([*x.split(37)]), landmarks=20)
    assert torch.allclose(parts.landmarks, whole.landmarks, atol=1e-5)
    assert torch.allclose(parts.alpha, whole.alpha, atol=1e-5)
    assert parts.k_rr == pytest.approx(whole.k_rr) and parts.identity == whole.identity
    assert parts.describe()["rows"] == "300"


def test_batches_that_differ_from_pass_to_pass_are_refused():
    class Shuffled:
        passes = 0

        def __iter__(self):
            Shuffled.passes += 1
            return iter(gaussian_rows(60, 4, seed=Shuffled.passes).split(20))

    with pytest.raises(ValueError, match=r"features: 60 rows at the first pass.*without shuffling"):
        NystromReference.fit(Shuffled(), landmarks=5)


def test_the_hash_of_the_data_knows_the_condition():
    x, c = gaussian_rows(30, 4), gaussian_rows(30, 2, seed=1)
    hashes = {NystromReference.fit(x, condition=each, landmarks=5).identity["data_hash"] for each in (None, c, 2 * c)}
    assert len(hashes) == 3


def test_more_rows_than_the_sample_holds_still_enter_the_mean_kernel(monkeypatch):
    monkeypatch.setattr(fitting, "SAMPLE_ROWS", 200)
    x = gaussian_rows(1000, 5)
    reference = NystromReference.fit([*x.split(64)], landmarks=30, jitter=1e-6)
    z = landmarks_of(reference)
    K = dense_kernel("gaussian", SCALES, reference.sigma[0], z, z)
    mu = dense_kernel("gaussian", SCALES, reference.sigma[0], z, x.double()).mean(dim=2)
    fitted = torch.einsum("smn,sn->sm", K, reference.alpha[0].double())
    assert (fitted - mu).abs().max() <= 1e-4
    assert reference.identity["k_rr_of"] == "landmarks"
    exact = dense_kernel("gaussian", SCALES, reference.sigma[0], x.double(), x.double()).mean()
    assert reference.k_rr[0] == pytest.approx(float(exact), abs=0.01)


def test_the_sample_of_a_stream_is_uniform():
    # Each of 40 rows is one of 10 with probability 1/4: over 2000 seeds, 500 ± 5 · 19.4.
    counts = torch.zeros(40)
    for seed in range(2000):
        sample = fitting.Sample(10, seed)
        for part in torch.arange(40.0).split(3):
            sample.add(part[None, :, None])
        rows = sample.rows().flatten().long()
        assert len(rows) == 10 and torch.equal(rows, rows.unique())
        counts[rows] += 1
    assert (counts - 500).abs().max() < 5 * 19.4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_features_come_in_any_floating_point_dtype(dtype):
    x = gaussian_rows(100, 6).to(dtype)
    expected, found = NystromReference.fit(x.float(), landmarks=10), NystromReference.fit(x, landmarks=10)
    assert torch.allclose(found.alpha, expected.alpha, atol=1e-4)


def test_the_same_arguments_give_the_same_bits_and_another_seed_other_landmarks():
    x = gaussian_rows(200, 6)
    first, second = NystromReference.fit(x, landmarks=10), NystromReference.fit(x, landmarks=10)
    assert torch.equal(first.alpha, second.alpha) and torch.equal(first.landmarks, second.landmarks)
    assert not torch.equal(first.landmarks, NystromReference.fit(x, landmarks=10, seed=1).landmarks)
    assert first.identity["data_hash"] != NystromReference.fit(x + 1, landmarks=10).identity["data_hash"]


def test_it_knows_what_it_was_made_from_and_survives_copies():
    x = gaussian_rows(50, 2, 3)
    identity = {"encoder": "dino", "encoder_revision": "abc"}
    reference = NystromReference.fit(x, landmarks=10, layout="per_token", name="dino", identity=identity)
    about = reference.describe()
    assert about | {"name": "dino", "layout": "per_token", "sample_shape": [2, 3], "encoder": "dino"} == about
    for twin in (copy.deepcopy(reference), pickle.loads(pickle.dumps(reference))):
        assert twin.describe() == about and torch.equal(twin.alpha, reference.alpha)
    assert not reference.state_dict() and not list(reference.parameters())


# -------------------------------------------------------------------------------------------------------- bad input

X = gaussian_rows(20, 4)


@pytest.mark.parametrize(
    ("features", "options", "error", "words"),
    [
        (X.long(), {}, TypeError, ["features", "int64", "floating-point"]),
        ([X, "text"], {}, TypeError, ["features", "str"]),
        ((part for part in X.split(5)), {}, TypeError, ["features", "generator", "twice", "list"]),
        (X[:1], {}, ValueError, ["features", "1 row"]),
        ([], {}, ValueError, ["features", "no rows"]),
        ([X, gaussian_rows(3, 5)], {}, ValueError, ["features", "[5]", "[4]"]),
        (torch.full((9, 4), math.nan), {}, ValueError, ["features", "NaN", "row(s) 0, 1"]),
        (torch.ones(9, 4), {}, ValueError, ["features", "duplicate", "sigma"]),
        (X, dict(landmarks=0), ValueError, ["landmarks", "0", "1024"]),
        (X, dict(landmarks=2.5), TypeError, ["landmarks", "2.5"]),
        (X, dict(kernel="cosine"), ValueError, ["kernel", "'cosine'", "gaussian"]),
        (X, dict(scales=()), ValueError, ["scales", "at least one"]),
        (X, dict(layout="rows"), ValueError, ["layout", "'rows'", "flatten"]),
        (X, dict(layout="mean"), ValueError, ["features", "[4]", "[B, tokens, D]", "flatten"]),
        (X, dict(sigma=-1.0), ValueError, ["sigma", "-1.0", "median"]),
        (X, dict(jitter=-1e-6), ValueError, ["jitter", "-1e-06"]),
        (torch.cat([X, X]), dict(landmarks=40, jitter=0.0), ValueError, ["jitter", "singular", "1e-6"]),
        (X, dict(condition=torch.ones(19, 2)), ValueError, ["condition", "[19, 2]", "20"]),
        ([X, X], dict(condition=torch.ones(40, 2)), TypeError, ["condition", "pairs"]),
        ([(X, torch.ones(20, 2)), X], {}, ValueError, ["condition", "None", "[20, 2]", "every batch"]),
    ],
)
def test_bad_features_and_options_say_what_was_found_expected_and_the_way_out(features, options, error, words):
    with pytest.raises(error) as caught:
        NystromReference.fit(features, **options)
    assert all(word in str(caught.value) for word in words), caught.value


PARTS = dict(landmarks=torch.randn(6, 4), alpha=torch.ones(6) / 6, sigma=1.0, k_rr=0.5)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (dict(landmarks=torch.randn(6)), ["landmarks", "[6]", "[M, D]"]),
        (dict(landmarks=torch.randn(0, 4), alpha=torch.ones(0)), ["landmarks", "[1, 0, 4]"]),
        (dict(landmarks=torch.full((6, 4), math.inf)), ["landmarks", "infinity"]),
        (dict(landmarks=torch.randn(2, 6, 4)), ["landmarks", "2 blocks", "per_token"]),
        (dict(alpha=torch.ones(5)), ["alpha", "[1, 1, 5]", "[1, 1, 6]"]),
        (dict(alpha=torch.ones(2, 6)), ["alpha", "[1, 2, 6]", "1 scale(s)"]),
        (dict(sigma=0.0), ["sigma", "0.0", "positive"]),
        (dict(sigma=[1.0, 1.0]), ["sigma", "[1.0, 1.0]", "1 positive"]),
        (dict(k_rr=math.nan), ["k_rr", "nan"]),
        (dict(sample_shape=(5,)), ["sample_shape", "[5]", "[1, 6, 4]"]),
        (dict(sample_shape=()), ["sample_shape", "[]"]),
        (dict(layout="mean", sample_shape=(3, 5)), ["sample_shape", "[3, 5]"]),
    ],
)
def test_parts_that_do_not_fit_each_other_are_named(parts, words):
    with pytest.raises(ValueError) as caught:
        NystromReference.from_parts(**(PARTS | parts))
    assert all(word in str(caught.value) for word in words), caught.value
