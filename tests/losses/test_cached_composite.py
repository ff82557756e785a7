"""CachedCompositeLoss: every kind of component on one embedding pass, and what the Trainer sees of it."""

import copy

import pytest
import torch
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn

from st_cached_extras import CachedCompositeLoss, CachedInfoNCELoss, CachedLoss, CachedSupConLoss
from st_cached_extras.objectives import InfoNCE, Sigmoid, SupCon
from st_cached_extras.replay import ReplayLoss
from st_cached_extras.testing import LossCheckCase
from st_cached_extras.testing.dense_rbf import DenseRBF
from st_cached_extras.testing.loss_check import total
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    relative_error,
    text_columns,
    tiny_text_model,
    to_float64,
)


class PlainSum(nn.Module):
    """The components one after the other, each with a forward of its own."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.ranking = losses.MultipleNegativesRankingLoss(model, scale=5.0)
        self.cosent = losses.CoSENTLoss(model)

    def forward(self, columns, labels=None):
        return self.compute_loss_from_embeddings([self.model(x)["sentence_embedding"] for x in columns], labels)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        ranking = self.ranking.compute_loss_from_embeddings(embeddings, None)
        return 0.7 * ranking + 2.0 * self.cosent.compute_loss_from_embeddings(embeddings, labels)


def scores(rows, seed=0):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestCachedCompositeLoss(LossCheckCase):
    def make_loss(self, model, **kwargs):
        components = {"ranking": (InfoNCE(scale=5.0), 0.7), "cosent": (losses.CoSENTLoss(model), 2.0)}
        return CachedCompositeLoss(model, components, **kwargs)

    def make_plain_loss(self, model):
        return PlainSum(model)

    def make_labels(self, rows, seed):
        return scores(rows, seed)


# ------------------------------------------------------------------------------ components that extract for themselves


class Projected(ReplayLoss):
    """A loss with a head and a reference of its own, on all columns as one cloud."""

    def __init__(self, model, width=6):
        super().__init__(model, DenseRBF(learnable_width=True))
        torch.manual_seed(1)
        self.head = nn.Linear(16, width)
        self.calls = 0
        self.to(model.dtype)

    def extract(self, outputs):
        self.calls += 1
        return self.head(outputs["sentence_embedding"]).unflatten(1, (2, -1))

    def to_features(self, columns):
        return {"cloud": torch.cat(list(columns))}

    def to_targets(self, labels):
        generator = torch.Generator().manual_seed(2)
        return None, {"cloud": torch.randn(5, 2, 3, generator=generator).to(labels.dtype)}


def composite(model, **kwargs):
    projected = Projected(model)
    components = {
        "ranking": (CachedInfoNCELoss(model, scale=5.0, learnable_scale=True), 1.0),
        "cloud": (projected, 0.5),
        "cosent": (CachedLoss(losses.CoSENTLoss(model)), 2.0),
    }
    return CachedCompositeLoss(model, components, **kwargs), projected


def dense(model, projected, ranking_log_scale, columns, labels):
    """The same by plain autograd: (ranking, cloud, cosent), weighted."""
    embeddings = [model(column)["sentence_embedding"] for column in copy_columns(columns)]
    u, v = (nn.functional.normalize(x) for x in embeddings)
    ranking = nn.functional.cross_entropy(ranking_log_scale.exp() * u @ v.T, torch.arange(len(u)))
    cloud = torch.cat([projected.head(x).unflatten(1, (2, -1)) for x in embeddings])
    reference = projected.to_targets(labels)[1]["cloud"]
    value = projected.objective._of_branch(cloud, reference.to(cloud.dtype), projected.objective.log_width)
    cosent = losses.CoSENTLoss(model).compute_loss_from_embeddings(embeddings, labels)
    return ranking, 0.5 * value, 2.0 * cosent


def test_components_with_heads_references_and_parameters_equal_plain_autograd():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 7))
    loss, projected = composite(model, mini_batch_size=3)
    loss.double()
    found = loss(copy_columns(columns), scores(7))
    (3 * total(found)).backward()
    found_gradients = gradients(loss)
    loss.zero_grad()
    log_scale = loss.objective.objectives["ranking"].log_scale
    expected = dense(model, projected, log_scale, columns, scores(7))
    (3 * sum(expected)).backward()
    assert list(found) == ["ranking", "cloud", "cosent"]
    for value, truth in zip(found.values(), expected, strict=True):
        assert torch.allclose(value, truth, rtol=1e-10)
    truth = gradients(loss)
    assert relative_error(found_gradients, truth) <= 1e-10
    for name in ("components.cloud.head.weight", "objective.objectives.ranking.log_scale"):
        assert truth[name].any()
    assert set(loss.own_parameters()) == {
        "objective.objectives.ranking.log_scale",
        "objective.objectives.cloud.log_width",
        "components.cloud.head.weight",
        "components.cloud.head.bias",
    }


def test_every_component_extracts_once_per_mini_batch():
    model = tiny_text_model()
    loss, projected = composite(model, mini_batch_size=3)
    forwards = []
    model.register_forward_hook(lambda *args: forwards.append(1))
    total(loss(text_columns(model, 7), scores(7))).backward()
    assert projected.calls == len(forwards) == 2 * 2 * 3


def test_selected_rows_of_all_components_are_unbiased():
    model, columns = to_float64(model := tiny_text_model(hidden=16, layers=1), text_columns(model, 4))

    def found(row=None):
        loss, _ = composite(model, mini_batch_size=2, differentiated_samples=None if row is None else 1)
        loss.double()
        loss.select_rows = lambda count, rank: torch.tensor([row])
        model.zero_grad()
        total(loss(copy_columns(columns), scores(4))).backward()
        return gradients(loss)

    everything, draws = found(), [found(row) for row in range(4)]
    mean = {name: sum(draw[name] for draw in draws) / 4 for name in everything}
    assert relative_error(mean, everything) <= 1e-10


def test_the_first_entry_carries_the_gradient_and_the_rest_are_detached():
    model = tiny_text_model()
    loss, _ = composite(model, mini_batch_size=3)
    first, *others = loss(text_columns(model, 5), scores(5)).values()
    assert first.requires_grad and not any(other.requires_grad for other in others)
    with torch.no_grad():
        evaluated = loss(text_columns(model, 5), scores(5))
    assert not any(value.requires_grad for value in evaluated.values())


def test_matryoshka_over_components_that_extract_for_themselves_is_refused_at_the_first_forward():
    model = tiny_text_model()
    loss, _ = composite(model)
    with pytest.raises(ValueError, match="MatryoshkaLoss truncates them"):
        MatryoshkaLoss(model, loss, [16, 8])(text_columns(model, 5), scores(5))


def test_matryoshka_truncates_labels_that_are_embeddings_too():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 5))
    labels = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).double()
    plain = MatryoshkaLoss(model, losses.MSELoss(model), [16, 8])
    plain(copy_columns(columns), labels).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = CachedCompositeLoss(model, {"mse": (losses.MSELoss(model), 1.0)}, mini_batch_size=2)
    total(MatryoshkaLoss(model, loss, [16, 8])(copy_columns(columns), labels)).backward()
    assert relative_error(gradients(model), expected) <= 1e-10


def test_metrics_and_parts_of_components_are_reported_under_their_names():
    model = tiny_text_model()
    components = {
        "classes": (SupCon(), 1.0),
        "spread": (losses.GlobalOrthogonalRegularizationLoss(model), 0.1),
    }
    loss = CachedCompositeLoss(model, components)
    found = loss(text_columns(model, 5), torch.tensor([0, 0, 1, 1, 2]))
    assert list(found) == ["classes", "spread"]
    assert set(loss.metrics) == {
        "classes/rows_without_positives",
        "spread/gor_mean",
        "spread/gor_second_moment",
    }


def test_objectives_read_the_labels_and_losses_read_them_in_their_own_way():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 6))
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    components = {
        "objective": (InfoNCE(labels_as_groups=True), 1.0),
        "ignoring": (CachedInfoNCELoss(model), 1.0),
        "classes": (CachedSupConLoss(model), 1.0),
    }
    found = CachedCompositeLoss(model, components, mini_batch_size=2)(copy_columns(columns), labels)
    grouped = CachedInfoNCELoss(model, labels_as_groups=True)(copy_columns(columns), labels)
    assert torch.allclose(found["objective"], grouped, rtol=1e-12)
    assert torch.allclose(found["ignoring"], CachedInfoNCELoss(model)(copy_columns(columns), None), rtol=1e-12)
    assert torch.allclose(found["classes"], CachedSupConLoss(model)(copy_columns(columns), labels), rtol=1e-12)


def test_the_configuration_names_every_component_and_the_citation_all_papers():
    model = tiny_text_model()
    components = {
        "ranking": (CachedInfoNCELoss(model), 1.0),
        "sigmoid": (Sigmoid(), 0.5),
        "cosent": (losses.CoSENTLoss(model), 2.0),
    }
    loss = CachedCompositeLoss(model, components, mini_batch_size=4)
    config = loss.get_config_dict()
    assert config["mini_batch_size"] == 4
    named = config["components"]
    assert [named[name]["type"] for name in named] == ["CachedInfoNCELoss", "Sigmoid", "CachedLoss"]
    assert named["cosent"]["loss"] == "CoSENTLoss" and named["cosent"]["weight"] == 2.0
    assert named["sigmoid"]["bias"] == -10.0 and "mini_batch_size" not in named["sigmoid"]
    assert loss.citation.count("gao2021scaling") == 1
    assert "oord2019" in loss.citation and "cosent" in loss.citation.lower()


def test_a_copy_trains_alone():
    model = tiny_text_model()
    loss, _ = composite(model, mini_batch_size=3)
    other = copy.deepcopy(loss)
    total(other(text_columns(model, 5), scores(5))).backward()
    assert all(parameter.grad is None for parameter in loss.parameters())
    assert other.components["cloud"].head.weight.grad.any()


@pytest.mark.parametrize(
    ("make_components", "error", "words"),
    [
        (lambda model: {}, ValueError, "at least one component"),
        (lambda model: [(InfoNCE(), 1.0)], ValueError, "at least one component"),
        (lambda model: {"a.b": (InfoNCE(), 1.0)}, ValueError, "without a dot"),
        (lambda model: {"training": (InfoNCE(), 1.0)}, ValueError, "no attribute"),
        (lambda model: {"a": InfoNCE()}, TypeError, r"losses\['a'\].*expected \(objective or loss, weight\)"),
        (lambda model: {"a": (InfoNCE(), "much")}, ValueError, "weight 'much', expected a finite number"),
        (lambda model: {"a": (InfoNCE(), float("nan"))}, ValueError, "weight nan"),
        (lambda model: {"a": (losses.CoSENTLoss(tiny_text_model(seed=3)), 1.0)}, ValueError, "another model"),
        (lambda model: {"a": (losses.CachedMultipleNegativesRankingLoss(model), 1.0)}, ValueError, "caches already"),
        (
            lambda model: {"a": (CachedCompositeLoss(model, {"b": (InfoNCE(), 1.0)}), 1.0)},
            TypeError,
            "composite inside a composite",
        ),
        (lambda model: {"a": (losses.GISTEmbedLoss(model, tiny_text_model()), 1.0)}, TypeError, "its guide's"),
    ],
)
def test_bad_components_are_named(make_components, error, words):
    model = tiny_text_model()
    with pytest.raises(error, match=words):
        CachedCompositeLoss(model, make_components(model))


def test_components_adapt_to_their_own_metrics_once_per_training_forward():
    class Adapting(CachedSupConLoss):
        def update_balance(self, metrics):
            seen.append(dict(metrics))

    seen = []
    model = tiny_text_model()
    loss = CachedCompositeLoss(model, {"first": (InfoNCE(), 1.0), "second": (Adapting(model), 1.0)})
    labels = torch.tensor([0, 0, 1])
    total(loss(text_columns(model, 3, 2), labels)).backward()
    with torch.no_grad():
        loss(text_columns(model, 3, 2), labels)
    assert seen == [{"rows_without_positives": torch.tensor(0)}]
    seen.clear()
    Adapting(model)(text_columns(model, 3, 1), labels)
    assert seen == [{"rows_without_positives": torch.tensor(1)}]
