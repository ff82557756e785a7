"""MultiEncoderMMD against autograd through all pairs in fp64, with every option."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.testing import ObjectiveCheckCase
from tests.objectives.mmd.dense import KERNELS, dense_loss, dense_raw, random_rows, small_reference


class MMDCheckCase(ObjectiveCheckCase):
    """Several encoders of different shapes.

    Attributes:
        shapes: shape of a row by encoder.
        condition_size: of the joint law; 0 for the marginal one.
        current_rows: rows of the current reference, if it has a weight.
    """

    shapes: dict[str, tuple[int, ...]]
    condition_size = 0
    current_rows = 6

    def make_features(self, batch_size: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
        features = {
            name: random_rows(batch_size, shape, 10 * seed + index, dtype)
            for index, (name, shape) in enumerate(self.shapes.items())
        }
        if self.condition_size:
            features["condition"] = random_rows(batch_size, (self.condition_size,), 77 + seed, dtype)
        return features

    def make_reference(self, batch_size: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor] | None:
        if not self.make_objective().uses_reference:
            return None
        return self.make_features(self.current_rows, dtype, 500 + seed)

    def dense_loss(self, features, *, objective, labels, reference):
        return dense_loss(objective, features, reference)


class TestSeveralEncodersAndLayouts(MMDCheckCase):
    shapes = {"dino/v2.1": (6,), "tokens": (3, 4), "pooled": (2, 5)}  # noqa: RUF012

    def make_objective(self):
        references = {
            "dino/v2.1": small_reference((6,)),
            "tokens": small_reference((3, 4), layout="per_token"),
            "pooled": small_reference((2, 5), "laplace", layout="mean"),
        }
        return MultiEncoderMMD(references, weights={"dino/v2.1": 1.0, "tokens": 0.3, "pooled": 2.0})


class TestUStatisticWithACurrentReference(MMDCheckCase):
    shapes = {"a": (5,), "b": (2, 3)}  # noqa: RUF012

    def make_objective(self):
        references = {
            "a": small_reference((5,), "rational_quadratic"),
            "b": small_reference((2, 3), "energy"),
        }
        return MultiEncoderMMD(references, statistic="u", normalize=False, current_reference_weight=0.3)


class TestJointLawWithACurrentReference(MMDCheckCase):
    shapes = {"a": (5,), "b": (2, 3), "unconditional": (4,)}  # noqa: RUF012
    condition_size = 3
    current_rows = 7

    def make_objective(self):
        references = {
            "a": small_reference((5,), scales=(0.7, 1.1), condition_size=3),
            "b": small_reference((2, 3), layout="per_token", condition_size=3),
            "unconditional": small_reference((4,), scales=(1.0,)),
        }
        return MultiEncoderMMD(references, current_reference_weight=0.6)

    def dense_loss(self, features, *, objective, labels, reference):
        # The condition is given, not learned: its cotangent is 0.
        return dense_loss(objective, {**features, "condition": features["condition"].detach()}, reference)


def condition_of(size: int, count: int, seed: int) -> Tensor | None:
    return random_rows(count, (size,), seed, torch.float32) if size else None


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["flatten", "per_token", "mean"])
@pytest.mark.parametrize("statistic", ["v", "u"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_selected_rows_in_float32_equal_float64_autograd_of_the_whole(kernel, statistic, layout, rho, joint, offset):
    shape, size = (3, 8), 4 if joint else 0
    for scales in ((1.0,), (0.5, 1.0, 2.0)) if kernel != "energy" else ((1.0,),):
        reference = small_reference(shape, kernel, scales, layout, size, offset)
        x = random_rows(33, shape, 1, torch.float32) + offset
        current = random_rows(17, shape, 2, torch.float32) * 1.1 + offset
        condition, current_condition = condition_of(size, 33, 3), condition_of(size, 17, 4)
        objective = MultiEncoderMMD(
            {"x": reference}, statistic=statistic, normalize=False, current_reference_weight=rho, chunk_size=10
        )
        rows = torch.tensor([30, 2, 3, 11, 19])
        result = objective.value_and_cotangents(
            {"x": x} | ({"condition": condition} if joint else {}),
            reference={"x": current} | ({"condition": current_condition} if joint else {}),
            rows=rows,
        )
        leaf = x.double().requires_grad_()
        raw = dense_raw(
            reference,
            leaf,
            current.double(),
            rho=rho,
            statistic=statistic,
            condition=condition.double() if joint else None,
            current_condition=current_condition.double() if joint else None,
        )
        raw.backward()
        truth = leaf.grad[rows]
        assert abs(result.loss.double() - raw) <= 1e-6 * max(1.0, abs(reference.k_rr[0]))
        assert (result.cotangents["x"].double() - truth).norm() <= 5e-6 * truth.norm()


@pytest.mark.parametrize("statistic", ["v", "u"])
def test_a_derivative_through_one_member_of_each_pair_alone_would_be_seen(statistic):
    reference = small_reference((24,))
    x = random_rows(33, (24,), 1)
    truth, one_sided = x.clone().requires_grad_(), x.clone().requires_grad_()
    dense_raw(reference, truth, statistic=statistic).backward()
    dense_raw(reference, one_sided, statistic=statistic, other_side=x).backward()
    rows = torch.tensor([30, 2, 3, 11, 19])
    objective = MultiEncoderMMD({"x": reference}, statistic=statistic, normalize=False).double()
    found = objective.value_and_cotangents({"x": x}, rows=rows).cotangents["x"]
    assert (found - truth.grad[rows]).norm() <= 1e-10 * truth.grad[rows].norm()
    assert (found - one_sided.grad[rows]).norm() >= 0.02 * truth.grad[rows].norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_rows_and_rows_on_landmarks_are_differentiated_as_the_same_point(kernel):
    # In fp32, |x|² + |y|² − 2 x·y of equal rows is rounding noise, which a weight of 1/d would blow up.
    features = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) + 3
    reference = NystromReference.fit(features, landmarks=12, kernel=kernel, center=False)
    landmarks = (reference.landmarks[0] + reference.center[0]).clone()
    x = torch.cat([landmarks[:4], landmarks[:2], random_rows(5, (40,), 0, torch.float32) + 3])
    leaf = x.double().requires_grad_()
    dense_raw(reference, leaf).backward()
    result = MultiEncoderMMD({"x": reference}, normalize=False).value_and_cotangents({"x": x})
    assert (result.cotangents["x"].double() - leaf.grad).norm() <= 5e-6 * leaf.grad.norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_far_students_meet_no_subnormal_numbers_and_no_wrong_force(kernel):
    reference = small_reference((24,), kernel)
    for distance in (2.0, 10.0, 30.0, 300.0):
        x = random_rows(33, (24,), 1, torch.float32) + distance
        leaf = x.double().requires_grad_()
        dense_raw(reference, leaf).backward()
        result = MultiEncoderMMD({"x": reference}, normalize=False).value_and_cotangents({"x": x})
        assert (result.cotangents["x"].double() - leaf.grad).norm() <= 5e-6 * leaf.grad.norm()
        seen = []
        contract = reference.kernel.contract

        def recorded(buffers, *arguments, seen=seen, contract=contract, **options):
            values, W, factor = contract(buffers, *arguments, **options)
            seen.append(W.abs())
            return values, W, factor

        reference.kernel.contract = recorded
        MultiEncoderMMD({"x": reference}, normalize=False).value_and_cotangents({"x": x})
        del reference.kernel.contract
        W = torch.cat([w.flatten() for w in seen])
        assert not ((W > 0) & (torch.finfo(torch.float32).tiny > W)).any()


def test_the_function_form_gives_the_rows_the_derivative_of_the_whole():
    references = {"a": small_reference((5,)), "b": small_reference((2, 3), layout="per_token")}
    mmd = MultiEncoderMMD(references, current_reference_weight=0.3).double()
    shapes = {"a": (5,), "b": (2, 3)}
    batch = {name: random_rows(9, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    teacher = {name: random_rows(4, shape, 7 + seed) for seed, (name, shape) in enumerate(shapes.items())}
    rows = torch.tensor([6, 1])
    expected = mmd.value_and_cotangents(batch, reference=teacher, rows=rows)
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    students = {name: (weight * x[rows]).detach().requires_grad_() for name, x in batch.items()}
    loss, metadata = mmd(
        gradient_students=students,
        student_reference=batch,
        current_teacher=teacher,
        gradient_student_indices=rows,
    )
    (3 * loss).backward()
    assert torch.equal(loss.detach(), expected.loss)
    assert metadata == expected.metrics and set(metadata) == {"mmd/a", "mmd/b"}
    for name, x in students.items():
        assert torch.allclose(x.grad, 3 * expected.cotangents[name], rtol=1e-12)
    whole, _ = mmd(gradient_students=batch, current_teacher=teacher)
    assert torch.equal(whole, expected.loss) and not whole.requires_grad


def test_each_encoder_pulls_as_hard_as_its_weight_whatever_its_scale():
    references = {"a": small_reference((5,)), "b": small_reference((4,), "laplace")}
    features = {"a": random_rows(9, (5,), 0), "b": random_rows(9, (4,), 1)}
    raw = MultiEncoderMMD(references, normalize=False).double().value_and_cotangents(features)
    mmd = MultiEncoderMMD(references, weights={"a": 0.5, "b": 2.0}).double()
    result = mmd.value_and_cotangents(features)
    assert result.loss.item() == pytest.approx(2.5, abs=1e-4)
    for name, weight in mmd.weights.items():
        expected = weight * raw.cotangents[name] / (raw.metrics[f"mmd/{name}"].abs() + 1e-7)
        assert torch.allclose(result.cotangents[name], expected, rtol=1e-10)
    mmd.set_weights({"a": 0.0, "b": 1.0})
    assert not mmd.value_and_cotangents(features).cotangents["a"].any()


def test_weights_follow_the_balance():
    from st_cached_extras.objectives.mmd import EncoderBalance

    references = {"a": small_reference((5,)), "b": small_reference((4,))}
    balance = EncoderBalance({"a": 0.0, "b": 0.0})
    mmd = MultiEncoderMMD(references, weights=balance)
    assert mmd.weights == {"a": 1.0, "b": 1.0} and balance in list(mmd.modules())
    balance.update({"a": 1.0, "b": 0.1})
    assert mmd.weights["a"] > 1 > mmd.weights["b"]


def test_it_adds_nothing_to_a_state_dict_and_follows_its_owner():
    mmd = MultiEncoderMMD({"dino/v2.1": small_reference((5,))})
    assert not mmd.state_dict() and not list(mmd.parameters())
    assert copy.deepcopy(mmd).double().references["dino/v2.1"].landmarks.dtype == torch.float64


@pytest.mark.parametrize("size", [0, 3])
def test_memory_of_the_pairs_goes_with_the_chunk_and_results_do_not(size):
    reference = small_reference((6,), condition_size=size)
    features = {"x": random_rows(50, (6,), 0)}
    if size:
        features["condition"] = random_rows(50, (size,), 1)
    expected = MultiEncoderMMD({"x": reference}, chunk_size=50).double().value_and_cotangents(features)
    for chunk_size in (1, 7, 49):
        found = MultiEncoderMMD({"x": reference}, chunk_size=chunk_size).double().value_and_cotangents(features)
        assert torch.allclose(found.cotangents["x"], expected.cotangents["x"], rtol=1e-9, atol=1e-15)


A = {"a": small_reference((5,))}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (({},), ValueError, ["references", "one or more"]),
        (([small_reference((5,))],), TypeError, ["references", "mapping", "load"]),
        (({"condition": small_reference((5,))},), ValueError, ["references", "'condition'"]),
        ((A, {"b": 1.0}), ValueError, ["weights", "'b'", "a", "None"]),
        ((A, {"a": -1.0}), ValueError, ["weights", "-1.0", "at least 0"]),
        ((A, 2.0), TypeError, ["weights", "float", "mapping"]),
        ((A, None, "w"), ValueError, ["statistic", "'w'", "'v'", "'u'"]),
        ((A, None, "v", True, 0.0), ValueError, ["eps", "0.0", "1e-7"]),
        ((A, None, "v", True, 1e-7, 1.5), ValueError, ["current_reference_weight", "1.5", "0", "1"]),
        ((A, None, "v", True, 1e-7, 0.0, 0), ValueError, ["chunk_size", "0", "positive int"]),
        (
            ({"a": small_reference((5,), condition_size=3), "b": small_reference((5,), condition_size=2)},),
            ValueError,
            ["references", "different sizes", "'a': 3", "'b': 2"],
        ),
    ],
)
def test_bad_options_say_what_was_found_expected_and_the_way_out(arguments, error, words):
    with pytest.raises(error) as caught:
        MultiEncoderMMD(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("features", "error", "words"),
    [
        ({}, ValueError, ["features", "missing ['a']"]),
        ({"a": torch.ones(2, 5), "b": torch.ones(2, 5)}, ValueError, ["unknown ['b']", "['a']"]),
        ({"a": torch.ones(2, 4)}, ValueError, ["'a'", "[4]", "[5]", "reference"]),
        ({"a": torch.ones(0, 5)}, ValueError, ["'a'", "[0, 5]"]),
        ({"a": torch.ones(2, 5, dtype=torch.int64)}, TypeError, ["'a'", "int64", "floating"]),
    ],
)
def test_bad_features_say_what_was_found_expected_and_the_way_out(features, error, words):
    with pytest.raises(error) as caught:
        MultiEncoderMMD(A).value_and_cotangents(features)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_current_reference_is_named():
    with pytest.raises(ValueError, match=r"reference: found None with current_reference_weight=0.5"):
        MultiEncoderMMD(A, current_reference_weight=0.5).value_and_cotangents({"a": torch.ones(2, 5)})


def test_encoders_that_saw_different_samples_are_named():
    references = {"a": small_reference((5,)), "b": small_reference((4,))}
    with pytest.raises(ValueError, match=r"'b'.*3 rows, expected 2 as 'a'"):
        MultiEncoderMMD(references).value_and_cotangents({"a": torch.ones(2, 5), "b": torch.ones(3, 4)})


def test_students_that_do_not_fit_their_indices_are_named():
    mmd = MultiEncoderMMD(A)
    batch = {"a": torch.randn(6, 5)}
    with pytest.raises(ValueError, match=r"gradient_students\['a'\].*\[3, 5\].*\[2, 5\]"):
        mmd(
            gradient_students={"a": torch.ones(3, 5)},
            student_reference=batch,
            gradient_student_indices=torch.tensor([0, 1]),
        )
