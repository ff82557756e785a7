"""Parameters that a loss owns outside its objective: heads in the replayed forward, and in what follows it."""

import copy

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    relative_error,
    text_columns,
    tiny_text_model,
    to_float64,
)
from tests.distributed import ddp_cases


def make_head(seed, width=16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))


class WithHeads(CachedInfoNCELoss):
    """One head before the embeddings are collected, one after, and one that nothing uses."""

    def __init__(self, model, **kwargs):
        super().__init__(model, scale=3.0, **kwargs)
        self.before, self.after, self.unused = make_head(1), make_head(2), make_head(3)
        self.to(next(model.parameters()).dtype)

    def extract(self, outputs):
        return self.before(outputs["sentence_embedding"])

    def to_features(self, columns):
        return super().to_features([self.after(column) for column in columns])


class PlainWithHeads(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.before, self.after, self.unused = make_head(1), make_head(2), make_head(3)
        self.plain = MultipleNegativesRankingLoss(model, scale=3.0)
        self.to(next(model.parameters()).dtype)

    def forward(self, columns, labels=None):
        return self.compute_loss_from_embeddings([self.model(column)["sentence_embedding"] for column in columns])

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        return self.plain.compute_loss_from_embeddings([self.after(self.before(x)) for x in embeddings], labels)


def of_heads(loss):
    found = gradients(loss)
    return {name: found[name] for name in found if name.startswith(("before", "after", "unused"))}


def case(rows=7, dropout=0.0, **kwargs):
    model, columns = to_float64(model := tiny_text_model(dropout=dropout), text_columns(model, rows))
    return WithHeads(model, mini_batch_size=3, **kwargs), PlainWithHeads(copy.deepcopy(model)), columns


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_every_head_trains_as_with_the_plain_loss_and_an_unused_one_has_no_gradient(scale):
    loss, plain, columns = case()
    for each in (loss, plain):
        (each(copy_columns(columns), None) * scale).backward()
    assert relative_error(of_heads(loss), of_heads(plain)) <= 1e-10
    assert relative_error(gradients(loss.model), gradients(plain.model)) <= 1e-10
    assert all(loss.get_parameter(name).grad.any() for name in ("before.0.weight", "after.0.weight"))
    assert all(parameter.grad is None for parameter in loss.unused.parameters())


def test_a_frozen_model_still_trains_the_heads():
    loss, plain, columns = case()
    for each in (loss, plain):
        each.model.requires_grad_(False)
        each(copy_columns(columns), None).backward()
    assert relative_error(of_heads(loss), of_heads(plain)) <= 1e-10


def test_dropout_in_a_head_is_replayed():
    loss, _, columns = case(dropout=0.1)
    loss.before.append(nn.Dropout(0.3))
    seen = []
    loss.before.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    value = loss(copy_columns(columns), None)
    collected = list(seen)
    value.backward()
    replayed = seen[len(collected) :]
    assert len(replayed) == len(collected) == 6
    assert all(any(torch.equal(first, second) for second in replayed) for first in collected)


def test_gradients_of_heads_accumulate_and_a_forward_alone_leaves_none():
    loss, _, columns = case()
    loss(copy_columns(columns), None)
    assert all(parameter.grad is None for parameter in loss.parameters())
    loss(copy_columns(columns), None).backward()
    once = of_heads(loss)
    loss(copy_columns(columns), None).backward()
    assert relative_error(of_heads(loss), {name: 2 * gradient for name, gradient in once.items()}) <= 1e-12


def test_heads_of_selected_rows_carry_their_weight():
    loss, _, columns = case(rows=4, differentiated_samples=1)
    total = None
    for row in range(4):
        loss.select_rows = lambda count, rank, row=row: torch.tensor([row])
        loss.zero_grad()
        loss(copy_columns(columns), None).backward()
        found = of_heads(loss)
        total = found if total is None else {name: total[name] + found[name] for name in total}
    everything, _, _ = case(rows=4)
    everything(copy_columns(columns), None).backward()
    mean = {name: gradient / 4 for name, gradient in total.items()}
    assert relative_error(mean, of_heads(everything)) <= 1e-10


def test_a_column_that_to_features_leaves_out_is_named():
    loss, _, columns = case()
    to_features = loss.to_features
    loss.to_features = lambda embeddings: to_features(embeddings[:2])
    with pytest.raises(ValueError, match=r"to_features did not use the input column\(s\) negative_1\."):
        loss([*copy_columns(columns), copy_columns(columns)[0]], None)


def test_parameters_of_another_model_that_the_loss_holds_are_not_its_own():
    loss, _, _ = case()
    loss.teacher = tiny_text_model(seed=3)
    assert all(name.startswith(("before", "after", "unused")) for name in loss.own_parameters())
    loss.before.requires_grad_(False)
    assert not any(name.startswith("before") for name in loss.own_parameters())


def step_on_ranks(gather, accumulation):
    """Relative errors of the heads' and the model's gradients under DDP, against one process; and those unused."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    layout = ddp_cases.Case(rows=(9, 6), gather=gather, accumulation=accumulation)
    world, rank = dist.get_world_size(), dist.get_rank()
    model = ddp_cases.make_model(layout)
    plain = PlainWithHeads(copy.deepcopy(model))
    loss = WithHeads(model, mini_batch_size=2, gather_across_devices=gather)
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    groups = [list(range(world))] if gather else [[r] for r in range(world)]
    for batch in range(accumulation):
        loss(ddp_cases.make_columns(layout, model, [rank], batch), None).backward()
        for group in groups:
            value = plain(ddp_cases.make_columns(layout, plain.model, group, batch), None)
            (value / len(groups)).backward()
    unused = [parameter.grad for parameter in loss.unused.parameters() if parameter.grad is not None]
    model_error = relative_error(gradients(model), gradients(plain.model))
    return relative_error(of_heads(loss), of_heads(plain)), model_error, len(unused)


@pytest.mark.parametrize(("gather", "accumulation"), [(True, 1), (False, 2)])
def test_two_ranks_equal_one_process(gather, accumulation):
    for heads, model, unused in run_on_ranks(step_on_ranks, 2, gather, accumulation):
        assert heads <= 2e-6 and model <= 2e-6 and unused == 0
