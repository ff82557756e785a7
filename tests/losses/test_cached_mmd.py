"""CachedMultiEncoderMMDLoss against the same loss by autograd: heads, tokens, teacher rows, ranks, and bad input."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.losses.cached_mmd import CachedMultiEncoderMMDLoss
from st_cached_extras.objectives.mmd import EncoderBalance, MultiEncoderMMD
from st_cached_extras.objectives.mmd.segments import pool_segments
from st_cached_extras.testing import LossCheckCase
from st_cached_extras.testing.loss_check import LossEqualityCase
from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    random_sentences,
    relative_error,
    text_columns,
    tiny_text_model,
    to_float64,
)
from tests.objectives.mmd.dense import dense_loss, random_rows, small_reference

SHAPES = {"vision/v2.1": (5,), "tokens": (3, 4), "same": (16,)}
OUTPUTS = {"vision/v2.1": "sentence_embedding", "tokens": "token_embeddings", "same": "sentence_embedding"}
WIDTH = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def make_mmd(**options) -> MultiEncoderMMD:
    references = {
        "vision/v2.1": small_reference((5,)),
        "tokens": small_reference((3, 4), layout="per_token"),
        "same": small_reference((16,), "laplace", scales=(1.0, 4.0)),
    }
    return MultiEncoderMMD(references, **options)


def make_heads(model) -> dict[str, nn.Module]:
    torch.manual_seed(5)
    heads = {"vision/v2.1": nn.Linear(16, 5), "tokens": nn.Sequential(nn.Linear(16, 4), nn.Tanh())}
    return {name: head.to(next(model.parameters()).dtype) for name, head in heads.items()}


def make_loss(model, mmd=None, **kwargs) -> CachedMultiEncoderMMDLoss:
    mmd = mmd or make_mmd(current_reference_weight=0.3)
    return CachedMultiEncoderMMDLoss(model, mmd, make_heads(model), OUTPUTS, 3, **kwargs)


def split(labels: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    return {n: x.reshape(-1, *s) for (n, s), x in zip(shapes.items(), labels.double().split(sizes, 1), strict=True)}


def mean_of_parts(tokens: Tensor, mask: Tensor, parts: int) -> Tensor:
    """Row by row and part by part."""
    rows = []
    for row, active in zip(tokens, mask.bool(), strict=True):
        row = row[active]
        bounds = [part * len(row) // parts for part in range(parts + 1)]
        rows.append(torch.stack([row[a : max(b, a + 1)].mean(dim=0) for a, b in pairwise(bounds)]))
    return torch.stack(rows)


class PlainLoss(nn.Module):
    """One forward per column, and autograd through all pairs."""

    def __init__(self, model, mmd: MultiEncoderMMD, shapes, heads=None):
        super().__init__()
        self.model, self.mmd, self.shapes = model, mmd, shapes
        self.heads = nn.ModuleList((heads or {}).get(name, nn.Identity()) for name in shapes)

    def forward(self, columns, labels=None):
        features = {name: [] for name in self.shapes}
        for column in columns:
            out = self.model(column)
            for head, name in zip(self.heads, features, strict=True):
                x = out[OUTPUTS[name]]
                x = mean_of_parts(x, out["attention_mask"], 3) if name == "tokens" else x
                features[name].append(head(x))
        features = {name: torch.cat(x).double() for name, x in features.items()}
        return dense_loss(self.mmd, features, None if labels is None else split(labels, self.shapes))

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        features = {"same": torch.cat([x.double() for x in embeddings])}
        return dense_loss(self.mmd, features, None if labels is None else split(labels, self.shapes)).float()


class TestOneEncoderWithoutAHead(LossCheckCase):
    def make_mmd(self):
        # Wide scales: tiny models embed far from a standard normal reference.
        reference = small_reference((16,), scales=(1.0, 4.0))
        return MultiEncoderMMD({"same": reference}, current_reference_weight=0.5)

    def make_loss(self, model, **kwargs):
        return CachedMultiEncoderMMDLoss(model, self.make_mmd(), **kwargs)

    def make_plain_loss(self, model):
        return PlainLoss(model, self.make_mmd(), {"same": (16,)})

    def make_labels(self, rows, seed):
        return random_rows(rows, (16,), seed, torch.float32)

    def test_matryoshka_over_it_equals_matryoshka_over_the_plain_loss(self):
        model = tiny_text_model()
        loss = MatryoshkaLoss(model, self.make_loss(model), [16, 8])
        with pytest.raises(ValueError, match="MatryoshkaLoss does not go around this loss"):
            loss(text_columns(model, 4), self.make_labels(4, 0))


class TestHeadsAndTokens(LossEqualityCase):
    make_loss = staticmethod(make_loss)

    def make_plain_loss(self, model):
        return PlainLoss(model, make_mmd(current_reference_weight=0.3), SHAPES, make_heads(model))

    def make_labels(self, rows, seed):
        return random_rows(rows, (WIDTH,), seed, torch.float32)

    def comparable(self, found):
        heads = {name: gradient for name, gradient in found.items() if name.startswith("heads.")}
        assert len(heads) == 4
        return super().comparable(found) | heads

    def test_matryoshka_over_it_equals_matryoshka_over_the_plain_loss(self):
        """Features of fixed width cannot be truncated; see the case of one encoder."""

    def test_calculate_loss_is_differentiable_in_the_embeddings(self):
        loss = make_loss(tiny_text_model())
        features = random_rows(5, (WIDTH,), 3)
        one = [features.clone().requires_grad_()], [features.flip(0).requires_grad_()]
        other = copy.deepcopy(one)
        labels = self.make_labels(5, 0)
        (2 * loss.calculate_loss(one, labels)).backward()
        loss.calculate_loss(other, labels, with_backward=True)
        for (a,), (b,) in zip(one, other, strict=True):
            assert a.grad.any() and torch.allclose(a.grad, 2 * b.grad, rtol=1e-12)


def case(rows: int = 7, columns: int = 2, **kwargs):
    model = tiny_text_model()
    model, features = to_float64(model, text_columns(model, rows, columns))
    return make_loss(model, mini_batch_size=3, **kwargs), features, random_rows(rows, (WIDTH,), 1)


def test_gradients_of_heads_accumulate_under_dropout():
    model = tiny_text_model(dropout=0.2)
    model, columns = to_float64(model, text_columns(model, 6))
    loss, plain = (
        make_loss(model, mini_batch_size=6, sort_by_length=False),
        PlainLoss(model, make_mmd(current_reference_weight=0.3), SHAPES, make_heads(model)),
    )
    found = []
    for each in (loss, plain):
        torch.manual_seed(3)
        for seed in range(2):
            each(copy_columns(columns), random_rows(6, (WIDTH,), seed)).backward()
        found.append({**gradients(each.heads), **gradients(model)})
        each.zero_grad()
    assert relative_error(*found) <= 1e-6


def test_selected_rows_of_every_column_carry_their_weight():
    total = None
    loss, columns, labels = case(rows=4, differentiated_samples=1)
    for row in range(4):
        loss.select_rows = lambda count, rank, row=row: torch.tensor([row])
        loss.zero_grad()
        loss(copy_columns(columns), labels).backward()
        found = {name: x / 4 for name, x in gradients(loss).items()}
        total = found if total is None else {name: total[name] + found[name] for name in total}
    everything, _, _ = case(rows=4)
    everything(copy_columns(columns), labels).backward()
    assert relative_error(total, gradients(everything)) <= 1e-10


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("parts", [1, 3, 5])
def test_tokens_are_averaged_over_even_parts_wherever_the_padding_stands(parts, padding_side):
    lengths = torch.tensor([1, 2, 3, 4, 7, 11])
    mask = torch.arange(11) < lengths[:, None]
    mask = mask.flip(1) if padding_side == "left" else mask
    tokens = random_rows(6, (11, 4), 0)
    found = pool_segments(tokens, mask.long(), parts)
    assert torch.allclose(found, mean_of_parts(tokens, mask, parts), rtol=1e-12)
    assert torch.equal(pool_segments(torch.where(mask[..., None], tokens, 1e9), mask, parts), found)


def test_a_balance_takes_in_the_raw_values_of_training_and_not_of_evaluation():
    balance = EncoderBalance(dict.fromkeys(SHAPES, 0.0))
    loss, columns, labels = case(mmd=make_mmd(weights=balance, current_reference_weight=0.3))
    with torch.no_grad():
        loss(copy_columns(columns), labels)
    assert balance.weights == dict.fromkeys(SHAPES, 1.0)
    loss(copy_columns(columns), labels)
    raw = {name: float(loss.metrics[f"mmd/{name}"]) for name in SHAPES}
    assert balance.replay_state()["averages"].tolist() == pytest.approx(list(raw.values()))
    assert sum(balance.weights.values()) == pytest.approx(3) and len(set(balance.weights.values())) == 3


def test_a_frozen_encoder_needs_no_label_without_a_current_reference():
    model = tiny_text_model()
    loss = make_loss(model, mmd=make_mmd())
    assert loss(text_columns(model, 5, 1), None) > 0


def test_heads_balance_and_their_state_are_saved_and_restored(tmp_path):
    from st_cached_extras import ReplaySentenceTransformerTrainer

    model = tiny_text_model()
    balance = EncoderBalance(dict.fromkeys(SHAPES, 0.0))
    loss = make_loss(model, mmd=make_mmd(weights=balance))
    trainer = ReplaySentenceTransformerTrainer(model=model, loss=loss)
    balance.update({"vision/v2.1": 1.0, "tokens": 0.5, "same": 0.25})
    trainer._save(str(tmp_path))
    state = load_file(tmp_path / "loss_state.safetensors")
    assert sum(name.startswith("loss.heads.") for name in state) == 4
    before, weights = copy.deepcopy(dict(loss.heads.named_parameters())), balance.weights
    nn.init.zeros_(loss.heads[0].weight)
    balance.update(dict.fromkeys(SHAPES, 3.0))
    trainer.load_loss_state(state)
    assert all(torch.equal(parameter, before[name]) for name, parameter in loss.heads.named_parameters())
    assert balance.weights == weights


def test_beside_a_paired_loss_it_equals_the_sum_of_both():
    from st_cached_extras import CachedCompositeLoss
    from st_cached_extras.objectives import InfoNCE

    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 7))
    labels = random_rows(7, (WIDTH,), 1)
    found = None
    for weight, loss in ((1.0, CachedInfoNCELoss(model, scale=3.0)), (0.5, make_loss(model))):
        model.zero_grad()
        (weight * loss(copy_columns(columns), labels)).backward()
        part = gradients(model)
        found = part if found is None else {name: found[name] + part[name] for name in part}
    heads = gradients(loss.heads)
    mmd = make_loss(model)
    composite = CachedCompositeLoss(
        model, {"contrastive": (InfoNCE(scale=3.0), 1.0), "law": (mmd, 0.5)}, mini_batch_size=3
    )
    model.zero_grad()
    values = composite(copy_columns(columns), labels)
    next(iter(values.values())).backward()
    assert relative_error(gradients(model), found) <= 1e-10
    assert relative_error(gradients(mmd.heads), heads) <= 1e-10
    assert {f"law/mmd/{name}" for name in SHAPES} <= composite.metrics.keys()


def test_beside_a_paired_loss_selected_rows_give_the_mean_gradient():
    from st_cached_extras import CachedCompositeLoss

    model, columns = to_float64(model := tiny_text_model(), text_columns(model, 4))
    labels, found = random_rows(4, (WIDTH,), 1), []
    for rows in (None, 0, 1, 2, 3):
        losses = {"contrastive": (CachedInfoNCELoss(model, scale=3.0), 1.0), "law": (make_loss(model), 0.5)}
        composite = CachedCompositeLoss(model, losses, differentiated_samples=None if rows is None else 1)
        composite.select_rows = lambda count, rank, rows=rows: torch.tensor([rows])
        composite.zero_grad()
        next(iter(composite(copy_columns(columns), labels).values())).backward()
        found.append(gradients(composite))
    mean = {name: sum(x[name] for x in found[1:]) / 4 for name in found[0]}
    assert relative_error(mean, found[0]) <= 1e-10


# ------------------------------------------------------------------------------------------------------ two ranks

UNEVEN = (5, 3)


def step_on_ranks(gather: bool) -> dict[str, np.ndarray]:
    """Gradients of one rank's step over its share of the rows of :func:`whole_step`."""
    rank = torch.distributed.get_rank()
    begin, count = sum(UNEVEN[:rank]), UNEVEN[rank]
    model = tiny_text_model()
    loss = make_loss(model, mini_batch_size=2, gather_across_devices=gather)
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)  # BERT's pooler
    columns, labels = share(model, begin, count)
    loss(columns, labels).backward()
    return {name.replace("module.", ""): gradient.numpy() for name, gradient in gradients(loss).items()}


def share(model, begin: int, count: int) -> tuple[list[dict], Tensor]:
    end = begin + count
    columns = [model.preprocess(random_sentences(sum(UNEVEN), seed)[begin:end]) for seed in (1, 2)]
    return columns, random_rows(sum(UNEVEN), (WIDTH,), 3, torch.float32)[begin:end]


def whole_step(bounds: tuple[tuple[int, int], ...]) -> dict[str, Tensor]:
    """The mean of the gradients of the given shares, in one process."""
    model = tiny_text_model()
    loss = make_loss(model, mini_batch_size=2)
    for begin, count in bounds:
        (loss(*share(model, begin, count)) / len(bounds)).backward()
    return gradients(loss)


@pytest.mark.parametrize("gather", [True, False])
def test_two_uneven_ranks_equal_one_process(gather):
    bounds = ((0, 8),) if gather else ((0, 5), (5, 3))
    expected = whole_step(bounds)
    for found in run_on_ranks(step_on_ranks, 2, gather):
        assert relative_error({name: torch.from_numpy(x) for name, x in found.items()}, expected) <= 2e-6


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(mmd=nn.Linear(2, 2)), TypeError, ["mmd", "Linear", "MultiEncoderMMD"]),
        (dict(heads={"other": nn.Linear(2, 2)}), ValueError, ["heads", "other", "vision/v2.1"]),
        (dict(outputs=("sentence_embedding", "token_embeddings")), ValueError, ["outputs", "found 2", "tokens"]),
        (dict(outputs=("pooler",)), ValueError, ["outputs", "pooler", "token_embeddings"]),
        (dict(token_segments=0), ValueError, ["token_segments", "found 0", "expected 3", "'tokens'"]),
        (dict(token_segments=4), ValueError, ["token_segments", "found 4", "expected 3"]),
        (dict(token_segments=2.5), ValueError, ["token_segments", "2.5"]),
    ],
)
def test_bad_arguments_say_what_was_found_expected_and_the_way_out(arguments, error, words):
    arguments = dict(mmd=make_mmd(), heads=None, outputs=OUTPUTS, token_segments=3) | arguments
    with pytest.raises(error) as caught:
        CachedMultiEncoderMMDLoss(tiny_text_model(), **arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_head_is_named_with_the_one_that_fits():
    model = tiny_text_model()
    loss = CachedMultiEncoderMMDLoss(model, MultiEncoderMMD({"dino": small_reference((5,))}))
    with pytest.raises(ValueError, match=r"'dino' has the shape \[16\], expected \[5\].*torch.nn.Linear\(16, 5\)"):
        loss(text_columns(model, 4, 1), None)


@pytest.mark.parametrize(("labels", "words"), [(None, "found None"), (torch.ones(4, 7), r"\[4, 7\]")])
def test_missing_or_misshapen_teacher_rows_are_named(labels, words):
    model = tiny_text_model()
    with pytest.raises(ValueError, match=f"labels.*{words}"):
        make_loss(model)(text_columns(model, 4, 1), labels)


def test_a_reference_with_a_condition_is_refused():
    mmd = MultiEncoderMMD({"same": small_reference((16,), condition_size=2)})
    with pytest.raises(ValueError, match="condition"):
        CachedMultiEncoderMMDLoss(tiny_text_model(), mmd)


def test_the_configuration_names_encoders_and_their_data():
    loss = make_loss(tiny_text_model())
    config = json.loads(json.dumps(loss.get_config_dict()))
    assert config["encoders"]["tokens"]["layout"] == "per_token" and config["encoders"]["same"]["rows"] == "40"
    assert config["heads"] == {"vision/v2.1": "Linear", "tokens": "Sequential", "same": "Identity"}
