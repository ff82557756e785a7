"""Estimates are right on average with the variance of the formula, and exact where they must be."""

import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from st_cached_extras.testing.estimator_check import EstimatorCheckCase, dense_vjp
from st_cached_extras.zbp import Local, ZBPBlock, ZBPConfig, estimate_vjp
from st_cached_extras.zbp.estimators import LayerCall, default_probes, error_subspace
from st_cached_extras.zbp.modes import RULES
from st_cached_extras.zbp.probes import relative_variance
from st_cached_extras.zbp.queries import QueryCount

# Written out again, by the formulas of the documentation and not by the package's function.
VARIANCES = {
    "gaussian": lambda d, n: (d + 1) / n,
    "rademacher": lambda d, n: (d - 1) / n,
    "sphere": lambda d, n: (d - 1) / n,
    "orthogonal": lambda d, n: d / n - 1,
    "coordinate": lambda d, n: d / n - 1,
    "hadamard": lambda d, n: (d - 1) / n * (8 - n) / 7,
    "hadamard_cycle": lambda d, n: (d - 1) / n * (8 - n) / 7,
}
N = 3


def case_of(probe: str, mode: str = "cd", per_probe: int = 2, extra: int = 0, **changes) -> type:
    class Case(EstimatorCheckCase):
        def make_config(self):
            return ZBPConfig(mode=mode, probe=probe, n_probes=N, eps=1e-4, **changes)

        def relative_variance(self, size):
            return VARIANCES[probe](size, N)

        def queries(self):
            return per_probe * N + extra if per_probe else None

    return Case


class TestGaussian(case_of("gaussian")):
    pass


class TestRademacher(case_of("rademacher")):
    pass


class TestSphere(case_of("sphere")):
    pass


class TestOrthogonal(case_of("orthogonal")):
    pass


class TestHadamard(case_of("hadamard")):
    pass


class TestHadamardCycle(case_of("hadamard_cycle")):
    # Not a property of these probes: the matrix's rows are not drawn, and a cycle of calls averages what one does not.
    test_rows_of_one_call_err_independently = None


class TestCoordinate(case_of("coordinate")):
    pass


class TestForwardDifferences(case_of("orthogonal", "fd", per_probe=1, extra=1)):
    pass


class TestForwardMode(case_of("orthogonal", "jvp", per_probe=1)):
    pass


class TestOracle(case_of("orthogonal", "oracle", per_probe=0)):
    pass


class TestIdentityControl(case_of("orthogonal", control="identity")):
    """Unbiased; the variance is that of what is not the identity."""

    def relative_variance(self, size):
        f, x, v = self.make_layer(torch.float64, 0)
        g = dense_vjp(f, x, v)
        return float(VARIANCES["orthogonal"](size, N) * (g - v).square().sum() / g.square().sum())

    def test_rows_of_one_call_err_independently(self):
        self.make_layer_seed = 1
        f, x, v = self.make_layer(torch.float64, 1)
        g = dense_vjp(f, x, v)
        factor = (g - v).square().sum() / g.square().sum()
        means = torch.stack(
            [
                estimate_vjp(f, x.expand(64, -1), v.expand(64, -1), self.make_config().replace(seed=s)).mean(0)
                for s in range(60)
            ]
        )
        assert (means - g).square().sum(1).mean() / g.square().sum() <= 1.5 * factor / 64


class TestExact(case_of("orthogonal", "exact", per_probe=0)):
    def relative_variance(self, size):
        return 0.0

    def test_what_is_not_valid_gets_no_gradient(self):
        """Not of the exact rule, which says what autograd says."""
        f, x, v = self._batch(torch.float64)
        found = estimate_vjp(f, x, v, self.make_config(), valid=torch.zeros_like(x, dtype=torch.bool))
        assert relative(found, dense_vjp(f, x, v)) <= 1e-10


class TestWholeBasis(case_of("orthogonal")):
    """n = d orthogonal probes: the gradient itself."""

    def make_config(self):
        return ZBPConfig(mode="cd", n_probes=self.size, eps=1e-4)

    def relative_variance(self, size):
        return 0.0

    def queries(self):
        return 2 * self.size


@pytest.mark.parametrize("probe", VARIANCES)
@pytest.mark.parametrize("n", [1, 3, 6, 7, 13])
def test_the_formula_holds_for_any_number_of_probes(probe, n):
    """Also where several bases are drawn: 13 probes of 6 dimensions."""
    d, rows = 6, 100
    g = torch.randn(d, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x = torch.ones(rows, d, dtype=torch.float64)
    config = ZBPConfig(mode="oracle", probe=probe, n_probes=n)
    errors = torch.cat(
        [
            estimate_vjp(lambda z: z, x, g.expand(rows, d), config.replace(seed=seed), call=seed) - g
            for seed in range(50)
        ]
    )
    found = errors.square().sum(1).mean() / g.square().sum()
    assert found == pytest.approx(relative_variance(probe, n, d), rel=0.12, abs=1e-9)


def mlp(width=12, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(dtype)


def relative(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("probe", ["orthogonal", "coordinate", "hadamard"])
def test_token_units_of_an_mlp_are_exact_with_as_many_probes_as_channels(probe):
    f = mlp()
    x, v = torch.randn(3, 5, 12), torch.randn(3, 5, 12)
    n = 16 if probe == "hadamard" else 12
    found = estimate_vjp(f, x, v, ZBPConfig(mode="cd", n_probes=n, probe=probe, units="token"))
    assert relative(found, dense_vjp(f.double(), x, v)) <= 1e-3


def test_forward_mode_equals_autograd():
    f = mlp()
    x, v = torch.randn(3, 12), torch.randn(3, 12)
    found = estimate_vjp(f, x, v, ZBPConfig(mode="jvp", n_probes=12))
    assert relative(found, torch.func.vjp(f, x)[1](v)[0]) <= 1e-5


@pytest.mark.parametrize("mode", ["cd", "fd"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("seed", range(3))
def test_the_step_that_is_chosen_gives_derivatives_within_their_tolerance(mode, dtype, allowed, seed):
    if mode == "fd":
        allowed *= 2  # first order: the curvature of the layer at the smallest step that rounding allows
    f = nn.Sequential(mlp(32, seed), nn.LayerNorm(32)).to(dtype)
    torch.manual_seed(seed)
    x, v = torch.randn(16, 32).to(dtype), torch.randn(16, 32).to(dtype)
    # A whole basis leaves nothing but the error of the derivatives.
    with torch.no_grad():
        found = estimate_vjp(f, x, v, ZBPConfig(mode=mode, n_probes=32))
    assert relative(found, dense_vjp(f.double(), x, v)) <= allowed


def test_a_linear_layer_is_exact_for_any_step():
    matrix = torch.randn(7, 12)
    x, v = torch.randn(4, 12), torch.randn(4, 7)
    for eps in (1e-2, 0.5, 10.0):
        found = estimate_vjp(lambda z: z @ matrix.T, x, v, ZBPConfig(mode="cd", n_probes=12, eps=eps))
        assert relative(found, v @ matrix) <= 1e-4


def test_a_step_is_relative_to_the_unit_or_absolute():
    seen = []

    def f(z):
        seen.append(z)
        return z

    x = torch.tensor([[3.0, 4.0], [30.0, 40.0]], dtype=torch.float64)
    config = ZBPConfig(mode="cd", n_probes=1, probe="rademacher", eps=0.1)
    for eps_mode, expected in (("relative", [0.1 * 12.5**0.5, 12.5**0.5]), ("absolute", [0.1, 0.1])):
        seen.clear()
        estimate_vjp(f, x, x, config.replace(eps_mode=eps_mode))
        steps = (seen[0] - seen[1]).abs() / 2
        assert torch.allclose(steps, torch.tensor(expected, dtype=torch.float64)[:, None].expand(2, 2))


# ---------------------------------------------------------------------------------------------------- units


def test_units_that_do_not_mix_only_add_noise_when_they_are_joined():
    f = mlp()
    x, v = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    truth = dense_vjp(f.double(), x, v)
    f.float()
    errors = {
        units: sum(
            relative(estimate_vjp(f, x, v, ZBPConfig(mode="cd", n_probes=6, eps=1e-3, units=units, seed=s)), truth)
            ** 2
            for s in range(30)
        )
        / 30
        for units in ("token", "sample")
    }
    assert errors["token"] == pytest.approx(12 / 6 - 1, rel=0.1)
    assert errors["sample"] == pytest.approx(60 / 6 - 1, rel=0.1)


def test_token_units_of_a_layer_that_mixes_tokens_are_biased():
    x, v = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    found = estimate_vjp(lambda z: z.cumsum(1), x, v, ZBPConfig(mode="cd", n_probes=3, units="token", eps=0.1))
    draws = torch.stack(
        [
            estimate_vjp(lambda z: z.cumsum(1), x, v, ZBPConfig(mode="cd", n_probes=3, units="token", eps=0.1, seed=s))
            for s in range(400)
        ]
    )
    assert found.shape == x.shape
    assert relative(draws.mean(0), v) < 0.2, "the mean is the block diagonal part, here the identity"
    assert relative(draws.mean(0), v.flip(1).cumsum(1).flip(1)) > 0.4


BOUNDARIES = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)  # one of them empty


def segment_softmax(z):
    """Mixes positions within a segment, never across."""
    parts = [part for part in z.squeeze(0).tensor_split(BOUNDARIES[1:-1].tolist()) if len(part)]
    mixed = torch.cat([torch.softmax(part @ part.T, -1) @ part for part in parts])
    return mixed.reshape(z.shape)


@pytest.mark.parametrize("shape", [(9, 4), (1, 9, 4)])
def test_packed_segments_are_units_of_their_own(shape):
    x, v = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    truth = dense_vjp(segment_softmax, x, v)
    whole = ZBPConfig(mode="cd", n_probes=20, eps=1e-4)  # as the longest segment has dimensions
    assert relative(estimate_vjp(segment_softmax, x, v, whole, segments=BOUNDARIES), truth) <= 1e-6

    config = whole.replace(n_probes=5, probe="rademacher")
    draws = torch.stack(
        [estimate_vjp(segment_softmax, x, v, config.replace(seed=s), segments=BOUNDARIES) for s in range(200)]
    )
    # The variance of segments of 12, 20 and 4 dimensions, at most (d - 1) / n: the mean of 200 is within a seventh.
    assert relative(draws.mean(0), truth) <= 0.25
    start = 0
    for begin, end in zip(BOUNDARIES[:-1].tolist(), BOUNDARIES[1:].tolist(), strict=True):
        if end == begin:
            continue
        of_segment = (slice(begin, end),) if len(shape) == 2 else (0, slice(begin, end))
        error = (draws - truth)[(slice(None), *of_segment)].square().sum((1, 2)).mean()
        expected = ((end - begin) * 4 - 1) / 5
        assert error / truth[of_segment].square().sum() == pytest.approx(expected, rel=0.25)
        start = end
    assert start == 9


@pytest.mark.parametrize(("radius", "stride", "kernel"), [(1, 1, 3), (2, 1, 5), (1, 2, 3), (0, 1, 1)])
def test_local_units_read_only_what_a_position_reaches(radius, stride, kernel):
    torch.manual_seed(0)
    convolution = nn.Conv1d(3, 2, kernel, stride, padding=radius).double()

    def f(z):
        return torch.tanh(convolution(z.transpose(1, 2))).transpose(1, 2)

    x = torch.randn(2, 12, 3, dtype=torch.float64)
    with torch.no_grad():
        v = torch.randn_like(f(x))
    truth = dense_vjp(f, x, v)
    errors = {}
    for units in (Local(radius, stride), "sample"):
        config = ZBPConfig(mode="cd", n_probes=4, probe="rademacher", eps=1e-4, units=units)
        with torch.no_grad():
            draws = torch.stack([estimate_vjp(f, x, v, config.replace(seed=s)) for s in range(150)])
        errors[units] = float((draws - truth).square().sum((1, 2, 3)).mean() / truth.square().sum())
        assert relative(draws.mean(0), truth) <= 4 * (errors[units] / 150) ** 0.5
    # Noise comes from 2 radius + 1 positions instead of 12.
    assert errors[Local(radius, stride)] < errors["sample"] * (2 * radius + 2) / 10


# ------------------------------------------------------------------------------------ controls, subspaces, shrinking


def test_the_fitted_control_is_the_exact_projection_on_v_and_two_more_queries():
    f = mlp(8, dtype=torch.float64)
    x, v = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    truth = dense_vjp(f, x, v)
    count = QueryCount()
    config = ZBPConfig(mode="cd", n_probes=2, eps=1e-4, control="fit")
    draws = torch.stack([estimate_vjp(f, x, v, config.replace(seed=s), count=count) for s in range(600)])
    assert count.queries == 600 * (2 * 2 + 2)
    projection = (truth * v).sum(1, keepdim=True) / v.square().sum(1, keepdim=True) * v
    error = (draws - truth).square().sum((1, 2)).mean()
    assert error == pytest.approx(float((8 / 2 - 1) * (truth - projection).square().sum()), rel=0.15)
    assert relative(draws.mean(0), truth) <= 0.1
    # Where g is along v there is nothing left to estimate.
    assert relative(estimate_vjp(lambda z: -3 * z, x, v, config), -3 * v) <= 1e-6


@pytest.mark.parametrize(("mode", "expected"), [("fd", 2 + 1 + 2), ("jvp", 2 + 1)])
def test_the_fitted_control_costs(mode, expected):
    count = QueryCount()
    x = torch.randn(3, 8)
    estimate_vjp(torch.tanh, x, x, ZBPConfig(mode=mode, n_probes=2, eps=1e-3, control="fit"), count=count)
    assert count.queries == expected


@pytest.mark.parametrize("shrink", [None, "mmse"])
def test_a_stand_in_as_control_leaves_its_own_component_exact_and_needs_no_equal_shapes(shrink):
    torch.manual_seed(1)
    W = torch.randn(5, 8, dtype=torch.float64)
    other = torch.randn(5, 8, dtype=torch.float64)  # a bad stand-in, of a cosine of about .5
    x, v = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    truth, guess = v @ W, v @ (0.5 * W + other)
    count = QueryCount()
    config = ZBPConfig(mode="cd", n_probes=2, eps=1e-2, control="local", shrink=shrink)

    def estimate_once(seed: int, stand_in: torch.Tensor) -> torch.Tensor:
        call = LayerCall(
            lambda z: z @ W.T, x, v, config.replace(seed=seed), lambda z: z @ stand_in.T, count=count, eps=1e-2
        )
        return RULES["cd"](call)

    draws = torch.stack([estimate_once(seed, 0.5 * W + other) for seed in range(600)])
    assert count.queries == 600 * (2 * 2 + 2) and count.exact_backwards == 600
    projection = (truth * guess).sum(1, keepdim=True) / guess.square().sum(1, keepdim=True) * guess
    remainder = (truth - projection).square().sum()
    error = (draws - truth).square().sum((1, 2)).mean()
    relative_variance = 8 / 2 - 1
    expected = relative_variance if shrink is None else relative_variance / (1 + relative_variance)
    assert error == pytest.approx(float(expected * remainder), rel=0.15)
    if shrink is None:
        assert relative(draws.mean(0), truth) <= 0.1
    # A stand-in that is right up to a factor leaves nothing to estimate; one that says nothing costs nothing.
    assert relative(estimate_once(0, -0.1 * W), truth) <= 1e-6
    plain = estimate_vjp(lambda z: z @ W.T, x, v, config.replace(control=None))
    assert relative(estimate_once(0, 0 * W), plain) <= 1e-6


def test_a_control_by_a_stand_in_needs_one():
    with pytest.raises(ValueError, match="control='local' starts from the gradient of the layer's stand-in"):
        ZBPBlock(torch.tanh, ZBPConfig(mode="cd", control="local"))


def test_the_identity_control_leaves_nothing_to_estimate_of_a_bare_skip():
    x, v = torch.randn(3, 8), torch.randn(3, 8)
    found = estimate_vjp(lambda z: z + 0.0, x, v, ZBPConfig(mode="cd", n_probes=1, eps=0.1, control="identity"))
    assert relative(found, v) <= 1e-5


def test_the_error_subspace_projects_on_the_top_singular_vectors_of_v():
    torch.manual_seed(0)
    f = mlp(4, dtype=torch.float64)
    x, v = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(2, 6, 4, dtype=torch.float64)
    truth = dense_vjp(f, x, v)
    for rank in (1, 2, 4):
        basis = error_subspace(v, x.shape, rank)
        expected = basis @ (basis.transpose(1, 2) @ truth)
        config = ZBPConfig(mode="cd", eps=1e-5, subspace="error", subspace_rank=rank, n_probes=rank * 4)
        assert relative(estimate_vjp(f, x, v, config), expected) <= 1e-6
    left, _, _ = torch.linalg.svd(v, full_matrices=False)
    assert torch.allclose(error_subspace(v, x.shape, 2), left[..., :2])


def test_shrinking_is_the_factor_of_least_squared_error():
    x, v = torch.randn(400, 12), torch.randn(400, 12)
    f = mlp()
    plain = ZBPConfig(mode="cd", n_probes=4, probe="rademacher", eps=1e-3)
    with torch.no_grad():
        estimate = estimate_vjp(f, x, v, plain)
        shrunk = estimate_vjp(f, x, v, plain.replace(shrink="mmse"))
    factor = 1 / (1 + 11 / 4)
    assert relative(shrunk, factor * estimate) <= 1e-5
    truth = dense_vjp_rows(f, x, v)
    errors = [float((c * factor * estimate - truth).square().sum()) for c in (0.8, 1.0, 1.25)]
    assert errors[1] < errors[0] and errors[1] < errors[2]


def dense_vjp_rows(f, x, v):
    return torch.func.vjp(f, x)[1](v)[0]


def test_readout_noise_is_that_of_its_formula():
    x, v = torch.ones(50, 6), torch.randn(50, 6)
    config = ZBPConfig(mode="cd", n_probes=6, eps=0.5, readout_noise=0.2)
    draws = torch.stack([estimate_vjp(lambda z: z, x, v, config.replace(seed=s)) for s in range(200)])
    # u D of noise alone: n probes of norm² d, D of variance 2 (σ |v| rms(y) / 2ε)². The perturbed outputs have an
    # RMS of sqrt(1 + ε²), as the mean over probes.
    variance = 6 / 6 * 2 * (0.2 / (2 * 0.5)) ** 2 * v.square().sum(1) * (1 + 0.5**2)
    found = (draws - v).square().sum(2).mean(0)
    assert float((found / variance).mean()) == pytest.approx(1.0, abs=0.05)
    without = estimate_vjp(lambda z: z, x, v, config.replace(readout_noise=0.0))
    assert relative(without, v) <= 1e-4


# ---------------------------------------------------------------------------------------------- rules without probes


def test_skip_passes_v_on_and_refuses_another_shape():
    x, v = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(estimate_vjp(torch.tanh, x, v, ZBPConfig(mode="skip")), v)
    with pytest.raises(ValueError, match=r"mode='skip'.*maps \(3, 4\) to \(3, 5\)"):
        estimate_vjp(torch.tanh, x, torch.randn(3, 5), ZBPConfig(mode="skip"))


def test_broadcast_is_exact_for_a_mean_over_valid_positions():
    valid = torch.tensor([[True, True, False], [True, True, True]])[..., None]
    x, v = torch.randn(2, 3, 4), torch.randn(2, 4)

    def pool(z):
        return (z * valid).sum(1) / valid.sum(1)

    found = estimate_vjp(pool, x, v, ZBPConfig(mode="broadcast"), valid=valid)
    assert torch.allclose(found, torch.func.vjp(pool, x)[1](v)[0])
    assert torch.allclose(
        estimate_vjp(lambda z: z.mean(1), x, v, ZBPConfig(mode="broadcast")), (v / 3)[:, None].expand(2, 3, 4)
    )
    with pytest.raises(ValueError, match="mode='broadcast'"):
        estimate_vjp(torch.tanh, x, x, ZBPConfig(mode="broadcast"))


def test_exact_without_a_graph_is_refused():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="has no graph"):
        estimate_vjp(lambda z: z.detach(), x, x, ZBPConfig(mode="exact"))


@pytest.mark.parametrize(
    ("changes", "x", "v", "message"),
    [
        ({}, (3, 4), (2, 4), "units are its rows"),
        ({"units": "token"}, (3, 5, 4), (3, 4, 4), "units are its 2 leading axes"),
        ({"units": "segments"}, (6, 4), (6, 4), "not given cu_seqlens"),
        ({"control": "fit"}, (3, 4), (3, 5), "keeps the shape"),
        ({"control": "identity"}, (3, 4), (3, 5), "keeps the shape"),
        ({"subspace": "error"}, (3, 4), (3, 4), r"needs \[B, T, C\]"),
        ({"units": Local(1)}, (3, 4), (3, 4), r"units=Local needs \[B, T, C\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(changes, x, v, message):
    with pytest.raises(ValueError, match=message):
        estimate_vjp(torch.tanh, torch.randn(x), torch.randn(v), ZBPConfig(mode="cd", **changes))


def test_boundaries_that_do_not_fit_are_refused():
    x = torch.randn(6, 4)
    for boundaries in ([0, 3], [1, 6], [0, 4, 2, 6]):
        with pytest.raises(ValueError, match="must rise from 0 to the 6 positions"):
            estimate_vjp(torch.tanh, x, x, ZBPConfig(mode="cd"), segments=torch.tensor(boundaries))
    with pytest.raises(ValueError, match="Packed segments are"):
        estimate_vjp(torch.tanh, torch.randn(2, 3, 4), torch.randn(2, 3, 4), ZBPConfig(mode="cd"), segments=BOUNDARIES)


@pytest.mark.parametrize(("size", "expected"), [(384, 64), (6, 1), (1, 1), (10_000, 256)])
def test_by_default_a_sixth_of_the_dimensions_is_probed(size, expected):
    assert default_probes(size) == expected


def most_bytes_alive(n, probe):
    """The peak of what one estimate allocates and frees, from the profiler's record."""
    x = torch.randn(64, 32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        estimate_vjp(torch.tanh, x, x, ZBPConfig(mode="cd", n_probes=n, probe=probe, eps=1e-2))
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(alive)


def test_memory_does_not_grow_with_the_number_of_probes():
    few, many = most_bytes_alive(4, "rademacher"), most_bytes_alive(32, "rademacher")
    assert few >= 3 * 64 * 32 * 4, "less than a probe, a query and a sum: nothing was measured"
    assert many == few
    # Orthogonal probes are rows of one frame, n x d, for all samples.
    assert most_bytes_alive(32, "orthogonal") <= most_bytes_alive(4, "orthogonal") + 3 * 28 * 32 * 4
