"""Every kind of loss on two ranks, gathered and not, against one process: the model's gradients and the loss's own."""

from __future__ import annotations

import copy

import pytest
import torch
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer import losses
from torch import nn

from st_cached_extras import CachedCompositeLoss, CachedInfoNCELoss, CachedLoss, CachedSigmoidLoss, CachedSupConLoss
from st_cached_extras.objectives import InfoNCE, Sigmoid
from st_cached_extras.replay import ReplayLoss
from st_cached_extras.testing.loss_check import total
from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import gradients, relative_error, tiny_text_model
from tests.distributed import ddp_cases

ROWS = (9, 6)


class Projected(ReplayLoss):
    """InfoNCE behind a head."""

    def __init__(self, model, **kwargs):
        super().__init__(model, InfoNCE(scale=3.0), **kwargs)
        self.head = nn.Linear(16, 8)

    def extract(self, outputs):
        return self.head(outputs["sentence_embedding"])


def guided(model):
    return losses.GISTEmbedLoss(model, tiny_text_model(hidden=8, seed=9).requires_grad_(False), temperature=0.5)


def composite(model, **kwargs):
    components = {
        "sigmoid": (Sigmoid(scale=4.0, bias=-1.0), 1.0),
        "projected": (Projected(model), 0.5),
        "softmax": (losses.SoftmaxLoss(model, 16, 3), 2.0),
    }
    return CachedCompositeLoss(model, components, **kwargs)


# By name: the loss for a model, and its labels for all rows of all ranks.
CASES = {
    "InfoNCE with groups and a margin": (
        lambda model, **kwargs: CachedInfoNCELoss(
            model, scale=5.0, learnable_scale=True, labels_as_groups=True, margin=0.2, **kwargs
        ),
        "classes",
    ),
    "sigmoid": (lambda model, **kwargs: CachedSigmoidLoss(model, scale=4.0, bias=-1.0, **kwargs), "none"),
    "SupCon": (lambda model, **kwargs: CachedSupConLoss(model, learnable_scale=True, **kwargs), "classes"),
    "SupCon, multi-hot": (lambda model, **kwargs: CachedSupConLoss(model, **kwargs), "multi-hot"),
    "CoSENT": (lambda model, **kwargs: CachedLoss(losses.CoSENTLoss(model), **kwargs), "scores"),
    "OnlineContrastive": (lambda model, **kwargs: CachedLoss(losses.OnlineContrastiveLoss(model), **kwargs), "bools"),
    "GIST": (lambda model, **kwargs: CachedLoss(guided(model), **kwargs), "none"),
    "softmax": (lambda model, **kwargs: CachedLoss(losses.SoftmaxLoss(model, 16, 3), **kwargs), "classes"),
    "composite": (composite, "classes"),
}


def labels_of(kind):
    count = sum(ROWS)
    generator = torch.Generator().manual_seed(0)
    return {
        "none": lambda: None,
        "classes": lambda: torch.arange(count) % 3,
        "bools": lambda: torch.arange(count) % 2 == 0,
        "scores": lambda: torch.rand(count, generator=generator),
        "multi-hot": lambda: (torch.rand(count, 5, generator=generator) < 0.4).long(),
    }[kind]()


def make_loss(name, model, **kwargs):
    torch.manual_seed(7)
    return CASES[name][0](model, mini_batch_size=4, **kwargs)


def check(names: list[str], gather: bool) -> dict[str, tuple[float, bool, float]]:
    """By case: relative error of all gradients, whether the loss is that of one process, the largest own gradient."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    layout = ddp_cases.Case(rows=ROWS, gather=gather)
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name in names:
        model = ddp_cases.make_model(layout)
        alone = make_loss(name, copy.deepcopy(model))
        loss = make_loss(name, model, gather_across_devices=gather)
        trainer = SentenceTransformerTrainer.__new__(SentenceTransformerTrainer)  # puts the wrapped model everywhere
        trainer.override_model_in_loss(loss, DistributedDataParallel(model, find_unused_parameters=True))
        labels = labels_of(CASES[name][1])
        of_ranks = [None] * world if labels is None else labels.split(ROWS)
        value = total(loss(ddp_cases.make_columns(layout, model, [rank], 0), of_ranks[rank]))
        value.backward()
        # The truth is one process on all rows, which other tests hold against plain autograd; its own parameters and
        # the model's train by themselves, without collectives.
        expected = 0.0
        groups = [(list(range(world)), labels)] if gather else [([r], of_ranks[r]) for r in range(world)]
        for ranks, group_labels in groups:
            columns = ddp_cases.make_columns(layout, alone.model, ranks, 0)
            expected = expected + total(plain(alone, columns, group_labels)) / len(groups)
        expected.backward()
        values = [None] * world
        dist.all_gather_object(values, value.item())
        own = {key: parameter.grad for key, parameter in loss.own_parameters().items()}
        truth = {key: parameter.grad for key, parameter in alone.own_parameters().items()}
        errors = [relative_error(gradients(model), gradients(alone.model))]
        if own:
            errors.append(relative_error(own, truth))
        same = abs(sum(values) / world - expected.item()) <= 1e-5 * abs(expected.item())
        found[name] = (max(errors), same, max([float(x.abs().max()) for x in truth.values()], default=1.0))
    return found


def plain(loss: ReplayLoss, columns: list[dict], labels) -> torch.Tensor:
    """The loss of one process with a graph through the model, without a replay."""
    if isinstance(loss, CachedLoss):
        return loss.loss(columns, labels)
    embeddings = [[loss.extract(loss.model(column))] for column in columns]
    return loss.calculate_loss(embeddings, labels).sum()


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "local"])
def test_two_ranks_equal_one_process(gather):
    for of_rank in run_on_ranks(check, 2, list(CASES), gather):
        for name, (error, same_loss, own_gradient) in of_rank.items():
            assert error <= 3e-6, (name, error)
            assert same_loss, name
            assert own_gradient > 1e-6, name
