"""Random directions with E[u u^T] = I, from a private generator, one probe at a time.

(1/n) sum_i u_i <u_i, g> is then g on average, and its relative variance E|ĝ - g|² / |g|² depends on the distribution
(:func:`relative_variance`). Probes that are orthogonal to each other waste nothing, and n = d of them are exact.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def private_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator that depends on ``key`` alone: not on the global random state, nor on Python's hashing."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def relative_variance(probe: str, n: int, size: int) -> float:
    """E|ĝ - g|² / |g|² of n probes of one kind in ``size`` dimensions d.

    gaussian (d + 1) / n; rademacher and sphere (d - 1) / n; orthogonal and coordinate d / n - 1, for n above d that of
    the last, incomplete basis; hadamard (d - 1) / n * (N - n) / (N - 1), N the power of two from d upwards.
    """
    if probe == "gaussian":
        return (size + 1) / n
    if probe in ("rademacher", "sphere"):
        return (size - 1) / n
    if probe in ("orthogonal", "coordinate"):
        left = n % size
        return left * (size - left) / n**2
    rows = _power_of_two(size)
    left = n % rows
    return (left / n) ** 2 * (size - 1) / left * (rows - left) / (rows - 1) if left else 0.0


class Probes:
    """n probes for each of U units of d dimensions, drawn when asked for.

    What is kept is one probe's size [U, d] or two, and for ``"orthogonal"`` the frame [n, d] that all units share.

    - ``"gaussian"``, ``"rademacher"``: independent entries;
    - ``"sphere"``: uniform on the sphere of radius √d;
    - ``"orthogonal"``: a random (Haar) frame that all units share, its coordinates shifted in a circle and given signs
      at random for each unit; more than d probes are several bases. The shift matters: over shifts and signs
      E[u u^T] = I for the one frame at hand, so that the errors of units are independent and a batch averages them;
    - ``"hadamard"``: rows of the Hadamard matrix of the next power of two, drawn without replacement, cut to d
      columns, with signs for each unit: nearly orthogonal, and nothing to factorise;
    - ``"hadamard_cycle"``: the same with the rows in turn from call to call, in an order and with signs that stay, so
      that N / n calls see every row once;
    - ``"coordinate"``: √d times unit vectors, without replacement, in an order for each unit.

    Args:
        probe: the kind.
        n: probes.
        units: units U.
        size: dimensions d of each.
        generator: consumed here and by :meth:`draw`.
        dtype: of the probes.
        call: index of the call, for ``"hadamard_cycle"``.
        lasting_generator: generator of what ``"hadamard_cycle"`` keeps from call to call.
    """

    def __init__(
        self,
        probe: str,
        n: int,
        units: int,
        size: int,
        generator: torch.Generator,
        *,
        dtype: torch.dtype = torch.float32,
        call: int = 0,
        lasting_generator: torch.Generator | None = None,
    ) -> None:
        self.probe, self.n, self.units, self.size = probe, n, units, size
        self._generator, self._dtype = generator, dtype
        self._options = {"device": generator.device, "dtype": dtype}
        if probe == "orthogonal":
            self._frame = self._orthonormal_bases() * size**0.5  # [n, d]
            shifts = torch.randint(size, (units, 1), generator=generator, device=generator.device)
            self._columns = (torch.arange(size, device=generator.device) + shifts) % size  # [U, d]
            self._signs = self._random_signs(generator)
        elif probe == "hadamard":
            self._rows = self._order_of_rows(generator)[torch.arange(n) % _power_of_two(size)]
            self._signs = self._random_signs(generator)
        elif probe == "hadamard_cycle":
            lasting = generator if lasting_generator is None else lasting_generator
            self._rows = self._order_of_rows(lasting)[(torch.arange(n) + call * n) % _power_of_two(size)]
            self._signs = self._random_signs(lasting)
        elif probe == "coordinate":
            self._columns = torch.rand(units, size, generator=generator, **self._options).argsort(dim=1)  # [U, d]

    def draw(self, start: int, stop: int) -> Tensor:
        """Probes start to stop − 1, [stop - start, U, d]. To be asked for in order; cut into chunks as one likes."""
        return torch.stack([self._one(index) for index in range(start, stop)])

    def _one(self, index: int) -> Tensor:
        shape, size = (self.units, self.size), self.size
        if self.probe == "gaussian":
            return torch.randn(shape, generator=self._generator, **self._options)
        if self.probe == "rademacher":
            return self._random_signs(self._generator)
        if self.probe == "sphere":
            u = torch.randn(shape, generator=self._generator, **self._options)
            return u * (size**0.5 / u.norm(dim=1, keepdim=True))
        if self.probe == "orthogonal":
            return self._frame[index][self._columns] * self._signs
        if self.probe == "coordinate":
            hot = self._columns[:, index % size, None]
            return torch.zeros(shape, **self._options).scatter_(1, hot, size**0.5)
        columns = torch.arange(size, device=self._signs.device)
        return (1 - 2 * _parity(self._rows[index] & columns)).to(self._dtype) * self._signs

    def _orthonormal_bases(self) -> Tensor:
        """Orthonormal rows [n, d], Haar distributed: the sign of R's diagonal makes QR unique."""
        bases = []
        for start in range(0, self.n, self.size):
            count = min(self.size, self.n - start)
            q, r = torch.linalg.qr(torch.randn(self.size, count, generator=self._generator, **self._options))
            bases.append((q * r.diagonal().sign()).T)
        return torch.cat(bases)

    def _order_of_rows(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(_power_of_two(self.size), generator=generator, device=generator.device)

    def _random_signs(self, generator: torch.Generator) -> Tensor:
        return torch.empty(self.units, self.size, **self._options).bernoulli_(0.5, generator=generator) * 2 - 1


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``, and at least 2."""
    return 1 << max(1, (size - 1).bit_length())


def _parity(x: Tensor) -> Tensor:
    """Number of set bits modulo 2: entry (i, j) of the Hadamard matrix is (−1) to the parity of i & j."""
    for shift in (32, 16, 8, 4, 2, 1):
        x = x ^ (x >> shift)
    return x & 1
