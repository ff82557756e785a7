"""SupCon equals its definition and an independent implementation, whatever its labels and views."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor

from st_cached_extras.objectives import SupCon
from st_cached_extras.testing import ObjectiveCheckCase


def draw(batch_size: int, dim: int, views: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ["anchor", "positive", "negative_1"][:views]
    return {name: torch.randn(batch_size, dim, generator=generator, dtype=torch.float64).to(dtype) for name in names}


def double_loop(features: dict[str, Tensor], labels: Tensor | None, *, scale, similarity_fct=cos_sim) -> Tensor:
    """The definition, one anchor and one pair at a time."""
    z = torch.cat(list(features.values()))
    similarity = similarity_fct(z, z)
    rows = [row for column in features.values() for row in range(len(column))]

    def related(a: int, b: int) -> bool:
        if a == b or labels is None:
            return a == b
        return bool((labels[a] == labels[b]) if labels.ndim == 1 else (labels[a].bool() & labels[b].bool()).any())

    losses = []
    for i in range(len(z)):
        logits, positives = [], []
        for j in range(len(z)):
            if i != j:
                logits.append(scale * similarity[i, j])
                positives.append(related(rows[i], rows[j]))
        if any(positives):
            log_z = torch.stack(logits).logsumexp(0)
            own = [logit for logit, positive in zip(logits, positives, strict=True) if positive]
            losses.append(log_z - sum(own) / len(own))
    return torch.stack(losses).mean() if losses else 0.0 * z.sum()


class SupConChecks(ObjectiveCheckCase):
    options: ClassVar[dict] = {}
    views = 1

    def make_objective(self):
        return SupCon(**self.options, chunk_size=4)

    def make_features(self, batch_size, dtype, seed):
        return draw(batch_size, 5, self.views, seed, dtype)

    def make_labels(self, batch_size, seed):
        return torch.randint(0, 4, (batch_size,), generator=torch.Generator().manual_seed(seed))

    def dense_loss(self, features, *, objective, labels, reference):
        scale = objective.scale if objective.log_scale is None else objective.log_scale.exp()
        return double_loop(features, labels, scale=scale, similarity_fct=objective.similarity_fct)


class TestSupCon(SupConChecks):
    pass


class TestSupConWithTheShiftAndALearnedScale(SupConChecks):
    options: ClassVar[dict] = {"scale": 45.0, "learnable_scale": True}
    tolerance_float32 = 5e-5  # the rounding of a logit of 45


class TestSupConOfTwoViews(SupConChecks):
    options: ClassVar[dict] = {"scale": 3.0, "learnable_scale": True}
    views = 2


class TestSupConOfThreeViewsOfDotProducts(SupConChecks):
    options: ClassVar[dict] = {"scale": 0.5, "similarity_fct": dot_score}
    views = 3


class TestSupConOfTwoViewsWithoutLabels(SupConChecks):
    views = 2
    magnitude = 1.0  # with one positive a loss near zero is a difference of two logits

    def make_labels(self, batch_size, seed):
        return None


class TestSupConOfMultiHotRows(SupConChecks):
    def make_labels(self, batch_size, seed):
        return (torch.rand(batch_size, 6, generator=torch.Generator().manual_seed(seed)) < 0.25).long()


class TestSupConOfMultiHotRowsInTwoViews(TestSupConOfMultiHotRows):
    views = 2
    magnitude = 1.0


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_it_is_the_loss_of_pytorch_metric_learning(scale: float, views: int) -> None:
    from pytorch_metric_learning.losses import SupConLoss

    for seed in range(4):
        features = draw(24, 6, views, seed)
        labels = torch.randint(0, 9, (24,), generator=torch.Generator().manual_seed(seed))
        leaves = [x.clone().requires_grad_() for x in features.values()]
        expected = SupConLoss(temperature=1 / scale)(torch.cat(leaves), labels.repeat(views))
        expected.backward()
        result = SupCon(scale).value_and_cotangents(features, labels=labels)
        assert torch.allclose(result.loss, expected.detach(), rtol=1e-9)
        for leaf, cotangent in zip(leaves, result.cotangents.values(), strict=True):
            assert (leaf.grad - cotangent).norm() <= 1e-9 * leaf.grad.norm()


def test_rows_without_positives_contribute_nothing_and_are_counted() -> None:
    features, labels = draw(6, 4, 1, seed=0), torch.tensor([3, 1, 3, 7, 1, 9])
    result = SupCon().value_and_cotangents(features, labels=labels)
    assert result.metrics["rows_without_positives"].item() == 2
    lonely = SupCon().value_and_cotangents(features, labels=torch.arange(6))
    assert lonely.metrics["rows_without_positives"].item() == 6
    assert lonely.loss.item() == 0.0 and not lonely.cotangents["anchor"].any()
    assert not result.cotangents["anchor"].isnan().any()
    hot = torch.zeros(6, 5).index_put((torch.arange(6), torch.tensor([0, 1, 0, 2, 1, 3])), torch.tensor(1.0))
    by_rows = SupCon().value_and_cotangents(features, labels=hot)
    assert by_rows.metrics["rows_without_positives"].item() == 2
    assert torch.allclose(by_rows.loss, result.loss, rtol=1e-12)
    two_views = SupCon().value_and_cotangents(draw(6, 4, 2, seed=0), labels=torch.arange(6))
    assert two_views.metrics["rows_without_positives"].item() == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.float64])
def test_classes_of_any_dtype(dtype: torch.dtype) -> None:
    features, labels = draw(6, 4, 1, seed=1), torch.tensor([0, 1, 1, 0, 1, 0])
    expected = SupCon().value_and_cotangents(features, labels=labels).loss
    assert torch.equal(SupCon().value_and_cotangents(features, labels=labels.to(dtype)).loss, expected)
    assert torch.equal(SupCon().value_and_cotangents(features, labels=labels.to(dtype)[:, None]).loss, expected)
    hot = torch.nn.functional.one_hot(labels).to(dtype)
    assert torch.allclose(SupCon().value_and_cotangents(features, labels=hot).loss, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("labels", "error", "words"),
    [
        (None, TypeError, ["labels", "None", "several columns as views"]),
        (torch.zeros(3), ValueError, ["labels", "(3,)", "6 rows"]),
        (torch.zeros(6, 2, 2), ValueError, ["labels", "(6, 2, 2)", "multi-hot"]),
        ("abcdef", TypeError, ["labels", "str"]),
    ],
)
def test_bad_labels_say_what_was_found_and_expected(labels, error, words) -> None:
    with pytest.raises(error) as caught:
        SupCon().value_and_cotangents(draw(6, 4, 1, seed=2), labels=labels)
    assert all(word in str(caught.value) for word in words), caught.value
