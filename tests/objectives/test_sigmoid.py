"""The sigmoid loss equals transformers' SigLIP and its definition, whatever its options."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor, nn
from transformers import SiglipConfig, SiglipModel

from st_cached_extras.objectives import Sigmoid
from st_cached_extras.testing import ObjectiveCheckCase


def names(columns: int) -> list[str]:
    return ["anchor", "positive", *(f"negative_{k}" for k in range(1, columns - 1))]


def draw(batch_size: int, dim: int, columns: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw_one = lambda: torch.randn(batch_size, dim, generator=generator, dtype=torch.float64)  # noqa: E731
    return {name: draw_one().to(dtype) for name in names(columns)}


def double_loop(features, *, scale, bias, labels=None, positives=1, similarity_fct=cos_sim) -> Tensor:
    """The definition, one pair at a time."""
    anchor, *documents = features.values()
    total = 0.0
    for column, document in enumerate(documents):
        similarity = similarity_fct(anchor, document)
        for i, j in itertools.product(range(len(anchor)), repeat=2):
            together = i == j or (labels is not None and labels[i] == labels[j])
            y = 1.0 if together and column < positives else -1.0
            total = total - nn.functional.logsigmoid(y * (scale * similarity[i, j] + bias))
    return total / len(anchor)


def bent(a: Tensor, b: Tensor) -> Tensor:
    """A similarity without a closed form here, and not symmetric in its arguments."""
    return torch.tanh(a) @ b.T


class SigmoidChecks(ObjectiveCheckCase):
    options: ClassVar[dict] = {}
    columns = 2

    def make_objective(self):
        return Sigmoid(**self.options, chunk_size=4)

    def make_features(self, batch_size, dtype, seed):
        return draw(batch_size, 5, self.columns, seed, dtype)

    def dense_loss(self, features, *, objective, labels, reference):
        scale = objective.scale if objective.log_scale is None else objective.log_scale.exp()
        bias = objective.bias if objective.logit_bias is None else objective.logit_bias
        labels = labels if objective.labels_as_groups else None
        return double_loop(
            {name: features[name] for name in names(self.columns)},
            scale=scale,
            bias=bias,
            labels=labels,
            positives=objective.positives,
            similarity_fct=objective.similarity_fct,
        )


class TestSigmoid(SigmoidChecks):
    pass


class TestSigmoidWithFixedScaleAndBias(SigmoidChecks):
    options: ClassVar[dict] = {"scale": 3.0, "bias": -1.0, "learnable_scale": False, "learnable_bias": False}


class TestSigmoidOfDotProductsWithHardNegatives(SigmoidChecks):
    options: ClassVar[dict] = {"scale": 0.8, "bias": -2.0, "similarity_fct": dot_score}
    columns = 4


class TestSigmoidWithSeveralPositivesAndGroups(SigmoidChecks):
    options: ClassVar[dict] = {"scale": 4.0, "bias": -2.0, "positives": 2, "labels_as_groups": True}
    columns = 4

    def make_labels(self, batch_size, seed):
        return torch.randint(0, 4, (batch_size,), generator=torch.Generator().manual_seed(seed))


class TestSigmoidOfASimilarityOfItsOwn(SigmoidChecks):
    options: ClassVar[dict] = {"scale": 2.0, "bias": 0.5, "similarity_fct": bent}


@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (30.0, 3.0)])
def test_it_is_the_loss_of_transformers_siglip(scale: float, bias: float) -> None:
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = SiglipConfig(
        text_config={**tower, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
    )
    model = SiglipModel(config).double().eval()
    model.logit_scale.data.fill_(scale).log_()
    model.logit_bias.data.fill_(bias)
    output = model(
        input_ids=torch.randint(0, 32, (7, 6)), pixel_values=torch.randn(7, 3, 8, 8).double(), return_loss=True
    )
    embeds = {"anchor": output.text_embeds, "positive": output.image_embeds}
    gradients = torch.autograd.grad(output.loss, [*embeds.values(), model.logit_scale, model.logit_bias])
    objective = Sigmoid(scale, bias, similarity_fct=dot_score).double()  # SigLIP has normalised already
    objective.log_scale.data.copy_(model.logit_scale[0])
    result = objective.value_and_cotangents({name: x.detach() for name, x in embeds.items()})
    assert torch.allclose(result.loss, output.loss, rtol=1e-10)
    found = [*result.cotangents.values(), result.parameter_cotangents["log_scale"]]
    found.append(result.parameter_cotangents["logit_bias"])
    for one, other in zip(found, gradients, strict=True):
        assert (one.reshape(-1) - other.reshape(-1)).norm() <= 1e-10 * other.norm()


@pytest.mark.parametrize("bias", [-10.0, 30.0, -200.0])
def test_value_and_cotangents_stay_right_in_float32_where_sigmoids_saturate(bias: float) -> None:
    features = draw(16, 8, 2, seed=3, dtype=torch.float32)
    features["positive"][:8] = features["anchor"][:8]
    options = {"scale": 60.0, "bias": bias, "learnable_scale": False, "learnable_bias": False}
    leaves = {name: x.double().requires_grad_() for name, x in features.items()}
    expected = double_loop(leaves, scale=60.0, bias=bias)
    expected.backward()
    result = Sigmoid(**options).value_and_cotangents(features)
    assert abs(result.loss.double() - expected.detach()) <= 1e-5 * expected
    for name, cotangent in result.cotangents.items():
        assert (cotangent.double() - leaves[name].grad).norm() <= 1e-5 * leaves[name].grad.norm()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32])
def test_groups_of_any_dtype_and_labels_that_are_no_groups(dtype: torch.dtype) -> None:
    features, labels = draw(6, 4, 2, seed=1), torch.tensor([0, 1, 1, 0, 1, 0])
    grouped = Sigmoid(labels_as_groups=True)
    expected = grouped.value_and_cotangents(features, labels=labels)
    found = grouped.value_and_cotangents(features, labels=labels.to(dtype)[:, None])
    assert torch.equal(found.loss, expected.loss)
    plain = Sigmoid().value_and_cotangents(features, labels=labels)
    assert torch.equal(plain.loss, Sigmoid().value_and_cotangents(features).loss)
    assert not torch.allclose(plain.loss, expected.loss, rtol=0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale": -1.0}, ValueError, ["scale", "-1.0", "positive"]),
        ({"bias": "low"}, TypeError, ["bias", "'low'", "number"]),
        ({"bias": float("inf")}, ValueError, ["bias", "inf", "finite"]),
        ({"positives": 0}, ValueError, ["positives", "0", "positive int"]),
        ({"positives": True}, ValueError, ["positives", "True"]),
        ({"chunk_size": -1}, ValueError, ["chunk_size", "-1", "None"]),
    ],
)
def test_bad_options_say_what_was_found_and_expected(options, error, words) -> None:
    with pytest.raises(error) as caught:
        Sigmoid(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "labels", "error", "words"),
    [
        ({"labels_as_groups": True}, None, TypeError, ["labels", "None", "a group id", "column 'label'"]),
        ({"labels_as_groups": True}, torch.zeros(3), ValueError, ["labels", "(3,)", "6 rows"]),
        ({"labels_as_groups": True}, torch.zeros(6, 2), ValueError, ["labels", "(6, 2)", "one group id"]),
        ({"positives": 2}, None, ValueError, ["positives", "2 document columns", "there are 1"]),
    ],
)
def test_bad_labels_and_columns_say_what_was_found_and_expected(options, labels, error, words) -> None:
    with pytest.raises(error) as caught:
        Sigmoid(**options).value_and_cotangents(draw(6, 4, 2, seed=2), labels=labels)
    assert all(word in str(caught.value) for word in words), caught.value
