"""InfoNCE equals its dense truth, whatever the options, the chunks, the ranks and however small the loss."""

from __future__ import annotations

import itertools
import logging
import math
from typing import ClassVar

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim, pytorch_cos_sim
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.objectives.checks import check_ranking_features
from st_cached_extras.testing import ObjectiveCheckCase

ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
DIRECTION_SETS = [
    ("query_to_doc", *others) for k in range(4) for others in itertools.combinations(ALL_DIRECTIONS[1:], k)
]
HARDNESS_MODES = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


def lopsided(a: Tensor, b: Tensor) -> Tensor:
    """A similarity of its own, not symmetric in its arguments: swapping them anywhere shows."""
    return torch.tanh(a) @ b.T / (1 + a.square().sum(dim=1, keepdim=True))


class Bilinear(nn.Module):
    """A similarity with parameters."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, dim * dim).reshape(dim, dim))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ self.weight @ b.T


class Model:
    """What ``model.similarity`` needs to be resolved."""

    def __init__(self, similarity_fn_name: str) -> None:
        self.similarity_fn_name = similarity_fn_name

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return {"cosine": cos_sim, "dot": dot_score, "euclidean": euclidean_sim}[self.similarity_fn_name](a, b)


def column_names(hard_negatives: int) -> list[str]:
    return ["anchor", "positive", *(f"negative_{k}" for k in range(1, hard_negatives + 1))]


def random_features(
    batch_size: int, dim: int, hard_negatives: int, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(batch_size, dim, generator=generator, dtype=torch.float64)  # noqa: E731
    return {name: draw().to(dtype) for name in column_names(hard_negatives)}


def st_loss(features: dict[str, Tensor], **options) -> Tensor:
    """Sentence-transformers' own value; its columns come in order, not by name."""
    embeddings = [features[name] for name in column_names(len(features) - 2)]
    return MultipleNegativesRankingLoss(None, **options).compute_loss_from_embeddings(embeddings, None)


def double_loop_loss(
    features: dict[str, Tensor],
    *,
    scale: float = 20.0,
    similarity_fct=cos_sim,
    directions: tuple[str, ...] = ("query_to_doc",),
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
) -> Tensor:
    """The definition, one pair at a time: row i's candidates, each with its logit, then a softmax over them."""
    documents = [features[name] for name in column_names(len(features) - 2)[1:]]
    q, B = features["anchor"], len(features["anchor"])

    def sim(a: Tensor, b: Tensor) -> Tensor:
        return similarity_fct(a[None], b[None])[0, 0]

    losses = []
    for i in range(B):
        positive = scale * sim(q[i], documents[0][i])
        sums: dict[str, list[Tensor]] = {direction: [] for direction in directions}
        for j, (c, d) in itertools.product(range(B), enumerate(documents)):
            own, is_positive = i == j, i == j and c == 0
            penalised = {
                None: False,
                "in_batch_negatives": not own,
                "hard_negatives": own and not is_positive,
                "all_negatives": not is_positive,
            }[hardness_mode]
            similarity = sim(q[i], d[j])
            logit = scale * similarity + (hardness_strength * similarity.detach() if penalised else 0.0)
            sums["query_to_doc"].append(logit)
            if "doc_to_doc" in directions and not own:
                sums["doc_to_doc"].append(scale * sim(d[j], documents[0][i]))
        for j in range(B):
            if "query_to_query" in directions and i != j:
                sums["query_to_query"].append(scale * sim(q[i], q[j]))
            if "doc_to_query" in directions:
                sums["doc_to_query"].append(scale * sim(q[j], documents[0][i]))
        if partition_mode == "joint":
            groups = [[logit for group in sums.values() for logit in group]]
        else:
            groups = list(sums.values())
        log_z = [torch.stack(group).logsumexp(dim=0) for group in groups]
        losses.append(sum(log_z) / len(log_z) - positive)
    return torch.stack(losses).mean()


def gradients_of(loss_fn, features: dict[str, Tensor], **options) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: x.double().clone().requires_grad_() for name, x in features.items()}
    loss = loss_fn(leaves, **options)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest of any column."""
    return max(((found[n].double() - truth[n]).norm() / truth[n].norm()).item() for n in truth)


class InfoNCEChecks(ObjectiveCheckCase):
    options: ClassVar[dict] = {}
    hard_negatives = 0

    def make_objective(self) -> InfoNCE:
        return InfoNCE(**self.options, chunk_size=4)

    def make_features(self, batch_size: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
        return random_features(batch_size, 5, self.hard_negatives, seed, dtype)

    def dense_loss(self, features, *, objective, labels, reference):
        options = {**self.options, "similarity_fct": objective.similarity_fct}
        return st_loss(features, **options)


class TestInfoNCEOfPairs(InfoNCEChecks):
    options: ClassVar[dict] = {"scale": 5.0}


class TestInfoNCEWithTheShift(InfoNCEChecks):
    """A scale at which the maximum is subtracted."""

    options: ClassVar[dict] = {"scale": 45.0}
    tolerance_float32 = 5e-5  # the rounding of a logit of 45


class TestInfoNCEWithEverything(InfoNCEChecks):
    options: ClassVar[dict] = {
        "scale": 7.0,
        "directions": ALL_DIRECTIONS,
        "hardness_mode": "in_batch_negatives",
        "hardness_strength": 3.0,
    }
    hard_negatives = 2


class TestSymmetricInfoNCEOfDotProducts(InfoNCEChecks):
    options: ClassVar[dict] = {
        "scale": 0.7,
        "similarity_fct": dot_score,
        "directions": ("doc_to_query", "query_to_doc"),
        "partition_mode": "per_direction",
        "hardness_mode": "hard_negatives",
        "hardness_strength": 0.5,
    }
    hard_negatives = 1


class TestInfoNCEOfACustomSimilarity(InfoNCEChecks):
    options: ClassVar[dict] = {"scale": 3.0, "similarity_fct": lopsided, "directions": ALL_DIRECTIONS}
    hard_negatives = 1


class TestInfoNCEOfASimilarityWithParameters(InfoNCEChecks):
    options: ClassVar[dict] = {"scale": 0.3, "directions": ("query_to_doc", "doc_to_query")}

    def make_objective(self) -> InfoNCE:
        return InfoNCE(**self.options, similarity_fct=Bilinear(), chunk_size=4)


@pytest.mark.parametrize("similarity_fct", [cos_sim, dot_score, lopsided], ids=lambda f: f.__name__)
@pytest.mark.parametrize("directions", DIRECTION_SETS, ids="+".join)
def test_every_combination_of_options_equals_st_and_the_definition(similarity_fct, directions) -> None:
    partition_modes = ["joint"] if {"query_to_query", "doc_to_doc"} & set(directions) else ["joint", "per_direction"]
    cases = itertools.product(partition_modes, HARDNESS_MODES, (0, 1, 3), (5.0, 0.8))
    for seed, (partition_mode, hardness_mode, hard_negatives, strength) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        batch_size, dim, chunk = (int(torch.randint(2, 12, (), generator=generator)) for _ in range(3))
        options = {
            "scale": 9.0 if similarity_fct is cos_sim else 0.8,
            "similarity_fct": similarity_fct,
            "directions": directions,
            "partition_mode": partition_mode,
            "hardness_mode": hardness_mode,
            "hardness_strength": strength if hardness_mode else 0.0,
        }
        where = f"B={batch_size} D={dim} chunk={chunk} negatives={hard_negatives} {options}"
        # fp32 sees the very values of the fp64 truth: drawn in fp32, then widened.
        features = random_features(batch_size, dim, hard_negatives, seed, torch.float32)
        loss, truth = gradients_of(st_loss, features, **options)
        if batch_size <= 5:
            by_definition, gradients = gradients_of(double_loop_loss, features, **options)
            assert abs(by_definition - loss) <= 1e-10 * loss, where
            assert relative_error(gradients, truth) <= 1e-10, where
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            result = InfoNCE(**options, chunk_size=chunk).value_and_cotangents(
                {name: x.to(dtype) for name, x in features.items()}
            )
            assert abs(result.loss.double() - loss) <= tolerance * loss, where
            assert relative_error(result.cotangents, truth) <= tolerance, where


@pytest.mark.parametrize("partition_mode", ["joint", "per_direction"])
def test_a_batch_of_one_has_the_loss_of_its_copies_of_the_positive(partition_mode: str) -> None:
    features = random_features(1, 4, 0, seed=0)
    directions = ("query_to_doc", "doc_to_query")
    result = InfoNCE(directions=directions, partition_mode=partition_mode).value_and_cotangents(features)
    assert result.loss.item() == pytest.approx(math.log(2) if partition_mode == "joint" else 0.0, abs=1e-15)
    assert all(not x.any() for x in result.cotangents.values())


@pytest.mark.parametrize("partition_mode", ["joint", "per_direction"])
@pytest.mark.parametrize("directions", [("query_to_doc",), ("query_to_doc", "doc_to_query")], ids="+".join)
def test_small_losses_stay_precise_in_float32(directions: tuple[str, ...], partition_mode: str) -> None:
    reached = []
    for scale, noise in itertools.product((20.0, 30.0, 45.0), (6.0, 2.0, 1.2, 0.8, 0.5, 0.2, 0.05)):
        generator = torch.Generator().manual_seed(0)
        anchor = torch.randn(96, 64, generator=generator)
        features = {"anchor": anchor, "positive": anchor + noise * torch.randn(96, 64, generator=generator)}
        options = {"scale": scale, "directions": directions, "partition_mode": partition_mode}
        _, truth = gradients_of(double_precision_loss, features, **options)
        loss = double_precision_loss({name: x.double() for name, x in features.items()}, **options)
        result = InfoNCE(**options).value_and_cotangents(features)
        excess = math.log(2) if partition_mode == "joint" and len(directions) == 2 else 0.0
        assert abs(result.loss.double() - loss) <= 1e-4 * loss
        assert relative_error(result.cotangents, truth) <= 1e-4, (scale, noise, loss)
        reached.append(loss.item() - excess)
    assert max(reached) > 1 and min(reached) < 1e-9


def double_precision_loss(
    features: dict[str, Tensor], *, scale: float, directions: tuple[str, ...], partition_mode: str
) -> Tensor:
    """Dense and precise: log(c + Σ exp(l − p)) in fp64, which unlike log Z − p does not cancel at a loss of 1e-12."""
    u, v = (nn.functional.normalize(x) for x in features.values())
    others = ~torch.eye(len(u), dtype=torch.bool)
    x = scale * (u @ v.T)
    margins = {"query_to_doc": x - x.diagonal()[:, None], "doc_to_query": x.T - x.diagonal()[:, None]}
    sums = [(margins[name].exp() * others).sum(dim=1) for name in directions]
    if partition_mode == "joint":
        return torch.log1p(sum(sums) + (len(directions) - 1)).mean()
    return torch.stack([torch.log1p(n) for n in sums]).mean()


@pytest.mark.parametrize("spread", [1e-3, 30.0])
def test_dot_products_of_any_size_stay_finite_and_right(spread: float) -> None:
    features = {name: x * spread for name, x in random_features(9, 6, 1, seed=1).items()}
    loss, truth = gradients_of(st_loss, features, scale=1.0, similarity_fct=dot_score)
    result = InfoNCE(scale=1.0, similarity_fct=dot_score).value_and_cotangents(features)
    assert abs(result.loss - loss) <= 1e-10 * loss
    assert relative_error(result.cotangents, truth) <= 1e-10


@pytest.mark.parametrize("scale", [20.0, 45.0])
def test_a_non_finite_feature_is_not_hidden(scale: float) -> None:
    features = random_features(5, 4, 0, seed=9)
    features["positive"][2, 1] = float("nan")
    result = InfoNCE(scale=scale).value_and_cotangents(features)
    assert result.loss.isnan() and result.cotangents["anchor"].isnan().any()


def test_logits_far_below_the_largest_change_nothing_when_left_out() -> None:
    # Most of these exp(l − m) are subnormal in fp32, where they are taken as 0.
    features = random_features(64, 96, 0, seed=10, dtype=torch.float32)
    loss, truth = gradients_of(st_loss, features, scale=1.0, similarity_fct=dot_score)
    result = InfoNCE(scale=1.0, similarity_fct=dot_score).value_and_cotangents(features)
    assert abs(result.loss - loss) <= 1e-5 * loss
    assert relative_error(result.cotangents, truth) <= 1e-5


def test_zero_and_tiny_rows_are_differentiated_as_normalize_does() -> None:
    features = random_features(6, 4, 0, seed=2)
    features["anchor"][1] = 0.0
    features["positive"][2] *= 1e-13
    _, truth = gradients_of(st_loss, features)
    result = InfoNCE().value_and_cotangents(features)
    for name, x in result.cotangents.items():
        assert ((x - truth[name]).norm(dim=1) <= 1e-10 * truth[name].norm(dim=1)).all()


def test_columns_are_ordered_by_name_and_number() -> None:
    # Eleven negatives: as strings, negative_10 comes before negative_2.
    features = random_features(3, 4, 11, seed=3)
    options = {"hardness_mode": "in_batch_negatives", "hardness_strength": 2.0}
    shuffled = {name: features[name] for name in sorted(features, reverse=True)}
    loss, truth = gradients_of(st_loss, features, **options)
    result = InfoNCE(**options).value_and_cotangents(shuffled)
    assert list(result.cotangents) == list(shuffled)
    assert check_ranking_features(shuffled) == [*column_names(11)[1:], "anchor"]
    assert abs(result.loss - loss) <= 1e-10 * loss
    assert relative_error(result.cotangents, truth) <= 1e-10


@pytest.mark.parametrize(("name", "resolved"), [("cosine", cos_sim), ("dot", dot_score), ("euclidean", euclidean_sim)])
def test_the_similarity_of_a_model_is_resolved(name: str, resolved) -> None:
    features = random_features(5, 4, 0, seed=4)
    expected = InfoNCE(scale=2.0, similarity_fct=resolved).value_and_cotangents(features)
    objective = InfoNCE(scale=2.0, similarity_fct=Model(name).similarity)
    result = objective.value_and_cotangents(features)
    assert torch.equal(result.loss, expected.loss)
    assert relative_error(result.cotangents, expected.cotangents) == 0.0
    assert resolved.__name__ in repr(objective)


def test_the_closed_form_is_taken_for_every_name_of_the_cosine(monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("fell back to autograd")

    monkeypatch.setattr("st_cached_extras.objectives.contrastive.AutogradScores", refuse)
    features = random_features(4, 3, 0, seed=5)
    for similarity_fct in (cos_sim, pytorch_cos_sim, dot_score, Model("cosine").similarity):
        InfoNCE(similarity_fct=similarity_fct).value_and_cotangents(features)


def test_one_process_gathers_nothing() -> None:
    class Refusing(World):
        def gather_rows(self, x, counts):
            raise AssertionError("one process has nothing to gather")

    features = random_features(4, 3, 0, seed=6)
    assert InfoNCE().value_and_cotangents(features, world=Refusing()).loss > 0


def test_default_chunk_shrinks_as_columns_grow_but_not_below_half_of_the_features() -> None:
    from st_cached_extras.objectives.contrastive import chunk_rows

    assert chunk_rows(4 * 1024, 0) == 512
    assert chunk_rows(4 * 16384, 0) == 256
    assert chunk_rows(4 * 2 * 16384, 0) == 128
    assert chunk_rows(4 * 10**7, 0) == 16
    for count in (2**17, 2**20):
        assert chunk_rows(4 * count, 4 * 2 * count * 384) == 384
        assert chunk_rows(4 * count, 4 * 2 * count * 4096) == 512


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale": 0.0}, ValueError, ["scale", "0.0", "positive", "20.0"]),
        ({"scale": float("nan")}, ValueError, ["scale", "nan", "positive"]),
        ({"scale": "20"}, TypeError, ["scale", "'20'", "number"]),
        ({"similarity_fct": "cosine"}, TypeError, ["similarity_fct", "'cosine'", "function", "cos_sim"]),
        ({"directions": ()}, ValueError, ["directions", "()", "query_to_doc"]),
        ({"directions": ("doc_to_query",)}, ValueError, ["directions", "doc_to_query", "query_to_doc"]),
        ({"directions": ("query_to_doc", "doc_to_dog")}, ValueError, ["directions", "doc_to_dog", "doc_to_doc"]),
        ({"partition_mode": "both"}, ValueError, ["partition_mode", "'both'", "per_direction"]),
        (
            {"partition_mode": "per_direction", "directions": ("query_to_doc", "doc_to_doc")},
            ValueError,
            ["partition_mode", "per_direction", "doc_to_doc", "joint"],
        ),
        ({"hardness_mode": "hard"}, ValueError, ["hardness_mode", "'hard'", "hard_negatives", "None"]),
        ({"hardness_strength": -1.0}, ValueError, ["hardness_strength", "-1.0", "at least 0"]),
        ({"margin": -0.1}, ValueError, ["margin", "-0.1", "at least 0"]),
        ({"margin": "wide"}, TypeError, ["margin", "'wide'", "number"]),
        ({"chunk_size": 0}, ValueError, ["chunk_size", "0", "positive int", "None"]),
    ],
)
def test_bad_options_say_what_was_found_expected_and_the_way_out(options, error, words) -> None:
    with pytest.raises(error) as caught:
        InfoNCE(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_hardness_mode_without_strength_warns(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        InfoNCE(hardness_mode="all_negatives")
    assert "hardness_strength" in caplog.text


@pytest.mark.parametrize(
    ("features", "error", "words"),
    [
        ({"anchor": torch.ones(2, 3)}, ValueError, ["missing", "'positive'", "negative_1"]),
        ({}, ValueError, ["missing", "'anchor'", "'positive'"]),
        (
            {"anchor": torch.ones(2, 3), "positive": torch.ones(2, 3), "negative": torch.ones(2, 3)},
            ValueError,
            ["unknown", "'negative'", "negative_1"],
        ),
        ({"anchor": torch.ones(2, 3), "positive": torch.ones(4, 3)}, ValueError, ["'positive'", "(4, 3)", "(2, 3)"]),
        (
            {"anchor": torch.ones(2, 3), "positive": torch.ones(2, 5)},
            ValueError,
            ["'positive'", "dimensions", "(2, 5)"],
        ),
        ({"anchor": torch.ones(2, 3), "positive": torch.ones(2, 3, 1)}, ValueError, ["'positive'", "[B, D]", "pool"]),
        ({"anchor": torch.ones(0, 3), "positive": torch.ones(0, 3)}, ValueError, ["'anchor'", "(0, 3)", "one row"]),
        (
            {"anchor": torch.ones(2, 3), "positive": torch.ones(2, 3, dtype=torch.int64)},
            TypeError,
            ["'positive'", "int64", "floating-point"],
        ),
    ],
)
def test_bad_features_say_what_was_found_expected_and_the_way_out(features, error, words) -> None:
    with pytest.raises(error) as caught:
        InfoNCE().value_and_cotangents(features)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (torch.tensor([True, False]), TypeError, ["rows", "bool", "int64", "nonzero"]),
        (torch.tensor([0, 4]), ValueError, ["rows", "0 to 4", "0 to 3"]),
        (torch.tensor([-1]), ValueError, ["rows", "-1", "0 to 3"]),
    ],
)
def test_bad_rows_say_what_was_found_expected_and_the_way_out(rows, error, words) -> None:
    with pytest.raises(error) as caught:
        InfoNCE().value_and_cotangents(random_features(4, 3, 0, seed=7), rows=rows)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("similarity_fct", "words"),
    [
        (lambda a, b: (a[:1] * b[:1]).sum(dim=1), ["similarity_fct", "(1,)", "(4, 4)", "pairwise"]),
        (lambda a, b: (a @ b.T).detach(), ["similarity_fct", "graph", "detach"]),
    ],
)
def test_a_bad_similarity_says_what_was_found_expected_and_the_way_out(similarity_fct, words) -> None:
    with pytest.raises(ValueError) as caught:
        InfoNCE(similarity_fct=similarity_fct).value_and_cotangents(random_features(4, 3, 0, seed=8))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_strong_penalty_does_not_overflow_float32():
    anchor = torch.eye(3, 4) + 1
    features = {"anchor": anchor, "positive": anchor.flip(0)}
    options = dict(scale=20.0, hardness_mode="all_negatives", hardness_strength=100.0)
    leaves = [feature.double().requires_grad_() for feature in features.values()]
    truth = MultipleNegativesRankingLoss(None, **options).compute_loss_from_embeddings(leaves, None)
    truth.backward()
    result = InfoNCE(**options).value_and_cotangents(features)
    assert result.loss.item() == pytest.approx(truth.item(), rel=1e-5)
    for found, leaf in zip(result.cotangents.values(), leaves, strict=True):
        assert torch.allclose(found.double(), leaf.grad, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_the_loss_does_not_hold_is_refused():
    weight = torch.nn.Parameter(torch.eye(4))
    features = {name: torch.randn(3, 4) for name in ("anchor", "positive")}
    objective = InfoNCE(similarity_fct=lambda a, b: (a @ weight) @ b.T)
    with pytest.raises(ValueError, match=r"a parameter of shape \[4, 4\] that the loss does not hold"):
        objective.value_and_cotangents(features)


def grouped_double_loop(features, labels, *, scale, directions, partition_mode, margin, hardness_strength=0.0):
    """The definition with groups and a margin, one pair at a time; hardness on all negatives."""
    anchor, positive, *negatives = (features[name] for name in column_names(len(features) - 2))
    documents, B = [positive, *negatives], len(anchor)
    to_documents = [cos_sim(anchor, document) for document in documents]
    between_queries = cos_sim(anchor, anchor)
    between_documents = [cos_sim(positive, document) for document in documents]
    losses = []
    for i in range(B):
        p = scale * (to_documents[0][i, i] - margin)
        sums = {direction: [] for direction in directions}
        sums["query_to_doc"].append(p)
        if "doc_to_query" in directions:
            sums["doc_to_query"].append(p)
        for j, c in itertools.product(range(B), range(len(documents))):
            if (i == j and c > 0) or labels[i] != labels[j]:
                similarity = to_documents[c][i, j]
                sums["query_to_doc"].append(scale * similarity + hardness_strength * similarity.detach())
            if "doc_to_doc" in directions and labels[i] != labels[j]:
                sums["doc_to_doc"].append(scale * between_documents[c][i, j])
        for j in range(B):
            if labels[i] != labels[j]:
                if "query_to_query" in directions:
                    sums["query_to_query"].append(scale * between_queries[i, j])
                if "doc_to_query" in directions:
                    sums["doc_to_query"].append(scale * to_documents[0][j, i])
        groups = [list(itertools.chain(*sums.values()))] if partition_mode == "joint" else list(sums.values())
        losses.append(sum(torch.stack(group).logsumexp(0) for group in groups) / len(groups) - p)
    return torch.stack(losses).mean()


class TestInfoNCEWithGroupsAndAMargin(InfoNCEChecks):
    options: ClassVar[dict] = {
        "scale": 6.0,
        "directions": ALL_DIRECTIONS,
        "hardness_mode": "all_negatives",
        "hardness_strength": 2.0,
        "labels_as_groups": True,
        "margin": 0.2,
        "learnable_scale": True,
    }
    hard_negatives = 1

    def make_labels(self, batch_size, seed):
        return torch.randint(0, 4, (batch_size,), generator=torch.Generator().manual_seed(seed))

    def dense_loss(self, features, *, objective, labels, reference):
        names = ("directions", "partition_mode", "margin", "hardness_strength")
        options = {name: getattr(objective, name) for name in names}
        return grouped_double_loop(features, labels, scale=objective.log_scale.exp(), **options)


class TestSymmetricInfoNCEWithGroupsAndAMargin(TestInfoNCEWithGroupsAndAMargin):
    options: ClassVar[dict] = {
        "scale": 30.0,
        "directions": ("query_to_doc", "doc_to_query"),
        "partition_mode": "per_direction",
        "labels_as_groups": True,
        "margin": 0.3,
        "learnable_scale": True,
    }
    tolerance_float32 = 5e-5  # the rounding of a logit of 30


class TestPairsInBothDirections(TestSymmetricInfoNCEWithGroupsAndAMargin):
    """Where products are shared between directions."""

    hard_negatives = 0


class TestPairsInAllDirections(TestInfoNCEWithGroupsAndAMargin):
    options: ClassVar[dict] = {
        "scale": 6.0,
        "directions": ALL_DIRECTIONS,
        "labels_as_groups": True,
        "margin": 0.2,
        "learnable_scale": True,
    }
    hard_negatives = 0


def test_without_groups_labels_are_ignored_and_without_a_margin_nothing_changes() -> None:
    features, labels = random_features(6, 4, 1, seed=11), torch.tensor([0, 0, 1, 1, 2, 2])
    expected = InfoNCE().value_and_cotangents(features)
    assert torch.equal(InfoNCE(margin=0.0).value_and_cotangents(features, labels=labels).loss, expected.loss)
    different = InfoNCE(labels_as_groups=True).value_and_cotangents(features, labels=torch.arange(6))
    assert torch.allclose(different.loss, expected.loss, rtol=1e-12)
    same = InfoNCE(labels_as_groups=True).value_and_cotangents(features, labels=labels)
    assert same.loss < 0.99 * expected.loss


def test_one_group_of_all_leaves_a_row_its_own_hard_negatives_alone() -> None:
    features = random_features(5, 4, 1, seed=12)
    result = InfoNCE(scale=3.0, labels_as_groups=True).value_and_cotangents(features, labels=torch.zeros(5))
    u, p, n = (nn.functional.normalize(features[name]) for name in ("anchor", "positive", "negative_1"))
    expected = nn.functional.softplus(3.0 * ((u * n).sum(1) - (u * p).sum(1))).mean()
    assert torch.allclose(result.loss, expected, rtol=1e-12)
    alone = {name: features[name] for name in ("anchor", "positive")}
    nothing = InfoNCE(labels_as_groups=True).value_and_cotangents(alone, labels=torch.zeros(5))
    assert nothing.loss == 0.0 and not any(x.any() for x in nothing.cotangents.values())


@pytest.mark.parametrize(
    ("labels", "error", "words"),
    [
        (None, TypeError, ["labels", "None", "a group id", "column 'label'"]),
        (torch.zeros(4), ValueError, ["labels", "(4,)", "5 rows"]),
        (torch.zeros(5, 3), ValueError, ["labels", "(5, 3)", "one group id"]),
    ],
)
def test_bad_groups_say_what_was_found_expected_and_the_way_out(labels, error, words) -> None:
    with pytest.raises(error) as caught:
        InfoNCE(labels_as_groups=True).value_and_cotangents(random_features(5, 4, 0, seed=13), labels=labels)
    assert all(word in str(caught.value) for word in words), caught.value
