"""From reference features to landmarks and coefficients: two passes over the data, k-means of a sample between them.

Statistics are in fp64, features may come in any floating-point dtype, and no more than one batch and a random sample
of the rows are in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from st_cached_extras.objectives.mmd.kernels import Energy, Kernel, median_bandwidth, squared_distances
from st_cached_extras.objectives.mmd.layouts import Layout, check_layout, to_blocks
from st_cached_extras.objectives.mmd.pairs import PairSums

SAMPLE_ROWS = 32_768
SAMPLE_VALUES = 2**26
SAMPLE_ROWS_PER_LANDMARK = 4
BATCH_ROWS = 4_096
KERNEL_ROWS = 512
K_MEANS_ITERATIONS = 20


def fit_parts(
    features: Tensor | Iterable[Any],
    *,
    condition: Tensor | None,
    condition_weight: float,
    landmarks: int,
    kernel: Kernel,
    sigma: float | None,
    layout: Layout,
    jitter: float,
    center: bool,
    seed: int,
    show_progress_bar: bool,
) -> dict[str, Any]:
    """The tensors and facts of a reference; arguments as ``NystromReference.fit``."""
    _check_arguments(landmarks, sigma, jitter)
    batches = Batches(features, condition, condition_weight, layout, show_progress_bar)
    sample: Sample | None = None
    total: Tensor | float = 0.0
    for blocks in batches("Read features"):
        total = total + blocks.sum(dim=1, dtype=torch.float64)
        if sample is None:
            fitting = min(SAMPLE_ROWS, SAMPLE_VALUES // (blocks.shape[0] * blocks.shape[2]))
            sample = Sample(max(fitting, SAMPLE_ROWS_PER_LANDMARK * landmarks), seed)
        sample.add(blocks)
    rows = sample.rows()  # [P, n, J]
    # As it will be stored: landmarks and rows must be relative to the same point.
    mean = (total / batches.count if center else torch.zeros_like(total)).float().double()  # [P, J]

    sigmas = [_bandwidth(block, kernel, sigma, seed) for block in rows]
    scale = torch.tensor(sigmas, dtype=torch.float64, device=mean.device)[:, None, None]  # [P, 1, 1]

    def standardize(blocks: Tensor) -> Tensor:
        return (blocks.double() - mean[:, None]) / scale

    x = standardize(rows)
    z = torch.stack([k_means(block, landmarks, seed, show_progress_bar) for block in x])  # [P, M, J]
    # As they will be stored, so that the coefficients are those of the stored landmarks.
    z = (z * scale).float()
    stored = z.double() / scale
    mean_kernel = z.new_zeros(len(z), len(kernel.scales), z.shape[1], dtype=torch.float64)  # μ(Z), [P, scales, M]
    for blocks in batches("Mean kernel"):
        for part in blocks.split(KERNEL_ROWS, dim=1):
            for block, (landmark, row) in enumerate(zip(stored, standardize(part), strict=True)):
                mean_kernel[block] += kernel.values(squared_distances(landmark, row)).sum(dim=2)
    mean_kernel /= batches.count
    alpha = torch.stack([solve(z, mu, kernel, jitter) for z, mu in zip(stored, mean_kernel, strict=True)])
    if all_rows := len(x[0]) == batches.count:
        k_rr = [float(PairSums(block, 0, len(block), kernel).among_themselves(0.0)) / len(block) ** 2 for block in x]
    else:
        # ⟨μ, k(·, Z) α⟩: the pairs of so many rows are too many.
        k_rr = (alpha * mean_kernel).sum(dim=2).mean(dim=1).tolist()
    return {
        "landmarks": z,
        "center": mean,
        "alpha": alpha,
        "sigma": sigmas,
        "k_rr": k_rr,
        "sample_shape": batches.sample_shape,
        "condition_size": batches.condition_size,
        "identity": {
            "rows": str(batches.count),
            "data_hash": batches.hash,
            "jitter": str(jitter),
            "seed": str(seed),
            "k_rr_of": "all pairs" if all_rows else "landmarks",
        },
    }


class Batches:
    """Features, checked, as blocks [P, n, J], as often as they are asked for.

    Attributes:
        count, sample_shape, condition_size, hash: what the first pass found.
    """

    def __init__(
        self,
        features: Tensor | Iterable[Any],
        condition: Tensor | None,
        condition_weight: float,
        layout: Layout,
        show_progress_bar: bool,
    ) -> None:
        if isinstance(features, Tensor):
            parts = features.split(BATCH_ROWS)
            features = parts if condition is None else list(zip(parts, condition.split(BATCH_ROWS), strict=True))
        elif condition is not None:
            raise TypeError(
                "condition: expected with features in one tensor. Give batches as pairs (features, condition)."
            )
        elif not isinstance(features, Iterable) or iter(features) is features:
            raise TypeError(
                f"features: {type(features).__name__}, expected a tensor or batches that can be iterated twice. Give "
                "a list or a DataLoader, not a generator."
            )
        self._features = features
        self._condition_weight = condition_weight
        self._layout = layout
        self._show_progress_bar = show_progress_bar
        self.count = 0
        self.sample_shape: tuple[int, ...] | None = None
        self.condition_size = 0
        self.hash = ""

    def __call__(self, description: str) -> Iterator[Tensor]:
        count, digest = 0, hashlib.blake2b(digest_size=16)
        for batch in tqdm(self._features, desc=description, disable=not self._show_progress_bar, leave=False):
            x, condition = batch if isinstance(batch, (tuple, list)) else (batch, None)
            self._check(x, condition)
            count += len(x)
            for tensor in (x,) if condition is None else (x, condition):
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            x = x.detach().cpu() if x.device.type == "mps" else x.detach()  # which has no fp64
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            weighted = None if condition is None else self._condition_weight * condition.to(x)
            yield to_blocks(x, self._layout, weighted)
        if not count:
            raise ValueError("features: no rows, expected at least 2. Give the features of the whole reference.")
        if self.hash and self.hash != digest.hexdigest():
            raise ValueError(
                f"features: {self.count} rows at the first pass, and {count} at the second, or others. Give batches "
                "that are the same every time they are iterated, without shuffling."
            )
        self.count, self.hash = count, digest.hexdigest()

    def _check(self, x: Any, condition: Any) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"features: found {found}, expected floating-point tensors [rows, ...].")
        if self.sample_shape is None:
            check_layout(self._layout, "features", tuple(x.shape[1:]))
            self.sample_shape = tuple(x.shape[1:])
            self.condition_size = 0 if condition is None else condition.shape[-1]
        if tuple(x.shape[1:]) != self.sample_shape:
            raise ValueError(f"features: a row of shape {list(x.shape[1:])} after {list(self.sample_shape)}.")
        if not x.isfinite().all():
            bad = (~x.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()
            raise ValueError(f"features: NaN or infinity in row(s) {', '.join(map(str, bad[:8]))} of a batch.")
        found = None if condition is None else list(condition.shape)
        if found != ([len(x), self.condition_size] if self.condition_size else None):
            raise ValueError(
                f"condition: found shape {found} for {len(x)} rows, expected [{len(x)}, "
                f"{self.condition_size or 'C'}] with every batch, or none at all."
            )


class Sample:
    """A uniform random sample of at most ``size`` rows out of a stream, all of them if there are no more."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._threshold = torch.inf

    def add(self, blocks: Tensor) -> None:
        """Every row draws a key, and the rows of the smallest keys stay."""
        keys = torch.rand(blocks.shape[1], generator=self._generator, dtype=torch.float64)
        chosen = (keys < self._threshold).nonzero().flatten()
        self._blocks.append(blocks[:, chosen.to(blocks.device)])
        self._keys.append(keys[chosen])
        if sum(map(len, self._keys)) >= 2 * self._size:
            self._shrink()

    def rows(self) -> Tensor:
        """[P, n, J], in the order of the stream."""
        self._shrink()
        return self._blocks[0]

    def _shrink(self) -> None:
        keys, blocks = torch.cat(self._keys), torch.cat(self._blocks, dim=1)
        if len(keys) > self._size:
            smallest = keys.topk(self._size, largest=False).indices.sort().values
            keys, blocks = keys[smallest], blocks[:, smallest.to(blocks.device)]
            self._threshold = float(keys.max())
        self._keys, self._blocks = [keys], [blocks]


def k_means(x: Tensor, count: int, seed: int, show_progress_bar: bool = False) -> Tensor:
    """Lloyd's algorithm from random rows: [n, D] → [min(count, n), D], in fp64.

    A center that no row is nearest to moves to the row that is farthest from its own.
    """
    if count >= len(x):
        return x.double()
    generator = torch.Generator().manual_seed(seed)
    x = x.float()
    centers = x[torch.randperm(len(x), generator=generator)[:count].to(x.device)]
    assigned: Tensor | None = None
    for _ in tqdm(range(K_MEANS_ITERATIONS), desc="k-means", disable=not show_progress_bar, leave=False):
        nearest = [squared_distances(rows, centers).min(dim=1) for rows in x.split(BATCH_ROWS)]
        distances = torch.cat([of_rows.values for of_rows in nearest])
        before, assigned = assigned, torch.cat([of_rows.indices for of_rows in nearest])
        if before is not None and torch.equal(before, assigned):
            break
        sizes = torch.bincount(assigned, minlength=count)
        sums = torch.zeros(centers.shape, dtype=torch.float64, device=x.device).index_add_(0, assigned, x.double())
        centers = (sums / sizes.clamp_min(1)[:, None]).float()
        empty = (sizes == 0).nonzero().flatten()
        centers[empty] = x[distances.topk(len(empty)).indices]
    return centers.double()


def solve(z: Tensor, mean_kernel: Tensor, kernel: Kernel, jitter: float) -> Tensor:
    """α per scale, [scales, M], of landmarks [M, D] and mean kernel columns [scales, M], all in fp64.

    (K + λI) α = μ; for a kernel that is positive definite only on coefficients of sum 0, the best approximation
    among coefficients of sum 1, which that of the reference has: the same with a border of ones.
    """
    squared = squared_distances(z, z)
    squared.diagonal().zero_()
    identity = torch.eye(len(z), dtype=z.dtype, device=z.device)
    ones = z.new_ones(len(z), 1)
    alphas = []
    for K, mu in zip(kernel.values(squared), mean_kernel, strict=True):
        if kernel.is_positive_definite:
            factor, failed = torch.linalg.cholesky_ex(K + jitter * identity)
            if failed:
                raise ValueError(
                    f"jitter: with {jitter} the {len(z)} landmarks' kernel matrix is singular: some coincide. Give a "
                    "larger jitter, such as 1e-6, or fewer landmarks."
                )
            alphas.append(torch.cholesky_solve(mu[:, None], factor)[:, 0])
        else:
            regularized = K + jitter * K.abs().mean() * identity
            bordered = torch.cat([torch.cat([regularized, ones], 1), torch.cat([ones.T, z.new_zeros(1, 1)], 1)])
            alphas.append(torch.linalg.solve(bordered, torch.cat([mu, mu.new_ones(1)]))[:-1])
    return torch.stack(alphas)


def _bandwidth(rows: Tensor, kernel: Kernel, sigma: float | None, seed: int) -> float:
    if sigma is not None:
        return float(sigma)
    return 1.0 if isinstance(kernel, Energy) else median_bandwidth(rows, seed=seed)


def _check_arguments(landmarks: int, sigma: float | None, jitter: float) -> None:
    if isinstance(landmarks, bool) or not isinstance(landmarks, int):
        raise TypeError(f"landmarks: found {landmarks!r}, expected a number of landmarks, such as 1024.")
    if landmarks < 1:
        raise ValueError(f"landmarks: found {landmarks}, expected at least 1. Give 1024.")
    if sigma is not None and not 0 < sigma < float("inf"):
        raise ValueError(f"sigma: found {sigma}, expected a positive finite number, or None for the median distance.")
    if not 0 <= jitter < float("inf"):
        raise ValueError(f"jitter: found {jitter}, expected a finite number of at least 0. Give 1e-6.")
