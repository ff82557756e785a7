"""Kernels: values and weights against autograd, the exact diagonal, and the contraction of a block in place."""

from __future__ import annotations

import math

import pytest
import torch

from st_cached_extras.objectives.mmd import median_bandwidth
from st_cached_extras.objectives.mmd.kernels import KERNELS, make_kernel, squared_distances
from st_cached_extras.objectives.mmd.pairs import PairSums
from tests.objectives.mmd.dense import dense_kernel

ALL_SCALES = [(1.0,), (0.5, 1.0, 2.0), (2.0, 0.7, 1.1), (1.0, 4.0, 0.125)]
CASES = [(name, scales) for name in KERNELS for scales in ALL_SCALES if name != "energy" or len(scales) == 1]


def squared(rows: int = 6, columns: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 6 + 0.01


@pytest.mark.parametrize(("name", "scales"), CASES)
def test_the_weight_times_the_difference_is_the_derivative(name, scales):
    x = torch.linspace(0.05, 6, 40, dtype=torch.float64)[:, None].requires_grad_()
    dense_kernel(name, scales, 1.0, x, torch.zeros(1, 1, dtype=torch.float64)).mean(dim=0).sum().backward()
    weight = make_kernel(name, scales).weight(x.detach().square())
    assert torch.allclose(-weight * x.detach(), x.grad, rtol=1e-12)


@pytest.mark.parametrize(("name", "scales"), CASES)
def test_the_value_is_that_of_the_formula_and_exact_on_the_diagonal(name, scales):
    kernel = make_kernel(name, scales)
    x, y = (torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 7))
    expected = dense_kernel(name, scales, 1.0, x, y)
    assert torch.allclose(kernel.values(squared_distances(x, y)), expected, rtol=1e-12)
    assert torch.allclose(kernel.value(squared_distances(x, y)), expected.mean(dim=0), rtol=1e-12)
    zero = torch.zeros(3)
    assert torch.equal(kernel.value(zero), torch.full((3,), kernel.at_zero))
    assert kernel.weight(zero).isfinite().all() and (not kernel.by_distance or not kernel.weight(zero).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("of_landmarks", [False, True])
@pytest.mark.parametrize(("name", "scales"), CASES)
def test_a_block_is_contracted_in_place(name, scales, of_landmarks, dtype):
    kernel, d2 = make_kernel(name, scales), squared()
    d2[2, 3] = d2[4, 0] = 0
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(len(kernel.scales), 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(len(kernel.scales), 8, generator=generator, dtype=torch.float64) if of_landmarks else None
    single = [make_kernel(name, (s,)) for s in kernel.scales]
    e = torch.full_like(values, 1 / len(kernel.scales)) if weights is None else weights
    expected = sum(k.value(d2) @ c for k, c in zip(single, values, strict=True))
    expected_weights = sum(k.weight(d2) * c for k, c in zip(single, e, strict=True))
    buffers = [
        d2.to(dtype, copy=True),
        *(torch.full_like(d2, math.nan, dtype=dtype) for _ in range(kernel.buffers - 1)),
    ]
    weights = None if weights is None else weights.to(dtype)
    found, W, factor = kernel.contract(buffers, values.to(dtype), weights)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(W.double() * factor, expected_weights, rtol=tolerance, atol=tolerance)
    buffers[0].copy_(d2)
    without, none, _ = kernel.contract(buffers, values.to(dtype), with_weights=False)
    assert torch.equal(without, found) and none is None


def test_scales_that_are_powers_are_squared_and_stay_precise():
    kernel = make_kernel("gaussian", (0.5, 1.0, 2.0))
    assert [squarings for _, squarings in kernel._plan] == [None, 2, 2] and kernel.buffers == 2
    d2 = torch.linspace(0, 10, 4096)[None]
    for index, scale in enumerate(kernel.scales):
        coefficients = torch.zeros(3, 4096)
        coefficients[index, :] = 1
        buffers = [d2.clone(), torch.empty_like(d2)]
        _, W, _ = kernel.contract(buffers, coefficients, coefficients)
        truth = torch.exp(-d2.double() / (2 * scale**2)) / scale**2
        # The error of a power grows with it, and with the exponent as that of exp itself does.
        assert ((W - truth).abs() <= 2e-6 * truth + 1e-12).all()


def test_every_pair_of_rows_is_computed_once(monkeypatch):
    kernel, x = make_kernel("gaussian", (1.0,)), torch.randn(64, 3)
    computed = []
    contract = kernel.contract
    monkeypatch.setattr(
        kernel, "contract", lambda buffers, *a, **k: computed.append(buffers[0].numel()) or contract(buffers, *a, **k)
    )
    PairSums(x, 64, 64, kernel, chunk_size=1).among_themselves(1.0)
    assert sum(computed) == 64 * 65 // 2


def test_the_default_chunk_shrinks_as_the_batch_grows():
    from st_cached_extras.objectives.mmd.pairs import chunk_rows

    assert [chunk_rows(4 * n) for n in (1024, 8192, 65536, 10**7)] == [512, 256, 32, 32]


def test_the_median_bandwidth_is_that_of_different_rows():
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)) + 1000
    assert median_bandwidth(x) == pytest.approx(torch.pdist(x.double()).pow(2).median().sqrt().item(), rel=1e-9)
    assert median_bandwidth(x.unflatten(1, (5, 1))) == median_bandwidth(x)
    sampled = median_bandwidth(torch.randn(5000, 5, generator=torch.Generator().manual_seed(1)), rows=500)
    assert sampled == pytest.approx(math.sqrt(2 * 4.35), rel=0.05)  # 4.35: the median of chi-squared, 5 degrees


@pytest.mark.parametrize("x", [torch.ones(1, 3), torch.ones(5, 3), torch.full((6, 40), 0.1).cumsum(dim=1)])
def test_a_bandwidth_of_equal_rows_is_refused(x):
    with pytest.raises(ValueError, match="features: "):
        median_bandwidth(x)


@pytest.mark.parametrize(
    ("name", "scales", "words"),
    [
        ("cosine", (1,), ["kernel", "'cosine'", "gaussian"]),
        ("gaussian", (), ["scales", "at least one"]),
        ("gaussian", (1, -2), ["scales", "-2", "positive"]),
        ("laplace", (math.inf,), ["scales", "inf"]),
    ],
)
def test_bad_kernels_say_what_was_found_expected_and_the_way_out(name, scales, words):
    with pytest.raises(ValueError) as caught:
        make_kernel(name, scales)
    assert all(word in str(caught.value) for word in words), caught.value
