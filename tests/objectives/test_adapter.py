"""Losses of sentence-transformers as objectives, against definitions of their own, through the inherited checks."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer import losses
from torch import nn

from st_cached_extras.objectives import LossObjective
from st_cached_extras.objectives.adapter import loss_options
from st_cached_extras.testing import ObjectiveCheckCase
from st_cached_extras.testing.tiny_models import tiny_text_model


def pairs(batch_size, dtype, seed, columns=("anchor", "positive")):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(batch_size, 5, generator=generator, dtype=torch.float64).to(dtype) for name in columns}


class TestCoSENTAsAnObjective(ObjectiveCheckCase):
    def make_objective(self):
        return LossObjective(losses.CoSENTLoss(None, scale=3.0))

    def make_features(self, batch_size, dtype, seed):
        return pairs(batch_size, dtype, seed)

    def make_labels(self, batch_size, seed):
        return torch.rand(batch_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def dense_loss(self, features, *, objective, labels, reference):
        similarity = torch.cosine_similarity(features["anchor"], features["positive"])
        exponents = [torch.zeros((), dtype=similarity.dtype) + 0.0 * similarity.sum()]
        for i in range(len(labels)):
            exponents += [3.0 * (similarity[j] - similarity[i]) for j in range(len(labels)) if labels[i] > labels[j]]
        return torch.stack(exponents).logsumexp(0)


class TestALossWithParametersThatIsCalledWhole(ObjectiveCheckCase):
    """The classifier is the loss's own; the model that it also holds is not."""

    def make_objective(self):
        torch.manual_seed(3)
        return LossObjective(losses.SoftmaxLoss(tiny_text_model(), 5, 3))

    def make_features(self, batch_size, dtype, seed):
        return pairs(batch_size, dtype, seed)

    def make_labels(self, batch_size, seed):
        return torch.randint(0, 3, (batch_size,), generator=torch.Generator().manual_seed(seed))

    def dense_loss(self, features, *, objective, labels, reference):
        u, v = features["anchor"], features["positive"]
        logits = torch.cat([u, v, (u - v).abs()], dim=1) @ objective.loss.classifier.weight.T
        log_p = (logits + objective.loss.classifier.bias).log_softmax(1)
        return -sum(log_p[i, label] for i, label in enumerate(labels)) / len(labels)


def test_a_loss_of_several_values_has_them_as_components():
    features = pairs(6, torch.float64, 0)
    loss = losses.GlobalOrthogonalRegularizationLoss(None)
    result = LossObjective(loss).value_and_cotangents(features)
    expected = loss.compute_loss_from_embeddings(list(features.values()))
    assert result.components.keys() == expected.keys()
    assert all(torch.equal(result.components[name], value) for name, value in expected.items())
    assert torch.equal(result.loss, sum(expected.values()))


def test_columns_that_the_loss_does_not_use_have_no_cotangents():
    features = pairs(6, torch.float64, 0, ("anchor", "positive", "negative_1"))
    result = LossObjective(losses.CoSENTLoss(None)).value_and_cotangents(features, labels=torch.arange(6))
    assert list(result.cotangents) == ["anchor", "positive"]


class Constant(nn.Module):
    def compute_loss_from_embeddings(self, embeddings, labels):
        return {"whole": embeddings[0].sum(), "part": self.value(embeddings[0])}

    def value(self, x):
        return x.detach().sum()


class Vector(Constant):
    def value(self, x):
        return x.sum(1)


class Number(Constant):
    def value(self, x):
        return 3.0


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Constant(), r"Constant returned torch\.float64 of shape \(\) without a graph as part"),
        (Vector(), r"Vector returned torch\.float64 of shape \(4,\) as part"),
        (Number(), "Number returned of type float as part"),
    ],
)
def test_a_value_that_is_no_scalar_with_a_graph_is_named(loss, words):
    with pytest.raises(ValueError, match=words):
        LossObjective(loss).value_and_cotangents(pairs(4, torch.float64, 0))


def test_what_does_not_compute_from_embeddings_is_refused():
    with pytest.raises(TypeError, match="Linear has no method compute_loss_from_embeddings"):
        LossObjective(nn.Linear(2, 2))


def test_the_configuration_of_any_loss_is_plain_and_the_same_in_every_process():
    model = tiny_text_model()
    options = loss_options(losses.GISTEmbedLoss(model, model))
    assert options["guide"].endswith("SentenceTransformer") and options["temperature"] == 0.01
    assert loss_options(losses.TripletLoss(model))["distance_metric"] == "TripletDistanceMetric.EUCLIDEAN"
    assert loss_options(Constant()) == {}


def test_the_loss_is_left_as_it_was_even_if_it_fails():
    model = tiny_text_model()
    loss = losses.SoftmaxLoss(model, 5, 3)
    objective = LossObjective(loss)
    objective.value_and_cotangents(pairs(4, torch.float32, 0), labels=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="SoftmaxLoss cannot be evaluated"):
        objective.value_and_cotangents(pairs(4, torch.float32, 0), labels=torch.zeros(3, dtype=torch.int64))
    assert loss.model is model
