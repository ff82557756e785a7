"""CachedInfoNCELoss against ST's plain loss, with every option and through the inherited checks."""

import inspect

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import (
    AdaptiveLayerLoss,
    CachedMultipleNegativesRankingLoss,
    Matryoshka2dLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import dot_score
from torch import nn

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.testing import LossCheckCase, LossEqualityCase
from st_cached_extras.testing.tiny_models import text_columns, tiny_text_model


def bilinear(a, b):
    """A similarity without a closed form here, and not symmetric in its arguments."""
    weights = torch.linspace(0.5, 1.5, a.shape[1], dtype=a.dtype)
    return torch.tanh(a * weights) @ b.T


class TestCachedInfoNCELoss(LossCheckCase):
    def make_loss(self, model, **kwargs):
        return CachedInfoNCELoss(model, **kwargs)

    def make_plain_loss(self, model):
        return MultipleNegativesRankingLoss(model)


class TestWithHardNegativesAndEveryDirection(LossCheckCase):
    num_columns = 4
    options = dict(  # noqa: RUF012
        scale=7.0,
        directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
        hardness_mode="all_negatives",
        hardness_strength=2.0,
    )

    def make_loss(self, model, **kwargs):
        return CachedInfoNCELoss(model, **self.options, **kwargs)

    def make_plain_loss(self, model):
        return MultipleNegativesRankingLoss(model, **self.options)


class TestWithACustomSimilarity(LossCheckCase):
    num_columns = 3
    options = dict(scale=0.5, similarity_fct=bilinear, directions=("query_to_doc", "doc_to_query"))  # noqa: RUF012

    def make_loss(self, model, **kwargs):
        return CachedInfoNCELoss(model, **self.options, **kwargs)

    def make_plain_loss(self, model):
        return MultipleNegativesRankingLoss(model, **self.options)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        dict(similarity_fct=dot_score, scale=1.0),
        dict(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
        dict(directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")),
        dict(hardness_mode="in_batch_negatives", hardness_strength=9.0),
        dict(hardness_mode="hard_negatives", hardness_strength=5.0),
    ],
)
def test_options_reach_the_objective(options, columns):
    case = TestCachedInfoNCELoss()
    case.make_loss = lambda model, **kwargs: CachedInfoNCELoss(model, **options, **kwargs)
    case.make_plain_loss = lambda model: MultipleNegativesRankingLoss(model, **options)
    model = tiny_text_model()
    case.assert_equals_plain(model, text_columns(model, 7, columns, seed=1), 1e-10, mini_batch_size=3)


def test_is_a_drop_in_for_the_cached_loss_of_sentence_transformers():
    theirs = inspect.signature(CachedMultipleNegativesRankingLoss).parameters
    ours = inspect.signature(CachedInfoNCELoss).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert all(ours[name].kind == inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])


class Grouped(MultipleNegativesRankingLoss):
    """Rows of one group are never each other's negatives, and the positive has a margin: masks on a dense matrix."""

    def compute_loss_from_embeddings(self, embeddings, labels):
        anchor, *documents = (nn.functional.normalize(x) for x in embeddings)
        itself = torch.eye(len(anchor)).bool()
        blocks = []
        for column, document in enumerate(documents):
            margin = 0.15 * itself.to(anchor.dtype) if column == 0 else 0.0
            block = 20.0 * (anchor @ document.T - margin)
            blocks.append(block.masked_fill((labels[:, None] == labels) & ~itself, -torch.inf))
        return nn.functional.cross_entropy(torch.cat(blocks, dim=1), torch.arange(len(anchor)))


class TestWithGroupsAndAMargin(LossEqualityCase):
    num_columns = 3

    def make_loss(self, model, **kwargs):
        return CachedInfoNCELoss(model, labels_as_groups=True, margin=0.15, **kwargs)

    def make_plain_loss(self, model):
        return Grouped(model)

    def make_labels(self, rows, seed):
        return torch.arange(rows) % 3


def test_labels_are_ignored_unless_they_are_groups():
    model = tiny_text_model()
    columns, labels = text_columns(model, 6), torch.zeros(6)
    loss = CachedInfoNCELoss(model)
    assert torch.equal(loss([dict(column) for column in columns], labels), loss([dict(c) for c in columns], None))
    with pytest.raises(TypeError, match="labels: found None, expected a group id"):
        CachedInfoNCELoss(model, labels_as_groups=True)([dict(column) for column in columns], None)


def test_one_column_is_refused_by_name():
    model = tiny_text_model()
    with pytest.raises(ValueError, match="positive"):
        CachedInfoNCELoss(model)(text_columns(model, 3, 1))


def test_temperature_is_the_inverse_scale():
    assert CachedInfoNCELoss(tiny_text_model(), scale=20.0).temperature == pytest.approx(0.05)


def test_decorators_that_need_the_models_forward_warn_as_for_the_cached_losses_of_sentence_transformers():
    model = tiny_text_model()
    for loss in (CachedMultipleNegativesRankingLoss(model), CachedInfoNCELoss(model)):
        with pytest.warns(UserWarning, match=f"AdaptiveLayerLoss is not compatible with {type(loss).__name__}"):
            AdaptiveLayerLoss(model, loss)
        with pytest.warns(UserWarning, match="AdaptiveLayerLoss is not compatible with MatryoshkaLoss"):
            Matryoshka2dLoss(model, loss, matryoshka_dims=[16, 8])
