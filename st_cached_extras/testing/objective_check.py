"""What every objective must satisfy, as a test class to inherit: say how it is made and what its dense truth is.

class TestInfoNCE(ObjectiveCheckCase):
    def make_objective(self):
        return InfoNCE()

    def make_features(self, batch_size, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(batch_size, 5, generator=generator).to(dtype) for name in ("anchor", "positive")}

    def dense_loss(self, features, *, objective, labels, reference):
        ...  # slow and obvious, one scalar with a graph
"""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult
from st_cached_extras.objectives.parameters import own_parameters
from st_cached_extras.testing.thread_world import run_ranks

Features = dict[str, Tensor]


class ObjectiveCheckCase(ABC):
    """Inherit, name the class ``Test...``, define three methods; pytest finds the checks.

    Attributes:
        batch_sizes: batch sizes of the comparisons with the dense truth.
        seeds: their seeds.
        tolerance_float64: relative error allowed in fp64.
        tolerance_float32: relative error allowed in fp32, against the fp64 truth of the same values.
        magnitude: loss and gradients smaller than this count as this large in a relative error, for exact zeros.
    """

    batch_sizes: tuple[int, ...] = (2, 7, 12)
    seeds: tuple[int, ...] = (0, 1, 2)
    tolerance_float64: float = 1e-10
    tolerance_float32: float = 1e-5
    magnitude: float = 1e-3

    # What an objective supplies

    @abstractmethod
    def make_objective(self) -> Objective:
        """A new objective, the same at every call."""

    @abstractmethod
    def make_features(self, batch_size: int, dtype: torch.dtype, seed: int) -> Features:
        """Features by name, [B, ...]; the same values for every ``dtype`` but for its rounding."""

    @abstractmethod
    def dense_loss(
        self, features: Features, *, objective: Objective, labels: Tensor | None, reference: Features | None
    ) -> Tensor:
        """The loss of all rows, a scalar with a graph to ``features`` and to the parameters of ``objective``."""

    def make_labels(self, batch_size: int, seed: int) -> Tensor | None:
        """Labels [B, ...], if the objective reads them."""
        return None

    def make_reference(self, batch_size: int, dtype: torch.dtype, seed: int) -> Features | None:
        """Reference features, if the objective uses them."""
        return None

    # The checks

    def test_cotangents_equal_dense_autograd_in_float64(self) -> None:
        for case in self._cases(torch.float64):
            self._check_equals_dense(case, self.tolerance_float64)

    def test_cotangents_equal_dense_autograd_in_float32(self) -> None:
        for case in self._cases(torch.float32):
            result = self._check_equals_dense(case, self.tolerance_float32)
            assert result.loss.dtype == torch.float32
            assert {x.dtype for x in result.cotangents.values()} == {torch.float32}

    def test_batch_of_one(self) -> None:
        self._check_equals_dense(Case(self, 1, torch.float64, 3), self.tolerance_float64)

    def test_chunk_size_does_not_matter(self) -> None:
        case = Case(self, 11, torch.float64, 4)
        expected = case.evaluate()
        for chunk_size in (1, 3, 10, 11, 64) if hasattr(case.objective, "chunk_size") else ():
            case.objective.chunk_size = chunk_size
            self._check_same(case.evaluate(), expected, self.tolerance_float64)

    def test_row_order_does_not_matter(self) -> None:
        case = Case(self, 9, torch.float64, 5)
        expected = case.evaluate()
        order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
        shuffled = case.evaluate(
            features={name: x[order] for name, x in case.features.items()},
            labels=None if case.labels is None else case.labels[order],
        )
        cotangents = {name: x[order] for name, x in expected.cotangents.items()}
        self._check_same(
            shuffled,
            ObjectiveResult(expected.loss, cotangents, expected.parameter_cotangents),
            self.tolerance_float64,
        )

    @pytest.mark.parametrize("rows", [[3], [8, 0, 5], [2, 2, 7], [], list(range(9))])
    def test_rows_select_the_same_cotangents(self, rows: list[int]) -> None:
        case = Case(self, 9, torch.float64, 6)
        wanted = torch.tensor(rows, dtype=torch.int64)
        expected = case.evaluate()
        cotangents = {name: x[wanted] for name, x in expected.cotangents.items()}
        self._check_same(
            case.evaluate(rows=wanted),
            ObjectiveResult(expected.loss, cotangents, expected.parameter_cotangents),
            self.tolerance_float64,
        )

    def test_order_of_names_does_not_matter(self) -> None:
        case = Case(self, 7, torch.float64, 7)
        backwards = dict(reversed(case.features.items()))
        self._check_same(case.evaluate(features=backwards), case.evaluate(), self.tolerance_float64)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_does_not_change_the_result(self, dtype: torch.dtype) -> None:
        case = Case(self, 10, torch.float32, 8)
        expected = case.evaluate()
        with torch.autocast("cpu", dtype=dtype):
            self._check_same(case.evaluate(), expected, 1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_features_get_fp32_cotangents(self, dtype: torch.dtype) -> None:
        case = Case(self, 10, dtype, 9)
        result = self._check_equals_dense(case, self.tolerance_float32)
        assert {x.dtype for x in (result.loss, *result.cotangents.values())} == {torch.float32}

    def test_features_are_left_untouched_and_no_graph_is_kept(self) -> None:
        case = Case(self, 8, torch.float32, 10)
        before = {name: x.clone() for name, x in case.features.items()}
        with torch.enable_grad():
            result = case.evaluate()
        for name, x in case.features.items():
            assert torch.equal(x, before[name]), f"{name} was changed"
            assert not x.requires_grad and x.grad is None
        for x in (result.loss, *result.cotangents.values(), *result.parameter_cotangents.values()):
            assert not x.requires_grad and x.grad_fn is None
        for name, parameter in case.objective.named_parameters():
            assert parameter.grad is None, f"{name}.grad was written; it belongs into parameter_cotangents"
        memory = [x.untyped_storage().data_ptr() for x in case.features.values()]
        assert not any(x.untyped_storage().data_ptr() in memory for x in result.cotangents.values())

    def test_two_evaluations_do_not_share_memory(self) -> None:
        case = Case(self, 8, torch.float64, 11)
        first = case.evaluate()
        kept = {name: x.clone() for name, x in first.cotangents.items()}
        case.evaluate(features={name: -x for name, x in case.features.items()})
        assert all(torch.equal(x, kept[name]) for name, x in first.cotangents.items())

    def test_pickles_and_deepcopies(self) -> None:
        case = Case(self, 6, torch.float64, 12)
        expected = case.evaluate()
        for twin in (copy.deepcopy(case.objective), pickle.loads(pickle.dumps(case.objective))):
            assert repr(twin) == repr(case.objective)
            self._check_same(case.evaluate(objective=twin), expected, 0.0)

    @pytest.mark.parametrize("selected", [False, True], ids=["all_rows", "some_rows"])
    @pytest.mark.parametrize("counts", [(4, 7), (5, 5), (3, 1, 6)], ids=str)
    def test_ranks_equal_one_process(self, counts: tuple[int, ...], selected: bool) -> None:
        case = Case(self, sum(counts), torch.float64, 13)
        expected = case.evaluate()
        # An uneven and unsorted choice, none of them on some rank.
        rows = [torch.arange(n - 1, -1, -2)[: rank + 1] for rank, n in enumerate(counts)] if selected else None
        if selected and len(counts) > 2:
            rows[1] = rows[1][:0]
        results = self._on_ranks(case, counts, rows)
        for rank, result in enumerate(results):
            cotangents = {name: x.split(counts)[rank] for name, x in expected.cotangents.items()}
            if selected:
                cotangents = {name: x[rows[rank]] for name, x in cotangents.items()}
            self._check_same(
                result,
                ObjectiveResult(expected.loss, cotangents, expected.parameter_cotangents),
                self.tolerance_float64,
                of_rank=rank,
            )

    def test_collectives_do_not_grow_with_chunks_or_rows(self) -> None:
        small, large = Case(self, 6, torch.float64, 14), Case(self, 24, torch.float64, 15)
        counted = []
        for case, counts in ((small, (3, 3)), (large, (13, 11)), (large, (13, 11))):
            worlds = []
            if counted and hasattr(case.objective, "chunk_size"):
                case.objective.chunk_size = 64 if len(counted) == 1 else 2
            self._on_ranks(case, counts, None, worlds)
            assert worlds[0].collectives == worlds[1].collectives
            counted.append(worlds[0].collectives)
        assert counted[0] == counted[1] == counted[2]

    # How they compare

    def _cases(self, dtype: torch.dtype) -> list[Case]:
        return [Case(self, size, dtype, seed) for size in self.batch_sizes for seed in self.seeds]

    def _check_equals_dense(self, case: Case, tolerance: float) -> ObjectiveResult:
        result = case.evaluate()
        self._check_same(result, case.dense(), tolerance)
        return result

    def _check_same(
        self, result: ObjectiveResult, expected: ObjectiveResult, tolerance: float, of_rank: int | None = None
    ) -> None:
        where = "" if of_rank is None else f" on rank {of_rank}"
        assert result.cotangents.keys() == expected.cotangents.keys()
        assert result.parameter_cotangents.keys() == expected.parameter_cotangents.keys()
        pairs = [("loss", result.loss, expected.loss)]
        pairs += [(f"cotangents[{n!r}]", x, expected.cotangents[n]) for n, x in result.cotangents.items()]
        pairs += [
            (f"parameter_cotangents[{n!r}]", x, expected.parameter_cotangents[n])
            for n, x in result.parameter_cotangents.items()
        ]
        for name, found, truth in pairs:
            assert found.shape == truth.shape, f"{name}{where}: shape {found.shape}, not {truth.shape}"
            error = (found.double() - truth.double()).norm() / truth.double().norm().clamp_min(self.magnitude)
            assert error <= tolerance, f"{name}{where}: relative error {error:.2e}, allowed {tolerance:.0e}"

    def _on_ranks(
        self, case: Case, counts: tuple[int, ...], rows: list[Tensor] | None, worlds: list | None = None
    ) -> list[ObjectiveResult]:
        objectives = [copy.deepcopy(case.objective) for _ in counts]

        def evaluate(world: World) -> ObjectiveResult:
            rank = world.rank
            return case.evaluate(
                objective=objectives[rank],
                features={name: x.split(counts)[rank] for name, x in case.features.items()},
                labels=None if case.labels is None else case.labels.split(counts)[rank],
                reference=_share(case.reference, len(counts), rank),
                rows=None if rows is None else rows[rank],
                world=world,
            )

        results, used = run_ranks(len(counts), evaluate)
        if worlds is not None:
            worlds += used
        return results


class Case:
    """One objective with one batch, and the two ways to evaluate it."""

    def __init__(self, check: ObjectiveCheckCase, batch_size: int, dtype: torch.dtype, seed: int) -> None:
        self.check = check
        self.objective = check.make_objective()
        if dtype == torch.float64:
            self.objective.double()
        self.features = check.make_features(batch_size, dtype, seed)
        self.labels = check.make_labels(batch_size, seed)
        self.reference = check.make_reference(batch_size, dtype, seed)

    def evaluate(self, **replaced) -> ObjectiveResult:
        """The objective's own answer, with the given arguments in place of this case's."""
        arguments = {"labels": self.labels, "reference": self.reference, **replaced}
        objective = arguments.pop("objective", self.objective)
        return objective.value_and_cotangents(arguments.pop("features", self.features), **arguments)

    def dense(self) -> ObjectiveResult:
        """The truth: autograd through the dense loss in fp64, on the very values of this case's features."""
        objective = copy.deepcopy(self.objective).double()
        leaves = {name: x.double().clone().requires_grad_() for name, x in self.features.items()}
        reference = None if self.reference is None else {name: x.double() for name, x in self.reference.items()}
        parameters = own_parameters(objective)
        loss = self.check.dense_loss(leaves, objective=objective, labels=self.labels, reference=reference)
        inputs = [*leaves.values(), *parameters.values()]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
        by_feature = dict(zip(leaves, gradients[: len(leaves)], strict=True))
        by_parameter = dict(zip(parameters, gradients[len(leaves) :], strict=True))
        return ObjectiveResult(loss.detach(), by_feature, by_parameter)


def _share(reference: Mapping[str, Tensor] | None, size: int, rank: int) -> Features | None:
    return None if reference is None else {name: x.tensor_split(size)[rank] for name, x in reference.items()}
