"""Every dense loss of sentence-transformers that computes from embeddings equals its plain form when it is cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn

from st_cached_extras import CachedInfoNCELoss, CachedLoss
from st_cached_extras.testing import LossCheckCase, LossEqualityCase
from st_cached_extras.testing.loss_check import total
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    relative_error,
    text_columns,
    tiny_text_model,
    to_float64,
)


def drawn(rows: int, seed: int, *shape: int) -> Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(rows: int, seed: int) -> Tensor:
    return torch.arange(rows) % 3


def binary(rows: int, seed: int) -> Tensor:
    return torch.arange(rows) % 2


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """In place of the defaults, which are lambdas, so that pickling can be tested."""
    return 1 - torch.cosine_similarity(a, b)


@dataclass
class Spec:
    """One loss of sentence-transformers: how it is made for a model, its columns, its labels.

    Attributes:
        matryoshka: whether sentence-transformers' own MatryoshkaLoss takes the plain loss.
    """

    make: Callable[[SentenceTransformer], nn.Module]
    columns: int = 2
    labels: Callable[[int, int], Tensor | None] = lambda rows, seed: None
    matryoshka: bool = True


def guided(model: SentenceTransformer, **options: Any) -> nn.Module:
    """GIST with a frozen guide of its own, in the dtype of the model."""
    guide = tiny_text_model(hidden=8, seed=9).requires_grad_(False).eval()
    return losses.GISTEmbedLoss(model, guide, temperature=0.5, **options)


def guided_with_margin(model: SentenceTransformer) -> nn.Module:
    return guided(model, margin_strategy="relative", margin=0.1)


def retokenizing(model: SentenceTransformer) -> nn.Module:
    loss = guided(model)
    loss.must_retokenize, loss.tokenizer = True, model.tokenizer
    return loss


LOSSES = {
    "CoSENT": Spec(losses.CoSENTLoss, labels=drawn),
    "AnglE": Spec(losses.AnglELoss, labels=drawn),
    "AnglE, negatives": Spec(losses.AnglELoss, columns=4, labels=drawn),
    "CosineSimilarity": Spec(losses.CosineSimilarityLoss, labels=drawn),
    "Contrastive": Spec(lambda model: losses.ContrastiveLoss(model, cosine_distance), labels=binary),
    "Contrastive, sum": Spec(
        lambda model: losses.ContrastiveLoss(model, cosine_distance, size_average=False), labels=binary
    ),
    "OnlineContrastive": Spec(lambda model: losses.OnlineContrastiveLoss(model, cosine_distance), labels=binary),
    "Triplet": Spec(lambda model: losses.TripletLoss(model, cosine_distance, triplet_margin=0.5), columns=3),
    "BatchHardTriplet": Spec(losses.BatchHardTripletLoss, columns=1, labels=classes),
    "BatchHardSoftMarginTriplet": Spec(losses.BatchHardSoftMarginTripletLoss, columns=1, labels=classes),
    "BatchSemiHardTriplet": Spec(losses.BatchSemiHardTripletLoss, columns=1, labels=classes),
    "BatchAllTriplet": Spec(losses.BatchAllTripletLoss, columns=1, labels=classes),
    "MarginMSE": Spec(losses.MarginMSELoss, columns=3, labels=drawn),
    "MarginMSE, negatives": Spec(losses.MarginMSELoss, columns=4, labels=lambda rows, seed: drawn(rows, seed, 3)),
    "DistillKLDiv": Spec(losses.DistillKLDivLoss, columns=4, labels=lambda rows, seed: drawn(rows, seed, 3)),
    "GlobalOrthogonalRegularization": Spec(losses.GlobalOrthogonalRegularizationLoss, matryoshka=False),
    "MultipleNegativesRanking": Spec(losses.MultipleNegativesRankingLoss, columns=3),
    "MultipleNegativesSymmetricRanking": Spec(losses.MultipleNegativesSymmetricRankingLoss),
    "MSE": Spec(losses.MSELoss, labels=lambda rows, seed: drawn(rows, seed, 16)),
    "MSE, one column": Spec(losses.MSELoss, columns=1, labels=lambda rows, seed: drawn(rows, seed, 16)),
    "EmbedDistill": Spec(losses.EmbedDistillLoss, labels=lambda rows, seed: drawn(rows, seed, 2, 16)),
    "EmbedDistill, projection": Spec(
        lambda model: losses.EmbedDistillLoss(model, "l2", projection_dim=12),
        labels=lambda rows, seed: drawn(rows, seed, 12),
        matryoshka=False,
    ),
    "GISTEmbed": Spec(guided),
    "GISTEmbed, negatives": Spec(guided_with_margin, columns=3),
    "GISTEmbed, retokenizing": Spec(retokenizing),
    "Softmax": Spec(lambda model: losses.SoftmaxLoss(model, 16, 3), labels=classes, matryoshka=False),
}


def make(spec: Spec, model: SentenceTransformer) -> nn.Module:
    """The plain loss, whose own parameters start the same at every call, in the dtype of the model."""
    torch.manual_seed(5)
    return spec.make(model).to(model.dtype)


def comparable(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the plain loss, whose model some call otherwise; wrappers hold a second copy of everything."""
    for prefix in ("objective.loss.", "loss.objective.loss.", "loss."):
        found = {name.removeprefix(prefix): gradient for name, gradient in found.items()}
    return {name.replace("sentence_embedder.", "model."): gradient for name, gradient in found.items()}


class TestEveryLoss(LossEqualityCase):
    @pytest.fixture(autouse=True, params=LOSSES)
    def spec(self, request):
        self.spec: Spec = LOSSES[request.param]
        self.num_columns = self.spec.columns

    def make_loss(self, model, **kwargs):
        return CachedLoss(make(self.spec, model), **kwargs)

    def make_plain_loss(self, model):
        return make(self.spec, model)

    def make_labels(self, rows, seed):
        return self.spec.labels(rows, 0)

    def comparable(self, found):
        return comparable(found)

    @pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
    def test_matryoshka_over_it_equals_matryoshka_over_the_plain_loss(self, weights):
        if self.spec.matryoshka:
            super().test_matryoshka_over_it_equals_matryoshka_over_the_plain_loss(weights)

    def test_calculate_loss_is_differentiable_in_the_embeddings(self):
        if self.spec.make not in (guided, guided_with_margin, retokenizing):  # their forward asks the guide first
            super().test_calculate_loss_is_differentiable_in_the_embeddings()


class TestCachedCoSENT(LossCheckCase):
    """All that a cached loss must stand, with labels and with a loss that a batch of one leaves at zero."""

    def make_loss(self, model, **kwargs):
        return CachedLoss(losses.CoSENTLoss(model), **kwargs)

    def make_plain_loss(self, model):
        return losses.CoSENTLoss(model)

    def make_labels(self, rows, seed):
        return drawn(rows, seed)


def test_no_loss_of_sentence_transformers_is_forgotten():
    cannot = {
        "AdaptiveLayerLoss",
        "CachedGISTEmbedLoss",
        "CachedMultipleNegativesRankingLoss",
        "CachedMultipleNegativesSymmetricRankingLoss",
        "ContrastiveTensionLoss",
        "ContrastiveTensionLossInBatchNegatives",
        "DenoisingAutoEncoderLoss",
        "Matryoshka2dLoss",
        "MatryoshkaLoss",
        "MegaBatchMarginLoss",
    }
    model = tiny_text_model()
    covered = {type(make(spec, model)).__name__ for spec in LOSSES.values()}
    named = {name for name in losses.__all__ if name.endswith(("Loss", "InBatchNegatives"))}
    assert covered == named - cannot


@pytest.mark.parametrize("name", ["EmbedDistill, projection", "Softmax"])
def test_what_fixes_the_dimension_is_refused_under_matryoshka_at_the_first_forward(name):
    model, spec = tiny_text_model(), LOSSES[name]
    loss = MatryoshkaLoss(model, CachedLoss(make(spec, model)), [16, 8])
    with pytest.raises(
        ValueError, match=r"Loss cannot be evaluated on 2 column\(s\) of embeddings \(5, 8\), \(5, 8\)"
    ):
        loss(text_columns(model, 5), spec.labels(5, 0))


def test_several_values_stay_apart_and_their_sum_trains():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 6))
    plain, cached = losses.GlobalOrthogonalRegularizationLoss(model), None
    cached = CachedLoss(losses.GlobalOrthogonalRegularizationLoss(model), mini_batch_size=2)
    expected, found = plain(copy_columns(columns)), cached(copy_columns(columns))
    assert list(found) == list(expected) == ["gor_mean", "gor_second_moment"]
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-10)
    first, second = found.values()
    assert first.requires_grad and not second.requires_grad
    with torch.no_grad():
        evaluated = cached(copy_columns(columns))
    assert all(torch.equal(evaluated[name], value) for name, value in found.items())


def test_matryoshka_weighs_several_values_alike():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 6))
    inner = losses.GlobalOrthogonalRegularizationLoss(model)
    embeddings = [model(column)["sentence_embedding"] for column in copy_columns(columns)]
    expected = [
        inner.compute_loss_from_embeddings([nn.functional.normalize(x[:, :dim], dim=-1) for x in embeddings])
        for dim in (16, 8)
    ]
    total(expected[0]).add(0.5 * total(expected[1])).backward()
    truth = gradients(model)
    model.zero_grad()
    loss = MatryoshkaLoss(model, CachedLoss(inner, mini_batch_size=2), [16, 8], [1.0, 0.5])
    found = loss(copy_columns(columns), None)
    total(found).backward()
    for name, value in found.items():
        assert torch.allclose(value, expected[0][name] + 0.5 * expected[1][name], rtol=1e-10)
    assert relative_error(gradients(model), truth) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float16, torch.float64])
def test_labels_of_any_dtype_are_taken_as_the_plain_loss_takes_them(dtype):
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 6))
    labels = binary(6, 0).to(dtype)
    for make_loss in (losses.CoSENTLoss, losses.CosineSimilarityLoss, losses.OnlineContrastiveLoss):
        plain = make_loss(model)
        plain(copy_columns(columns), labels).backward()
        expected = gradients(model)
        model.zero_grad()
        CachedLoss(plain, mini_batch_size=4)(copy_columns(columns), labels).backward()
        assert relative_error(gradients(model), expected) <= 1e-10
        model.zero_grad()


class Uniformity(nn.Module):
    """A loss of somebody else's."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, columns, labels=None):
        return self.compute_loss_from_embeddings([self.model(x)["sentence_embedding"] for x in columns], labels)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        return sum((-self.temperature * torch.pdist(x).square()).exp().mean().log() for x in embeddings)


def test_a_loss_of_somebody_elses_is_cached_and_its_parameter_trains():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 6))
    plain = Uniformity(model)
    (8 * plain(copy_columns(columns))).backward()
    expected = gradients(plain)
    plain.zero_grad()
    cached = CachedLoss(plain, mini_batch_size=4)
    assert list(cached.own_parameters()) == ["objective.loss.temperature"]
    (8 * cached(copy_columns(columns))).backward()
    assert relative_error(gradients(plain), expected) <= 1e-10
    assert expected["temperature"].abs() > 1e-6


def test_the_plain_loss_stays_usable_and_shares_its_model_and_parameters():
    model = tiny_text_model()
    columns, labels = text_columns(model, 4), classes(4, 0)
    plain = losses.SoftmaxLoss(model, 16, 3)
    before = plain(copy_columns(columns), labels)
    cached = CachedLoss(plain)
    assert cached.loss is plain and cached.model is model and plain.model is model
    cached(copy_columns(columns), labels).backward()
    assert torch.equal(plain(copy_columns(columns), labels), before)
    names = [name for name, _ in cached.named_parameters()]
    assert len(names) == len(list(plain.parameters())) and "objective.loss.classifier.weight" in names


def test_the_model_card_names_tags_and_cites_the_loss_and_holds_plain_json(tmp_path):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainingArguments

    model = tiny_text_model()
    loss = CachedLoss(guided(model), mini_batch_size=3)
    dataset = Dataset.from_dict({"anchor": ["w1 w2", "w3"] * 4, "positive": ["w1", "w4 w5"] * 4})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, report_to="none", use_cpu=True
    )
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss).train()
    model.save_pretrained(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "loss:CachedLoss" in card and "loss:GISTEmbedLoss" in card
    assert "solatorio2024gistembed" in card and "gao2021scaling" in card
    assert '"loss": "GISTEmbedLoss"' in card and "object at 0x" not in card


@pytest.mark.parametrize("name", ["GISTEmbed", "Softmax", "BatchHardTriplet"])
def test_the_trainers_model_replaces_the_students_and_no_other(name, tmp_path):
    model, other = tiny_text_model(), tiny_text_model(seed=4)
    loss = CachedLoss(make(LOSSES[name], model))
    guide = getattr(loss.loss, "guide", None)
    trainer = SentenceTransformerTrainer(model=model, loss=loss)
    trainer.override_model_in_loss(loss, other)
    assert loss.model is other
    assert getattr(loss.loss, "model", other) is other
    if guide is not None:
        assert loss.loss.guide is guide
    paths = [path for path, module in loss.named_modules(remove_duplicate=False) if module is guide]
    assert not any(path.endswith("model") for path in paths)


def test_a_teacher_where_the_trainer_would_replace_it_is_refused():
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_text_model(seed=2)

    plain = losses.CoSENTLoss(tiny_text_model())
    plain.teacher = Teacher()
    with pytest.raises(ValueError, match=r"another model under the name 'teacher\.model'.*call it differently"):
        CachedLoss(plain)


@pytest.mark.parametrize(
    ("make_loss", "error", "words"),
    [
        (
            lambda model: losses.MatryoshkaLoss(model, losses.CoSENTLoss(model), [16]),
            ValueError,
            "Put the cache inside",
        ),
        (lambda model: losses.AdaptiveLayerLoss(model, losses.CoSENTLoss(model)), ValueError, "without a cache"),
        (lambda model: CachedInfoNCELoss(model), ValueError, "caches already"),
        (lambda model: CachedLoss(losses.CoSENTLoss(model)), ValueError, "caches already"),
        (losses.CachedMultipleNegativesRankingLoss, ValueError, "caches already"),
        (losses.MegaBatchMarginLoss, ValueError, "caches already"),
        (lambda model: losses.CachedGISTEmbedLoss(model, model), ValueError, "caches already"),
        (
            lambda model: losses.MegaBatchMarginLoss(model, use_mini_batched_version=False),
            TypeError,
            "no method compute_loss_from_embeddings",
        ),
        (losses.ContrastiveTensionLoss, TypeError, "forward passes of its own"),
        (losses.ContrastiveTensionLossInBatchNegatives, TypeError, "forward passes of its own"),
        (
            lambda model: losses.MultipleNegativesRankingLoss(model, gather_across_devices=True),
            ValueError,
            "give gather_across_devices=True to the cached loss",
        ),
        (lambda model: losses.CoSENTLoss, TypeError, "must be a loss that"),
        (lambda model: losses.CoSENTLoss(None), TypeError, "holds 0 models"),
    ],
)
def test_what_cannot_be_cached_is_refused_and_why(make_loss, error, words):
    with pytest.raises(error, match=words):
        CachedLoss(make_loss(tiny_text_model()))


@pytest.mark.parametrize(
    ("make_loss", "columns", "labels", "words"),
    [
        (losses.ContrastiveLoss, 3, binary(4, 0), r"ContrastiveLoss cannot be evaluated on 3 column\(s\)"),
        (losses.CoSENTLoss, 3, drawn(4, 0), r"did not use the input column\(s\) negative_1"),
        (losses.TripletLoss, 2, None, r"TripletLoss cannot be evaluated on 2 column\(s\)"),
        (losses.CoSENTLoss, 2, None, "with labels None"),
        (losses.CoSENTLoss, 2, drawn(3, 0), r"labels torch\.float64 of shape \(3,\)"),
    ],
)
def test_columns_and_labels_that_do_not_fit_are_named(make_loss, columns, labels, words):
    model = tiny_text_model()
    with pytest.raises(ValueError, match=words):
        CachedLoss(make_loss(model))(text_columns(model, 4, columns), labels)


def test_the_guide_reads_each_row_once_whatever_the_mini_batches():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 7))
    plain = guided(model).double()
    seen = []
    plain.guide.register_forward_hook(lambda module, args, out: seen.append(len(out["sentence_embedding"])))
    CachedLoss(plain, mini_batch_size=3)(columns, None).backward()
    assert seen == [3, 3, 1] * 2
