"""CachedSupConLoss against plain autograd: classes, multi-hot rows, and one or several columns."""

import pytest
import torch
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

from st_cached_extras import CachedSupConLoss
from st_cached_extras.testing import LossCheckCase, LossEqualityCase
from st_cached_extras.testing.tiny_models import text_columns, tiny_text_model


class PlainSupCon(nn.Module):
    """One dense matrix under autograd."""

    def __init__(self, model, scale=10.0, similarity_fct=cos_sim):
        super().__init__()
        self.model, self.scale, self.similarity_fct = model, scale, similarity_fct

    def forward(self, columns, labels=None):
        return self.compute_loss_from_embeddings([self.model(x)["sentence_embedding"] for x in columns], labels)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        z, rows = torch.cat(embeddings), torch.arange(len(embeddings[0])).repeat(len(embeddings))
        positive = rows[:, None] == rows
        if labels is not None:
            hot = labels if labels.ndim == 2 else nn.functional.one_hot(labels.long())
            positive = positive | (hot[rows].float() @ hot[rows].float().T > 0)
        itself = torch.eye(len(z)).bool()
        positive = positive & ~itself
        log_p = (self.scale * self.similarity_fct(z, z)).masked_fill(itself, -torch.inf).log_softmax(1)
        each = -log_p.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp_min(1)
        return each.sum() / positive.any(1).sum().clamp_min(1)


class TestCachedSupConOfTwoViews(LossCheckCase):
    def make_loss(self, model, **kwargs):
        return CachedSupConLoss(model, **kwargs)

    def make_plain_loss(self, model):
        return PlainSupCon(model)

    def make_labels(self, rows, seed):
        return torch.arange(rows) % 3


class TestCachedSupConOfOneColumn(LossEqualityCase):
    num_columns = 1

    def make_loss(self, model, **kwargs):
        return CachedSupConLoss(model, **kwargs)

    def make_plain_loss(self, model):
        return PlainSupCon(model)

    def make_labels(self, rows, seed):
        return torch.arange(rows) % 3


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("labels", ["classes", "multi-hot", None])
def test_every_form_of_labels_and_columns_equals_the_plain_loss(columns, labels):
    if columns == 1 and labels is None:
        return
    case = TestCachedSupConOfTwoViews()
    options = dict(scale=2.0, similarity_fct=dot_score)
    case.make_loss = lambda model, **kwargs: CachedSupConLoss(model, **options, **kwargs)
    case.make_plain_loss = lambda model: PlainSupCon(model, **options)
    made = {
        "classes": torch.tensor([4, 1, 1, 9, 4, 4, 7]),
        "multi-hot": torch.eye(7)[[0, 1, 1, 2, 0, 3, 3]] + torch.eye(7)[[0, 1, 2, 3, 4, 5, 6]] > 0,
        None: None,
    }[labels]
    case.make_labels = lambda rows, seed: made
    model = tiny_text_model()
    case.assert_equals_plain(model, text_columns(model, 7, columns, seed=1), 1e-10, mini_batch_size=3)


def test_rows_without_positives_are_counted_at_every_forward():
    model = tiny_text_model()
    loss = CachedSupConLoss(model, mini_batch_size=2)
    loss(text_columns(model, 5, 1), torch.tensor([0, 1, 0, 2, 3])).backward()
    assert loss.metrics["rows_without_positives"] == 3
    with torch.no_grad():
        loss(text_columns(model, 3, 1), torch.tensor([0, 0, 0]))
    assert loss.metrics["rows_without_positives"] == 0


def test_one_column_without_classes_is_refused_with_the_way_out():
    model = tiny_text_model()
    with pytest.raises(TypeError, match=r"labels: found None.*column 'label'"):
        CachedSupConLoss(model)(text_columns(model, 3, 1), None)
