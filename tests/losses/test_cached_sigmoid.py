"""CachedSigmoidLoss: plain autograd, options, labels and resumed runs."""

import pytest
import torch
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

from st_cached_extras import CachedSigmoidLoss
from st_cached_extras.testing import LossCheckCase
from st_cached_extras.testing.tiny_models import copy_columns, text_columns, tiny_text_model, to_float64


class PlainSigmoid(nn.Module):
    """One dense matrix under autograd."""

    def __init__(self, model, scale=10.0, bias=-10.0, similarity_fct=cos_sim, positives=1):
        super().__init__()
        self.model, self.similarity_fct, self.positives = model, similarity_fct, positives
        self.log_scale = nn.Parameter(torch.tensor(scale).log())
        self.logit_bias = nn.Parameter(torch.tensor(bias))

    def forward(self, columns, labels=None):
        return self.compute_loss_from_embeddings([self.model(x)["sentence_embedding"] for x in columns], labels)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        anchor, *documents = embeddings
        together = torch.eye(len(anchor)).bool() if labels is None else labels[:, None] == labels
        loss = 0.0
        for column, document in enumerate(documents):
            logits = self.log_scale.exp() * self.similarity_fct(anchor, document) + self.logit_bias
            y = torch.where(together, 1.0, -1.0) if column < self.positives else -torch.ones(together.shape)
            loss = loss - nn.functional.logsigmoid(y * logits).sum(1).mean()
        return loss


def comparable(found):
    """Of the model and of scale and bias."""
    own = {name.rsplit(".", 1)[-1]: x for name, x in found.items() if name.endswith(("log_scale", "logit_bias"))}
    return {**{name.rsplit("model.0.", 1)[-1]: x for name, x in found.items() if "model.0." in name}, **own}


class TestCachedSigmoidLoss(LossCheckCase):
    def make_loss(self, model, **kwargs):
        return CachedSigmoidLoss(model, **kwargs).to(model.dtype)

    def make_plain_loss(self, model):
        return PlainSigmoid(model).to(model.dtype)

    def comparable(self, found):
        return comparable(found)


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        dict(similarity_fct=dot_score, scale=0.5, bias=-1.0),
        dict(scale=3.0, bias=2.0, positives=1),
        dict(scale=3.0, labels_as_groups=True),
    ],
)
def test_options_reach_the_objective(options, columns):
    case = TestCachedSigmoidLoss()
    grouped = "labels_as_groups" in options
    plain = {name: value for name, value in options.items() if name != "labels_as_groups"}
    case.make_loss = lambda model, **kwargs: CachedSigmoidLoss(model, **options, **kwargs).to(model.dtype)
    case.make_plain_loss = lambda model: PlainSigmoid(model, **plain).to(model.dtype)
    case.make_labels = lambda rows, seed: torch.arange(rows) % 3 if grouped else None
    model = tiny_text_model()
    case.assert_equals_plain(model, text_columns(model, 7, columns, seed=1), 1e-10, mini_batch_size=3)


def test_several_positives_per_row_are_columns():
    case = TestCachedSigmoidLoss()
    case.make_loss = lambda model, **kwargs: CachedSigmoidLoss(model, positives=2, **kwargs).to(model.dtype)
    case.make_plain_loss = lambda model: PlainSigmoid(model, positives=2).to(model.dtype)
    model = tiny_text_model()
    case.assert_equals_plain(model, text_columns(model, 7, 4, seed=1), 1e-10, mini_batch_size=3)


def test_labels_that_are_no_groups_are_ignored():
    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 6))
    loss = CachedSigmoidLoss(model)
    assert torch.equal(loss(copy_columns(columns), torch.zeros(6)), loss(copy_columns(columns), None))


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_scale_and_bias_carry_the_outer_scale_and_matryoshkas_weights(scale):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 7))
    plain, cached = PlainSigmoid(model), CachedSigmoidLoss(model, mini_batch_size=3)
    for loss in (plain, cached):
        (MatryoshkaLoss(model, loss, [16, 4], [1.0, 0.3])(copy_columns(columns), None) * scale).backward()
    for name in ("log_scale", "logit_bias"):
        found, expected = getattr(cached.objective, name).grad, getattr(plain, name).grad
        assert torch.allclose(found, expected, rtol=1e-6) and expected.abs() > 1e-6 * scale


def test_fixed_scale_and_bias_are_no_parameters():
    loss = CachedSigmoidLoss(tiny_text_model(), learnable_scale=False, learnable_bias=False)
    assert not loss.own_parameters()
    config = loss.get_config_dict()
    assert config["scale"] == 10.0 and config["bias"] == -10.0 and config["learnable_bias"] is False
