"""TwoSampleMMD against autograd through all pairs in fp64."""

from __future__ import annotations

import pytest
import torch

from st_cached_extras.objectives.mmd import TwoSampleMMD
from st_cached_extras.testing import ObjectiveCheckCase
from tests.objectives.mmd.dense import KERNELS, dense_kernel, random_rows


def two_sample(objective: TwoSampleMMD, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def k(a, b):
        return dense_kernel(objective.kernel.name, objective.kernel.scales, objective.sigma, a, b).mean(dim=0)

    def mean(gram):
        if objective.statistic == "v":
            return gram.mean()
        return (gram - torch.diag(gram.diagonal())).sum() / max(1, len(gram) * (len(gram) - 1))

    return mean(k(x, x)) + mean(k(y, y)) - 2 * k(x, y).mean()


class TestTwoSampleMMD(ObjectiveCheckCase):
    options = dict(sigma=2.0)  # noqa: RUF012

    def make_objective(self):
        return TwoSampleMMD(**self.options)

    def make_features(self, batch_size, dtype, seed):
        x, y = random_rows(batch_size, (6,), seed, dtype), random_rows(batch_size, (6,), 50 + seed, dtype)
        return {"anchor": x, "positive": 1.2 * y.flip(0) + 0.3}

    def dense_loss(self, features, *, objective, labels, reference):
        return two_sample(objective, features["anchor"], features["positive"])


class TestWithTheUStatistic(TestTwoSampleMMD):
    magnitude = 0.1  # its value is a difference of means of this size, and may vanish
    options = dict(sigma=1.5, kernel="laplace", statistic="u")  # noqa: RUF012


@pytest.mark.parametrize("statistic", ["v", "u"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_selected_rows_in_float32_equal_float64_autograd_far_from_the_origin(kernel, statistic):
    objective = TwoSampleMMD(3.0, names=("image", "text"), kernel=kernel, statistic=statistic)
    features = {"image": random_rows(31, (20,), 0, torch.float32) + 3, "text": random_rows(31, (20,), 1).float() + 3.5}
    leaves = {name: x.double().requires_grad_() for name, x in features.items()}
    two_sample(objective, *leaves.values()).backward()
    rows = torch.tensor([30, 4, 7])
    result = objective.value_and_cotangents(features, rows=rows)
    for name, leaf in leaves.items():
        assert (result.cotangents[name].double() - leaf.grad[rows]).norm() <= 5e-6 * leaf.grad[rows].norm()


def test_columns_of_one_law_are_at_distance_zero_and_a_gap_is_seen():
    generator = torch.Generator().manual_seed(0)
    objective = TwoSampleMMD(2.0, statistic="u")
    x, y = torch.randn(2, 400, 3, generator=generator)
    same = objective.value_and_cotangents({"anchor": x, "positive": y}).loss
    apart = objective.value_and_cotangents({"anchor": x, "positive": y + 1}).loss
    assert abs(same) < 0.01 < 0.1 < apart


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(sigma=0.0), ["sigma", "0.0", "median_bandwidth"]),
        (dict(sigma=1.0, names=("a", "a")), ["names", "different"]),
        (dict(sigma=1.0, statistic="x"), ["statistic", "'x'"]),
        (dict(sigma=1.0, kernel="cosine"), ["kernel", "'cosine'", "gaussian"]),
        (dict(sigma=1.0, scales=(0.0,)), ["scales", "positive"]),
    ],
)
def test_bad_options_say_what_was_found_expected_and_the_way_out(options, words):
    with pytest.raises(ValueError) as caught:
        TwoSampleMMD(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_sides_of_different_width_are_named():
    with pytest.raises(ValueError, match=r"'positive'.*\[4\].*\[3\]"):
        TwoSampleMMD(1.0).value_and_cotangents({"anchor": torch.ones(2, 3), "positive": torch.ones(2, 4)})
