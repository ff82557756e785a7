"""A learned scale: its gradient against autograd, alone, under an outer scale, under Matryoshka and over ranks."""

import itertools

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.testing import LossCheckCase
from st_cached_extras.testing.thread_world import run_ranks
from st_cached_extras.testing.tiny_models import text_columns, tiny_text_model, to_float64


class LearnedScale(MultipleNegativesRankingLoss):
    """ST's plain loss whose similarity is multiplied by exp(log_scale), and its own scale left at one.

    Not a parameter in place of ST's scale: that multiplies the masked scores, -inf, and its derivative is NaN.
    """

    def __init__(
        self, model, scale=20.0, dtype=torch.float32, similarity_fct=cos_sim, hardness_strength=0.0, **options
    ):
        super().__init__(model, scale=1.0, hardness_strength=hardness_strength, **options)
        self.log_scale = nn.Parameter(torch.tensor(scale, dtype=dtype).log())
        self.plain_similarity, self.plain_strength = similarity_fct, hardness_strength

    def compute_loss_from_embeddings(self, embeddings, labels):
        s = self.log_scale.exp()
        self.similarity_fct = lambda a, b: s * self.plain_similarity(a, b)
        self.hardness_strength = self.plain_strength / s.detach()
        return super().compute_loss_from_embeddings(embeddings, labels)


class TestLearnableScale(LossCheckCase):
    def make_loss(self, model, **kwargs):
        return CachedInfoNCELoss(model, learnable_scale=True, **kwargs)

    def make_plain_loss(self, model):
        return LearnedScale(model)


def bilinear(a, b):
    return torch.tanh(a @ b.T)


def case(directions=("query_to_doc",), seed=0, columns=3, **options):
    generator = torch.Generator().manual_seed(seed)
    names = ["anchor", "positive", "negative_1"][:columns]
    features = {name: torch.randn(9, 5, generator=generator, dtype=torch.float64) for name in names}
    options = dict(scale=3.0, directions=directions, **options)
    truth = LearnedScale(None, dtype=torch.float64, **options)
    leaves = [feature.clone().requires_grad_() for feature in features.values()]
    value = truth.compute_loss_from_embeddings(leaves, None)
    value.backward()
    objective = InfoNCE(**options, learnable_scale=True, chunk_size=4).double()
    objective.log_scale.data.copy_(truth.log_scale)
    return objective, features, value.detach(), truth.log_scale.grad, [leaf.grad for leaf in leaves]


OTHERS = ("query_to_query", "doc_to_query", "doc_to_doc")
DIRECTION_SETS = [("query_to_doc", *extra) for n in range(4) for extra in itertools.combinations(OTHERS, n)]


@pytest.mark.parametrize("similarity_fct", [cos_sim, dot_score, bilinear])
@pytest.mark.parametrize("hardness_mode", [None, "in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("directions", DIRECTION_SETS)
def test_its_cotangent_equals_autograd(directions, hardness_mode, similarity_fct):
    objective, features, value, expected, gradients = case(
        directions, hardness_mode=hardness_mode, hardness_strength=1.5, similarity_fct=similarity_fct
    )
    for rows in (None, torch.tensor([7, 2])):
        result = objective.value_and_cotangents(features, rows=rows)
        assert torch.allclose(result.loss, value, rtol=1e-10)
        assert torch.allclose(result.parameter_cotangents["log_scale"], expected, rtol=1e-10)
        for found, gradient in zip(result.cotangents.values(), gradients, strict=True):
            assert torch.allclose(found, gradient if rows is None else gradient[rows], rtol=1e-9, atol=1e-13)


def test_its_cotangent_equals_autograd_per_direction():
    objective, features, _, expected, _ = case(("query_to_doc", "doc_to_query"), partition_mode="per_direction")
    assert torch.allclose(
        objective.value_and_cotangents(features).parameter_cotangents["log_scale"], expected, rtol=1e-10
    )


@pytest.mark.parametrize("counts", [[5, 4], [1, 6, 2]])
def test_its_cotangent_is_complete_on_every_rank(counts):
    objective, features, _, expected, _ = case(DIRECTION_SETS[-1])
    shards = [
        dict(zip(features, rows, strict=True))
        for rows in zip(*(f.split(counts) for f in features.values()), strict=True)
    ]
    results, _ = run_ranks(len(counts), lambda world: objective.value_and_cotangents(shards[world.rank], world=world))
    for result in results:
        assert torch.allclose(result.parameter_cotangents["log_scale"], expected, rtol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("matryoshka", [False, True])
def test_its_gradient_carries_the_outer_scale_and_matryoshkas_weights(matryoshka, scale):
    model = tiny_text_model()
    model, columns = to_float64(model, text_columns(model, 7))
    plain, cached = LearnedScale(model).double(), CachedInfoNCELoss(model, learnable_scale=True).double()
    wrap = (lambda loss: MatryoshkaLoss(model, loss, [16, 4], [1.0, 0.3])) if matryoshka else (lambda loss: loss)
    for loss in (wrap(plain), wrap(cached)):
        (loss([dict(column) for column in columns], None) * scale).backward()
    assert torch.allclose(cached.objective.log_scale.grad, plain.log_scale.grad, rtol=1e-10)
    assert plain.log_scale.grad.abs() > 1e-6


def test_its_gradients_accumulate():
    model = tiny_text_model()
    loss, columns = CachedInfoNCELoss(model, learnable_scale=True), text_columns(model, 5)
    for _ in range(2):
        loss([dict(column) for column in columns], None).backward()
    twice = loss.objective.log_scale.grad.clone()
    loss.zero_grad()
    loss([dict(column) for column in columns], None).backward()
    assert torch.allclose(twice, 2 * loss.objective.log_scale.grad)


def test_a_scale_that_is_not_learned_is_no_parameter_and_can_be_set():
    loss = CachedInfoNCELoss(tiny_text_model(), scale=5.0)
    assert list(loss.objective.parameters()) == [] and loss.scale == 5.0
    learned = CachedInfoNCELoss(tiny_text_model(), scale=5.0, learnable_scale=True)
    assert learned.scale == pytest.approx(5.0)
    learned.objective.scale = 8.0
    assert learned.objective.log_scale.exp().item() == pytest.approx(8.0)
    assert learned.get_config_dict()["learnable_scale"] is True
