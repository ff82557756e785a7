"""Every lever, on and off, gives the gradients of the plain loss of sentence-transformers."""

import contextlib
from dataclasses import fields

import pytest
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from st_cached_extras import CachedInfoNCELoss, CachedLoss
from st_cached_extras.levers import LEVERS, Levers, without
from st_cached_extras.objectives.infonce_symmetric import SymmetricInfoNCE
from st_cached_extras.replay.embedding_rows import _EmbedByRows
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    relative_error,
    text_columns,
    tiny_text_model,
    to_float64,
)

ROWS = 24
SWITCHES = [field.name for field in fields(Levers)]
DIRECTIONS = {
    "one direction": {},
    "both": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "all": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
}
# What a user chooses, each as the argument that takes it away.
ARGUMENTS = {
    "rows sorted by length": {"sort_by_length": False},
    "mini-batches filled by tokens": {"mini_batch_num_tokens": None, "mini_batch_size": 5},
    "graphs kept": {"kept_graphs": 0.0},
}
ALL = {"mini_batch_num_tokens": 64, "kept_graphs": 0.25}


def step(make_loss):
    model, columns = to_float64(tiny_text_model(), text_columns(tiny_text_model(), ROWS))
    value = make_loss(model)(copy_columns(columns), None)
    value.backward()
    return float(value.detach()), gradients(model)


@pytest.fixture(scope="module", params=DIRECTIONS)
def truth(request):
    options = DIRECTIONS[request.param]
    return options, *step(lambda model: MultipleNegativesRankingLoss(model, **options))


def check(found, truth):
    assert found[0] == pytest.approx(truth[1], rel=1e-10) and relative_error(found[1], truth[2]) < 1e-10


@pytest.mark.parametrize("off", [(), *((name,) for name in SWITCHES), tuple(SWITCHES)], ids=lambda off: ", ".join(off))
def test_switches_change_no_gradient(truth, off):
    with without(*off):
        check(step(lambda model: CachedInfoNCELoss(model, **truth[0], **ALL)), truth)


@pytest.mark.parametrize("off", ARGUMENTS)
def test_arguments_change_no_gradient(truth, off):
    check(step(lambda model: CachedInfoNCELoss(model, **truth[0], **{**ALL, **ARGUMENTS[off]})), truth)


def test_the_closed_form_changes_no_gradient(truth):
    options = {"mini_batch_num_tokens": 64}
    check(step(lambda model: CachedLoss(MultipleNegativesRankingLoss(model, **truth[0]), **options)), truth)


@pytest.mark.parametrize(
    ("name", "owner", "method"),
    [("embedding_rows", _EmbedByRows, "apply"), ("symmetric_products", SymmetricInfoNCE, "evaluate")],
)
def test_a_switch_does_what_it_says(monkeypatch, name, owner, method):
    calls = []
    original = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *arguments: (calls.append(0), original(*arguments))[1])
    for context, used in ((contextlib.nullcontext(), True), (without(name), False)):
        calls.clear()
        with context:
            step(lambda model: CachedInfoNCELoss(model, **DIRECTIONS["both"]))
        assert bool(calls) == used
    assert {name for name, *_ in (("embedding_rows",), ("symmetric_products",))} == set(SWITCHES)


def test_switches_are_as_before_afterwards_also_after_an_error():
    with pytest.raises(KeyError), without(*SWITCHES):
        assert not any(getattr(LEVERS, name) for name in SWITCHES)
        raise KeyError
    assert Levers() == LEVERS


def test_an_unknown_lever_is_named():
    with pytest.raises(ValueError, match=r"found 'sorting', expected any of embedding_rows"), without("sorting"):
        pass


def test_products_are_shared_only_where_that_is_right_and_pays(monkeypatch):
    def refuse(self):
        raise AssertionError("shared")

    monkeypatch.setattr(SymmetricInfoNCE, "evaluate", refuse)
    both = DIRECTIONS["both"]
    for options in (
        {},
        {"directions": ("query_to_doc", "query_to_query")},
        {**both, "scale": 45.0},  # exponents that want a maximum subtracted
        {**both, "scale": 30.0, "margin": 0.5},
        {**both, "hardness_mode": "all_negatives", "hardness_strength": 1.0},
        {**both, "similarity_fct": lambda a, b: a @ b.T},
    ):
        step(lambda model, options=options: CachedInfoNCELoss(model, **options))
    step(lambda model: CachedInfoNCELoss(model, **both, differentiated_samples=8))
    with pytest.raises(AssertionError, match="shared"):
        step(lambda model: CachedInfoNCELoss(model, **both))
