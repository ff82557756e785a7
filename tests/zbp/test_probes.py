"""Probes are isotropic, as orthogonal as they say, and the business of their private generator alone."""

import pytest
import torch

from st_cached_extras.zbp.config import PROBES
from st_cached_extras.zbp.probes import Probes, private_generator


def make(probe, n=4, units=3, size=6, seed=0, **kwargs):
    return Probes(probe, n, units, size, private_generator(torch.device("cpu"), seed), **kwargs)


def all_of(probe, n=4, **kwargs):
    return make(probe, n, **kwargs).draw(0, n)


@pytest.mark.parametrize("probe", PROBES)
def test_the_second_moment_is_the_identity(probe):
    """20000 probes: entries have a standard deviation of .007 off the diagonal and, at most, .017 on it."""
    draws = torch.cat([all_of(probe, 5, units=40, seed=seed).flatten(0, 1) for seed in range(100)])
    moment = draws.T @ draws / len(draws)
    assert len(draws) == 20_000
    assert (moment - torch.eye(6)).abs().max() <= 0.09


@pytest.mark.parametrize("probe", ["orthogonal", "coordinate"])
@pytest.mark.parametrize("n", [3, 6, 15])
def test_probes_of_a_basis_are_orthogonal_and_of_length_sqrt_d(probe, n):
    u = all_of(probe, n).transpose(0, 1)  # [U, n, d]
    for start in range(0, n, 6):
        basis = u[:, start : start + 6]
        expected = 6 * torch.eye(basis.shape[1]).expand(3, -1, -1)
        assert torch.allclose(basis @ basis.transpose(1, 2), expected, atol=1e-4)


def test_hadamard_rows_are_orthogonal_where_no_column_is_cut_off():
    u = all_of("hadamard", 8, size=8).transpose(0, 1)
    assert torch.equal(u @ u.transpose(1, 2), 8 * torch.eye(8).expand(3, -1, -1))
    assert set(all_of("hadamard", 8).unique().tolist()) == {-1.0, 1.0}


def test_a_cycle_of_calls_sees_every_row_once():
    lasting = [private_generator(torch.device("cpu"), "lasting") for _ in range(4)]
    u = torch.cat(
        [
            all_of("hadamard_cycle", 2, size=6, call=call, seed=call, lasting_generator=lasting[call])
            for call in range(4)
        ]
    ).transpose(0, 1)
    assert torch.allclose(u.transpose(1, 2) @ u / 8, torch.eye(6).expand(3, -1, -1))


def test_units_see_different_subspaces():
    for probe in PROBES:
        u = all_of(probe)
        assert not torch.equal(u[:, 0], u[:, 1]), probe


@pytest.mark.parametrize("probe", PROBES)
def test_draws_come_in_any_chunks_and_from_the_private_generator(probe):
    before = torch.get_rng_state()
    whole, pieces, other = all_of(probe), make(probe), all_of(probe, seed=1)
    assert torch.equal(torch.cat([pieces.draw(0, 1), pieces.draw(1, 4)]), whole)
    assert not torch.equal(other, whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert all_of(probe, dtype=torch.float64).dtype == torch.float64


def test_a_generator_depends_on_every_part_of_its_key():
    keys = [(0, "a", 0, 1), (0, "a", 1, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 0, 0)]
    seeds = {private_generator(torch.device("cpu"), *key).initial_seed() for key in keys}
    assert len(seeds) == len(keys)
    # blake2b of "0/a/0/1": the same on every machine and in every process.
    assert private_generator(torch.device("cpu"), 0, "a", 0, 1).initial_seed() == EXPECTED


EXPECTED = int.from_bytes(__import__("hashlib").blake2b(b"0/a/0/1", digest_size=7).digest(), "little")
