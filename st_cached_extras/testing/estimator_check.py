"""What every estimator of a backward must satisfy, as a test class to inherit: say how it is configured.

class TestRademacher(EstimatorCheckCase):
    def make_config(self):
        return ZBPConfig(mode="cd", probe="rademacher", n_probes=3, eps=1e-4)

    def relative_variance(self, size):
        return (size - 1) / 3
"""

from __future__ import annotations

import copy
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from st_cached_extras.zbp.config import ZBPConfig
from st_cached_extras.zbp.estimators import estimate_vjp
from st_cached_extras.zbp.queries import QueryCount

Layer = Callable[[Tensor], Tensor]


class EstimatorCheckCase(ABC):
    """Inherit, name the class ``Test...``, define how the estimator is configured; pytest finds the checks.

    Attributes:
        size: dimensions d of the toy layer.
        draws: of the statistics; in ``calls`` calls with another seed each, of draws / calls rows.
        calls: those calls.
        bias: relative error allowed of the mean over draws. With the default, an estimator with the largest variance
            here (3.5) fails by chance once in 2000 seeds, and the seeds are fixed.
        variance_tolerance: relative error allowed of the variance over draws; a factor of 2 is ten times that.
        jacobian_tolerance: relative error allowed where the estimate should be exact.
    """

    size: int = 6
    draws: int = 4000
    calls: int = 40
    bias: float = 0.06
    variance_tolerance: float = 0.1

    # What an estimator supplies

    @abstractmethod
    def make_config(self) -> ZBPConfig:
        """The configuration, the same at every call, with a given step."""

    @abstractmethod
    def relative_variance(self, size: int) -> float:
        """E|estimate - g|² / |g|² in ``size`` dimensions, by the formula."""

    def queries(self) -> int | None:
        """Forward calls of one estimate; None where it asks for none or that is not fixed."""
        return None

    def make_layer(self, dtype: torch.dtype, seed: int) -> tuple[Layer, Tensor, Tensor]:
        """A layer, smooth and row by row, and one row [1, d] of its input and of d loss / d output."""
        generator = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(self.size, self.size, generator=generator, dtype=torch.float64) for _ in "ab")
        first, second = first.to(dtype), second.to(dtype)
        x = torch.randn(1, self.size, generator=generator, dtype=torch.float64)
        v = torch.randn(1, self.size, generator=generator, dtype=torch.float64)
        return lambda z: torch.tanh(0.5 * z @ first.T) @ second.T, x.to(dtype), v.to(dtype)

    # The checks

    def test_the_mean_over_draws_is_the_gradient_and_the_variance_that_of_the_formula(self) -> None:
        f, x, v = self.make_layer(torch.float64, 0)
        g = dense_vjp(f, x, v)[0]
        rows = self.draws // self.calls
        estimates = torch.cat(
            [
                estimate_vjp(
                    f, x.expand(rows, -1), v.expand(rows, -1), self.make_config().replace(seed=seed), call=seed
                )
                for seed in range(self.calls)
            ]
        )
        error = (estimates.mean(0) - g).norm() / g.norm()
        assert error <= self.bias, f"the mean over {len(estimates)} draws is {error:.3f} off"
        found = (estimates - g).square().sum(1).mean() / g.square().sum()
        expected = self.relative_variance(self.size)
        assert found == pytest.approx(expected, rel=self.variance_tolerance, abs=1e-6)

    def test_rows_of_one_call_err_independently(self) -> None:
        # The mean over rows has the variance of one, divided: a shared error would not average away in a batch.
        f, x, v = self.make_layer(torch.float64, 1)
        g, rows = dense_vjp(f, x, v)[0], 64
        means = torch.stack(
            [
                estimate_vjp(f, x.expand(rows, -1), v.expand(rows, -1), self.make_config().replace(seed=seed)).mean(0)
                for seed in range(60)
            ]
        )
        found = (means - g).square().sum(1).mean() / g.square().sum()
        # 60 draws of a sum of 6 squares: a relative standard deviation of about .1.
        assert found <= 1.5 * self.relative_variance(self.size) / rows + 1e-6

    def test_the_same_call_draws_the_same_and_another_draws_anew(self) -> None:
        f, x, v = self._batch(torch.float32)
        first = estimate_vjp(f, x, v, self.make_config(), call=3)
        assert torch.equal(estimate_vjp(f, x, v, self.make_config(), call=3), first)
        if self.relative_variance(self.size) > 1e-6:
            assert not torch.allclose(estimate_vjp(f, x, v, self.make_config(), call=4), first)
            assert not torch.allclose(estimate_vjp(f, x, v, self.make_config().replace(seed=1), call=3), first)

    def test_the_global_random_state_is_left_alone(self) -> None:
        f, x, v = self._batch(torch.float32)
        before = torch.get_rng_state()
        estimate_vjp(f, x, v, self.make_config())
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("chunk", [2, 3, 64])
    def test_chunks_of_probes_do_not_matter(self, chunk: int) -> None:
        f, x, v = self._batch(torch.float64)
        expected = estimate_vjp(f, x, v, self.make_config())
        for batched in (False, True):
            found = estimate_vjp(f, x, v, self.make_config().replace(probe_chunk=chunk), batched=batched)
            assert (found - expected).norm() <= 1e-9 * expected.norm()

    def test_it_is_linear_in_v(self) -> None:
        f, x, v = self._batch(torch.float64)
        expected = estimate_vjp(f, x, v, self.make_config())
        found = estimate_vjp(f, x, -1024 * v, self.make_config())
        assert (found + 1024 * expected).norm() <= 1e-9 * found.norm()

    def test_a_row_does_not_feel_the_others(self) -> None:
        f, x, v = self._batch(torch.float64)
        other_x, other_v = x.clone(), v.clone()
        other_x[1:], other_v[1:] = 3 * x[1:].flip(0), -v[1:]
        first, second = (estimate_vjp(f, a, b, self.make_config())[0] for a, b in ((x, v), (other_x, other_v)))
        assert (first - second).norm() <= 1e-9 * first.norm()

    def test_queries_are_counted(self) -> None:
        f, x, v = self._batch(torch.float32)
        calls = []
        count = QueryCount()
        estimate_vjp(lambda z: calls.append(len(z)) or f(z), x, v, self.make_config(), count=count)
        expected = self.queries()
        if expected is not None:
            assert count == QueryCount(queries=expected)
            assert calls == expected * [len(x)]

    def test_what_is_not_valid_gets_no_gradient(self) -> None:
        f, x, v = self._batch(torch.float32)
        valid = torch.ones_like(x, dtype=torch.bool)
        valid[1, 2:] = valid[3] = False
        gradient = estimate_vjp(f, x, v, self.make_config(), valid=valid)
        assert gradient[~valid].count_nonzero() == 0 and gradient[valid].count_nonzero() > 0

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_shape_and_dtype_are_the_input_s_and_nothing_is_changed_or_kept(self, dtype: torch.dtype) -> None:
        f, x, v = self._batch(dtype)
        before = x.clone(), v.clone()
        gradient = estimate_vjp(f, x.requires_grad_(), v, self.make_config().replace(eps=0.1))
        assert gradient.shape == x.shape and gradient.dtype == dtype and bool(gradient.isfinite().all())
        assert gradient.grad_fn is None and not gradient.requires_grad
        assert torch.equal(x, before[0]) and torch.equal(v, before[1])

    def test_a_row_of_zeros_and_a_v_of_zeros_stay_finite(self) -> None:
        f, x, v = self._batch(torch.float32)
        x[0], v[1] = 0, 0
        gradient = estimate_vjp(f, x, v, self.make_config())
        assert bool(gradient.isfinite().all()) and gradient[1].count_nonzero() == 0

    def test_the_configuration_survives_json_pickle_and_copies(self) -> None:
        config = self.make_config()
        for twin in (ZBPConfig.from_json(config.to_json()), pickle.loads(pickle.dumps(config)), copy.copy(config)):
            assert twin == config

    # How they are made

    def _batch(self, dtype: torch.dtype, rows: int = 5) -> tuple[Layer, Tensor, Tensor]:
        f, x, v = self.make_layer(dtype, 2)
        scales = torch.linspace(0.5, 2.0, rows, dtype=torch.float64)[:, None].to(dtype)
        return f, x * scales, v * scales.flip(0)


def dense_vjp(f: Layer, x: Tensor, v: Tensor) -> Tensor:
    """The truth, by the whole Jacobian in fp64: g_b = sum_k v_bk d f(x)_bk / d x_b, one entry at a time."""
    x, v = x.double(), v.double()
    jacobian = torch.autograd.functional.jacobian(f, x)  # [*output, *input]
    return torch.tensordot(v.flatten(), jacobian.reshape(math.prod(v.shape), *x.shape), dims=1)
