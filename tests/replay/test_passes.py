"""What both passes keep of a batch between them: features in bf16 stay so until a chunk of scores is computed."""

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch import nn

from st_cached_extras import CachedInfoNCELoss, CachedLoss, CachedSigmoidLoss, CachedSupConLoss
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.testing.tiny_models import copy_columns, gradients, text_columns, tiny_text_model

ROWS = 24


def flat(of_parameters):
    return torch.cat([gradient.flatten().double() for gradient in of_parameters.values()])


def step(make_loss, dtype, labels=None):
    model = tiny_text_model().to(dtype)
    make_loss(model)(copy_columns(text_columns(model, ROWS)), labels).backward()
    return flat(gradients(model))


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_the_objective_gets_bf16_as_it_is_and_fp16_widened(dtype, kept):
    seen = []

    class Seeing(InfoNCE):
        def value_and_cotangents(self, features, **options):
            seen.extend(feature.dtype for feature in features.values())
            return super().value_and_cotangents(features, **options)

    loss = CachedInfoNCELoss(tiny_text_model().to(dtype), mini_batch_size=5)
    loss.objective = Seeing()
    value = loss(text_columns(loss.model, ROWS), None)
    value.backward()
    assert seen == [kept] * 2 and value.dtype == torch.float32


def test_cotangents_in_bf16_are_those_of_fp32_rounded_once():
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(ROWS, 16, generator=generator).bfloat16() for _ in range(2)]
    loss = CachedInfoNCELoss(tiny_text_model())
    leaves = [[column.clone().requires_grad_()] for column in columns]
    loss.calculate_loss(leaves, with_backward=True)
    exact = InfoNCE().value_and_cotangents({"anchor": columns[0], "positive": columns[1]}).cotangents
    for (leaf,), cotangent in zip(leaves, exact.values(), strict=True):
        assert torch.equal(leaf.grad, cotangent.bfloat16())


@pytest.mark.parametrize(
    ("make_loss", "labels"),
    [
        (lambda model: CachedInfoNCELoss(model, mini_batch_size=5), None),
        (lambda model: CachedInfoNCELoss(model, mini_batch_size=5, learnable_scale=True), None),
        (lambda model: CachedSigmoidLoss(model, mini_batch_size=5), None),
        (lambda model: CachedSupConLoss(model, mini_batch_size=5), torch.arange(ROWS) // 4),
        (lambda model: CachedLoss(CoSENTLoss(model), mini_batch_size=5), torch.linspace(0, 1, ROWS)),
    ],
    ids=["InfoNCE", "learned scale", "sigmoid", "SupCon", "CoSENT"],
)
def test_a_bf16_model_has_the_gradients_of_an_fp32_one_but_for_rounding(make_loss, labels):
    truth, found = (step(make_loss, dtype, labels) for dtype in (torch.float32, torch.bfloat16))
    assert nn.functional.cosine_similarity(truth, found, dim=0) > 0.99
    assert found.norm() == pytest.approx(float(truth.norm()), rel=0.1)
