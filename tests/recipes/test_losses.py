"""Losses by name are those that the name says, and train."""

from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers.sentence_transformer import losses as st_losses

from st_cached_extras import CachedInfoNCELoss, CachedLoss, CachedSigmoidLoss, CachedSupConLoss
from st_cached_extras.objectives.mmd import NystromReference
from st_cached_extras.recipes.arguments import LossArguments
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.losses import LOSSES, losses_of_sentence_transformers, make_loss
from st_cached_extras.recipes.training import make_losses
from st_cached_extras.testing.tiny_models import copy_columns, gradients, text_columns, tiny_text_model

LABELS = torch.tensor([0, 1, 0, 1, 2, 2])


def arguments(*names: str, options: dict | None = None, **kwargs) -> LossArguments:
    given = None if options is None else [json.dumps(options)]
    return LossArguments(loss=list(names), loss_options=given, mini_batch_size=2, **kwargs)


def options_of(name: str, folder) -> dict:
    """What a loss needs beside the model."""
    if name == "mmd":
        NystromReference.fit(torch.randn(40, 16), landmarks=8).save(folder / "x.safetensors")
        return {"references": {"x": str(folder / "x.safetensors")}}
    if name == "GISTEmbedLoss":
        tiny_text_model(seed=3).save_pretrained(str(folder / "guide"), create_model_card=False)
        return {"guide": str(folder / "guide")}
    if name == "SoftmaxLoss":
        return {"sentence_embedding_dimension": 16, "num_labels": 3}
    return {}


def labels_of(name: str) -> torch.Tensor | None:
    if name in ("MSELoss", "EmbedDistillLoss"):
        return torch.randn(6, 16)
    if name in ("MarginMSELoss", "CoSENTLoss", "AnglELoss", "CosineSimilarityLoss"):
        return torch.rand(6)
    if name == "DistillKLDivLoss":
        return torch.rand(6, 2)
    if name in ("ContrastiveLoss", "OnlineContrastiveLoss"):
        return torch.tensor([0, 1, 0, 1, 1, 0])
    return LABELS


COLUMNS = {"TripletLoss": 3, "MarginMSELoss": 3, "DistillKLDivLoss": 3, "MSELoss": 1, "EmbedDistillLoss": 1}


@pytest.mark.parametrize("name", [*LOSSES, *losses_of_sentence_transformers()])
def test_every_loss_in_the_list_trains(name, tmp_path):
    torch.manual_seed(0)
    model = tiny_text_model()
    loss = make_loss(model, arguments(name, options=options_of(name, tmp_path)))
    columns = text_columns(model, 6, 1 if name.startswith("Batch") else COLUMNS.get(name, 2))
    value = loss(copy_columns(columns), labels_of(name))
    value = value if isinstance(value, torch.Tensor) else torch.stack(list(value.values())).sum()
    value.backward()
    assert value.isfinite() and sum(g.abs().sum() for g in gradients(model).values()) > 0


@pytest.mark.parametrize(
    "name, cls", [("infonce", CachedInfoNCELoss), ("sigmoid", CachedSigmoidLoss), ("supcon", CachedSupConLoss)]
)
def test_our_names_make_our_losses_with_their_options(name, cls):
    loss = make_loss(tiny_text_model(), arguments(name, options={}))
    assert type(loss) is cls and loss.mini_batch_size == 2


def test_symmetric_is_the_mean_of_both_directions():
    model = tiny_text_model()
    columns = text_columns(model, 6)
    found = make_loss(model, arguments("symmetric"))(copy_columns(columns), None)
    there = st_losses.MultipleNegativesRankingLoss(model)(copy_columns(columns), None)
    back = st_losses.MultipleNegativesRankingLoss(model)(copy_columns(columns[::-1]), None)
    assert torch.allclose(found, (there + back) / 2, atol=1e-5)


def test_a_loss_of_sentence_transformers_is_cached_with_its_own_options():
    model = tiny_text_model()
    columns, scores = text_columns(model, 6), torch.rand(6)
    loss = make_loss(model, arguments("CoSENTLoss", options={"scale": 3.0}))
    assert isinstance(loss, CachedLoss)
    plain = st_losses.CoSENTLoss(model, scale=3.0)
    assert torch.allclose(loss(copy_columns(columns), scores), plain(copy_columns(columns), scores), atol=1e-6)


def test_several_dimensions_are_trained_by_matryoshka():
    loss = make_loss(tiny_text_model(), arguments("infonce", matryoshka_dims=[16, 8]))
    assert isinstance(loss, st_losses.MatryoshkaLoss)
    with pytest.raises(UsageError, match="--loss infonce cannot be made"):
        make_loss(tiny_text_model(), arguments("infonce", matryoshka_dims=[1000]))


@pytest.mark.parametrize(
    "names, options, message",
    [
        (["magic"], None, "There is no loss 'magic'; the losses are infonce, symmetric, sigmoid"),
        (["infonce"], {"skale": 3}, r"--loss infonce cannot be made with --loss_options {\"skale\": 3}: .*skale"),
        (["infonce"], {"scale": -1}, "--loss infonce cannot be made"),
        (["mmd"], {"references": {"x": "nowhere.safetensors"}}, "--loss mmd cannot be made .*nowhere"),
        (["mmd"], None, "--loss mmd cannot be made .*references"),
    ],
)
def test_what_cannot_be_made_is_told_with_the_reason(names, options, message):
    with pytest.raises(UsageError, match=message):
        make_loss(tiny_text_model(), arguments(*names, options=options))


def test_options_that_are_no_json_are_told():
    for text in ("scale=3", "[1]", "3"):
        with pytest.raises(UsageError, match="--loss_options must be"):
            make_loss(tiny_text_model(), LossArguments(loss_options=[text]))


def test_each_dataset_may_have_its_loss():
    model = tiny_text_model()
    losses = make_losses(model, arguments("infonce", "CoSENTLoss"), {"a": None, "b": None})
    assert type(losses["a"]) is CachedInfoNCELoss and type(losses["b"]) is CachedLoss
    assert type(make_losses(model, arguments("infonce"), {"a": None, "b": None})) is CachedInfoNCELoss
    with pytest.raises(UsageError, match=r"--loss has 2 values for 3 dataset\(s\)"):
        make_losses(model, arguments("infonce", "sigmoid"), {"a": None, "b": None, "c": None})
    with pytest.raises(UsageError, match="--loss has 2 names for one dataset"):
        make_losses(model, arguments("infonce", "sigmoid"), None)
