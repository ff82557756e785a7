"""Word-embedding gradients by rows against autograd's dense ones."""

import copy

import pytest
import torch
from torch import nn

from st_cached_extras.replay.embedding_rows import adds_by_rows, embedding_gradients_by_rows


class Tied(nn.Module):
    """Tokens in, scores of the same vocabulary out: the weight is used twice."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(50, 6, **options)
        self.mix = nn.Linear(6, 6)

    def forward(self, tokens):
        return self.mix(self.words(tokens)).tanh() @ self.words.weight.T


def tokens_of(seed):
    return torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(seed))


def backwards(model, count, scale=1.0):
    for seed in range(count):
        (model(tokens_of(seed)).square().mean() * scale).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}], ids=["plain", "padding"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("begun", [False, True], ids=["first", "accumulated"])
def test_gradients_are_autograds(options, tied, begun):
    torch.manual_seed(0)
    model = Tied(**options).double()
    if not tied:
        model.forward = lambda tokens: model.mix(model.words(tokens)).tanh()
    truth = copy.deepcopy(model)
    if not tied:
        truth.forward = lambda tokens: truth.mix(truth.words(tokens)).tanh()
    if begun:
        backwards(model, 1), backwards(truth, 1)
    with embedding_gradients_by_rows(model):
        found = backwards(model, 4, 0.5)
    for name, expected in backwards(truth, 4, 0.5).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-14)


def test_the_gradient_is_not_made_dense_at_every_backward():
    model = nn.Embedding(1000, 4)
    with embedding_gradients_by_rows(model):
        model(tokens_of(0)).sum().backward()
        buffer = model.weight.grad
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(tokens_of(1)).sum().backward()
    assert model.weight.grad is buffer
    assert not [event.name for event in profile.events() if "embedding_dense_backward" in event.name]


def test_hooks_are_gone_afterwards_also_after_an_error():
    model = nn.Embedding(9, 4)
    with pytest.raises(KeyError), embedding_gradients_by_rows(model):
        raise KeyError
    assert not model._forward_hooks


def test_without_a_graph_outputs_are_left_alone():
    model = nn.Embedding(50, 4)
    with embedding_gradients_by_rows(model), torch.no_grad():
        assert not model(tokens_of(0)).requires_grad


def hooked():
    module = nn.Embedding(9, 4)
    module.weight.register_hook(lambda gradient: gradient)
    return module


def scaled_by_a_hook(module):
    module.register_forward_hook(lambda module, inputs, output: 3 * output)


def scaled_by_another_forward(module):
    module.forward = lambda tokens: 3 * nn.functional.embedding(tokens, module.weight)


def of_another_weight(module):
    other = nn.Parameter(torch.ones(50, 4))
    module.forward = lambda tokens: nn.functional.embedding(tokens, other)


@pytest.mark.parametrize("change", [scaled_by_a_hook, scaled_by_another_forward, of_another_weight])
def test_outputs_that_are_not_rows_of_the_weight_are_left_to_autograd(change):
    model, truth = nn.Embedding(50, 4), nn.Embedding(50, 4)
    change(model), change(truth)
    with embedding_gradients_by_rows(model):
        model(tokens_of(0)).sum().backward()
    truth(tokens_of(0)).sum().backward()
    assert (model.weight.grad is None) == (truth.weight.grad is None)
    if truth.weight.grad is not None:
        torch.testing.assert_close(model.weight.grad, truth.weight.grad)


def test_what_follows_may_change_the_output_in_place():
    model, truth = nn.Embedding(50, 4), nn.Embedding(50, 4)
    truth.load_state_dict(model.state_dict())
    with embedding_gradients_by_rows(model):
        model(tokens_of(0)).mul_(2).sum().backward()
    truth(tokens_of(0)).mul(2).sum().backward()
    torch.testing.assert_close(model.weight.grad, truth.weight.grad)


def test_tokens_by_keyword_are_left_to_autograd():
    model = nn.Embedding(50, 4)
    with embedding_gradients_by_rows(model):
        model(input=tokens_of(0)).sum().backward()
    assert model.weight.grad.sum() == tokens_of(0).numel() * 4


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(9, 4, sparse=True),
        nn.Embedding(9, 4, max_norm=1.0),
        nn.Embedding(9, 4, scale_grad_by_freq=True),
        nn.Embedding(9, 4).requires_grad_(False),
        nn.utils.parametrizations.weight_norm(nn.Embedding(9, 4)),
        nn.EmbeddingBag(9, 4),
        hooked(),
    ],
    ids=[
        "sparse",
        "max_norm",
        "by frequency",
        "frozen",
        "parametrised",
        "bag",
        "hooked",
    ],
)
def test_what_is_not_plain_is_left_to_autograd(module):
    assert not adds_by_rows(module)
    assert adds_by_rows(nn.Embedding(9, 4))


def test_a_compiled_model_is_left_alone():
    model = nn.Sequential(nn.Embedding(9, 4))
    for compiled in (torch.compile(model, backend="eager"), nn.Sequential(torch.compile(model, backend="eager"))):
        with embedding_gradients_by_rows(compiled):
            assert not model[0]._forward_hooks
    model[0].compile(backend="eager")
    with embedding_gradients_by_rows(model):
        assert not model[0]._forward_hooks
