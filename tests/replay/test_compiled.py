"""A compiled model inside the loss: the same gradients, few compilations, and graph breaks that have a name."""

import copy

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras._compat import is_compiled, uncompiled
from st_cached_extras.replay.loss import COMPILED_MULTIPLE
from st_cached_extras.replay.rows import FeatureRows
from st_cached_extras.testing.tiny_models import copy_columns, gradients, relative_error, tiny_text_model
from tests.losses.test_trainer import train

ROWS, WIDTH = 48, 61


class Words(nn.Module):
    """Embeds words, adds to each all before it, and takes their mean."""

    def __init__(self, breaks_the_graph=False):
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.mix = nn.Linear(12, 12)
        self.breaks_the_graph = breaks_the_graph

    def forward(self, features):
        mask = features["attention_mask"][..., None].float()
        hidden = self.mix(self.words(features["input_ids"]).cumsum(1)).tanh() * mask
        if self.breaks_the_graph:
            hidden = hidden * float(mask.max())
        features["sentence_embedding"] = hidden.sum(1) / mask.sum(1)
        return features


def model_of(**options):
    torch.manual_seed(0)
    return SentenceTransformer(modules=[Words(**options)], device="cpu").train()


def texts(seed=0):
    """Two columns of rows of every length, which would be a shape for every mini-batch."""
    columns = []
    for column in range(2):
        generator = torch.Generator().manual_seed(2 * seed + column)
        lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
        mask = (torch.arange(WIDTH) < lengths[:, None]).long()
        ids = torch.randint(50, (ROWS, WIDTH), generator=generator) * mask
        columns.append({"input_ids": ids, "attention_mask": mask})
    return columns


def step(model, seed=0):
    model.zero_grad()
    value = CachedInfoNCELoss(model, mini_batch_size=4)(copy_columns(texts(seed)), None)
    value.backward()
    return float(value.detach()), gradients(uncompiled(model))


@pytest.fixture(autouse=True)
def forget_compilations():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_gradients_are_those_of_the_model_and_few_graphs_are_compiled():
    model = model_of()
    expected = [step(copy.deepcopy(model), seed) for seed in range(2)]
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, dynamic=True)
    for seed, (value, truth) in enumerate(expected):
        found, of_parameters = step(compiled, seed)
        assert found == pytest.approx(value, rel=1e-5)
        assert relative_error(of_parameters, truth) < 1e-5
    # Without autograd's graph and with it, for some shapes and then for any: never one for each length.
    assert counter.frame_count <= 4


def test_the_trainer_compiles_the_model_and_reaches_the_parameters_of_the_plain_loss(tmp_path):
    plain = tiny_text_model(layers=1)
    model = copy.deepcopy(plain)
    train(plain, MultipleNegativesRankingLoss(plain), tmp_path)
    loss = CachedInfoNCELoss(model, mini_batch_size=3)
    train(model, loss, tmp_path, torch_compile=True, torch_compile_backend="eager")
    assert is_compiled(loss.model) and uncompiled(loss.model) is model
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) < 1e-6


def test_lengths_are_multiples_so_that_kernels_for_each_length_are_few():
    compiled, plain = model_of(), model_of()
    compiled.compile(backend="eager", dynamic=True)
    for model, expected in ((compiled, {0}), (plain, set(range(COMPILED_MULTIPLE)))):
        seen = []
        collect = FeatureRows.take

        def take(self, rows, seen=seen, collect=collect):
            taken = collect(self, rows)
            seen.append(taken["input_ids"].shape[1])
            return taken

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FeatureRows, "take", take)
            step(model)
        assert {length % COMPILED_MULTIPLE for length in seen if length < WIDTH} <= expected
        assert len(set(seen)) <= -(-WIDTH // COMPILED_MULTIPLE) or model is plain


def test_a_model_that_breaks_the_graph_trains_and_the_break_is_named():
    model = model_of(breaks_the_graph=True)
    value, truth = step(copy.deepcopy(model))
    compiled = torch.compile(model, backend="eager", dynamic=True)
    found, of_parameters = step(compiled)
    assert found == pytest.approx(value, rel=1e-5) and relative_error(of_parameters, truth) < 1e-5
    explained = torch._dynamo.explain(model)(texts()[0])
    assert any("item" in reason.reason.lower() for reason in explained.break_reasons)
    where = [frame for reason in explained.break_reasons for frame in reason.user_stack]
    assert any(frame.filename == __file__ and "float(mask.max())" in frame.line for frame in where)
    whole = torch._dynamo.explain(model_of())(texts()[0])
    assert not whole.break_reasons and whole.graph_count == 1


@pytest.mark.parametrize("left", [False, True])
def test_rounded_lengths_keep_every_active_token(left):
    lengths = torch.tensor([1, 8, 9, 17, 0, 20])
    mask = torch.arange(20) < lengths[:, None]
    mask = mask.flip(1) if left else mask
    features = {"input_ids": torch.arange(120).view(6, 20), "attention_mask": mask.long()}
    rows = FeatureRows(features, trim_left_padding=left, length_multiple=8)
    assert rows.lengths.tolist() == [8, 8, 16, 20, 20, 20]
    for row, computed in enumerate(rows.lengths):
        taken = rows.take(torch.tensor([row]))
        assert taken["input_ids"].shape == (1, computed)
        kept = taken["input_ids"][taken["attention_mask"].bool()]
        assert torch.equal(kept, features["input_ids"][row][mask[row]])
