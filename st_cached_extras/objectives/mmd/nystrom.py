"""What an encoder makes of real data, summed up by landmarks: the target of a distribution-matching objective.

The mean embedding of a reference r_1 ... r_R under a kernel k is μ(x) = (1/R) Σ_t k(x, r_t). Nyström's approximation
keeps M landmarks z and coefficients α, μ(x) ≈ k(x, Z) α, so that a training step costs M products a row and not R::

    α = (K_ZZ + λI)⁻¹ μ(Z),      k_rr = (1/R²) Σ_tu k(r_t, r_u)

(Chatalic et al., "Nyström Kernel Mean Embeddings", arXiv 2201.13055; used for one-step generators in arXiv
2607.02375). A kernel of several scales has one α per scale: one α for their mean is a worse fit to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from st_cached_extras.objectives.mmd import fit as fitting
from st_cached_extras.objectives.mmd import reference_file
from st_cached_extras.objectives.mmd.kernels import make_kernel
from st_cached_extras.objectives.mmd.layouts import Layout, check_layout

DEFAULT_SCALES = (0.5, 1.0, 2.0)


class NystromReference(nn.Module):
    """One encoder's reference: landmarks, coefficients, bandwidth, and what they were made from. Frozen.

    Make one with :meth:`fit`, :meth:`load` or :meth:`from_parts`. A module only so that it follows its objective to
    another device; it has no parameters and adds nothing to a state dict.

    Attributes:
        landmarks: z − center, [P, M, J], P blocks of the layout ("per_token": one per position, else 1), J values of
            a row, those of a condition included.
        center: [P, J]. A kernel of distances does not see it; precision does.
        alpha: [P, scales, M].
        sigma: P bandwidths; scale s is the bandwidth s × sigma.
        k_rr: P means of k over all pairs of the reference.
        kernel: a :class:`~st_cached_extras.objectives.mmd.kernels.Kernel`, with the scales.
        layout: "flatten", "per_token" or "mean".
        name: what it is a reference of, e.g. the encoder.
        sample_shape: shape of one row of features; None if that is not known (``from_parts`` with "mean").
        condition_size: values of the condition that stands behind every row; 0 without one.
        condition_weight: what the condition is multiplied by.
        identity: what else is known of encoder and data, as texts: encoder, revision, dataset, hash, counts.
    """

    landmarks: Tensor
    center: Tensor
    alpha: Tensor

    def __init__(
        self,
        landmarks: Tensor,
        center: Tensor,
        alpha: Tensor,
        *,
        sigma: Sequence[float],
        k_rr: Sequence[float],
        kernel: str,
        scales: Sequence[float],
        layout: Layout,
        name: str,
        sample_shape: Sequence[int] | None = None,
        condition_size: int = 0,
        condition_weight: float = 1.0,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("landmarks", landmarks.detach().float(), persistent=False)
        self.register_buffer("center", center.detach().float(), persistent=False)
        self.register_buffer("alpha", alpha.detach().float(), persistent=False)
        self.sigma = tuple(float(x) for x in sigma)
        self.k_rr = tuple(float(x) for x in k_rr)
        self.kernel = make_kernel(kernel, scales)
        self.layout = layout
        self.name = name
        self.sample_shape = None if sample_shape is None else tuple(int(n) for n in sample_shape)
        self.condition_size = condition_size
        self.condition_weight = condition_weight
        self.identity = dict(identity or {})
        self._check()

    @classmethod
    def fit(
        cls,
        features: Tensor | Iterable[Tensor] | Iterable[tuple[Tensor, Tensor]],
        *,
        condition: Tensor | None = None,
        condition_weight: float = 1.0,
        landmarks: int = 1024,
        kernel: str = "gaussian",
        scales: Sequence[float] = DEFAULT_SCALES,
        sigma: float | None = None,
        layout: Layout = "flatten",
        jitter: float = 1e-6,
        center: bool = True,
        seed: int = 0,
        name: str = "reference",
        identity: Mapping[str, str] | None = None,
        show_progress_bar: bool = False,
    ) -> NystromReference:
        """Sum up reference features. The same features and arguments give the same bits.

        Args:
            features: [R, ...] one row per sample, or batches [n, ...] of them in something that can be iterated twice
                (a list, a DataLoader without shuffling), so that they need not fit the memory: once for the mean and
                a random sample of at most 32768 rows, once for the mean kernel column over all rows. Batches may be
                pairs (features, condition).
            condition: [R, C] per sample, e.g. a one-hot class or a frozen text embedding: the reference then holds
                the joint law of features and condition, and the objective wants "condition" beside its features. A
                marginal law cannot teach a condition.
            condition_weight: what the condition is multiplied by before it is appended.
            landmarks: M, at most; k-means of the random sample. No more than there are rows.
            kernel: "gaussian", "laplace", "rational_quadratic" or "energy".
            scales: bandwidths in units of sigma, one α each; the kernel is their mean. A student that starts far from
                the reference wants wide ones: at 8 bandwidths a gaussian pulls 1e-13 as hard as at one.
            sigma: the bandwidth; by default the root of the median squared distance between rows.
            layout: of features [R, N, D]: "flatten", one kernel on all N·D values; "per_token", one reference per
                position; "mean", one kernel on the mean over positions.
            jitter: λ, relative to the kernel's scale 1.
            center: store landmarks relative to the reference's mean, which keeps the precision of features that are
                not centred; the kernel is the same.
            seed: of sample and k-means.
            name: what it is a reference of.
            identity: what to record of encoder and data, as texts.
            show_progress_bar: show the two passes and k-means.

        Raises:
            TypeError: features that are not floating-point tensors, or can be iterated only once.
            ValueError: an argument out of its range; empty, non-finite or uneven features.
        """
        parts = fitting.fit_parts(
            features,
            condition=condition,
            condition_weight=condition_weight,
            landmarks=landmarks,
            kernel=make_kernel(kernel, scales),
            sigma=sigma,
            layout=layout,
            jitter=jitter,
            center=center,
            seed=seed,
            show_progress_bar=show_progress_bar,
        )
        parts["identity"] = {**(identity or {}), **parts["identity"]}
        return cls(
            **parts,
            kernel=kernel,
            scales=scales,
            layout=layout,
            name=name,
            condition_weight=condition_weight,
        )

    @classmethod
    def from_parts(
        cls,
        *,
        landmarks: Tensor,
        alpha: Tensor,
        sigma: float | Sequence[float],
        k_rr: float | Sequence[float],
        kernel: str = "gaussian",
        scales: Sequence[float] = (1.0,),
        layout: Layout = "flatten",
        name: str = "reference",
        sample_shape: Sequence[int] | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> NystromReference:
        """A reference that was made elsewhere.

        Args:
            landmarks: [M, D] as they are, not centred; [P, M, D] for "per_token".
            alpha: [M], one for all scales; [scales, M]; or [P, scales, M].
            sigma: the bandwidth, or one per position.
            k_rr: mean of k over all pairs of the reference, or one per position.
            kernel: the kernel's name.
            scales: bandwidths in units of sigma.
            layout: of the features.
            name: what it is a reference of.
            sample_shape: shape of one row of features; None where landmarks tell it.
            identity: what to record of encoder and data, as texts.

        Raises:
            ValueError: parts that do not fit each other.
        """
        if landmarks.ndim not in (2, 3):
            raise ValueError(f"landmarks: shape {list(landmarks.shape)}, expected [M, D], or [positions, M, D].")
        blocks = landmarks.detach().double()
        blocks = blocks if blocks.ndim == 3 else blocks[None]  # [P, M, D]
        # Any point would do, as a kernel of distances does not see it; but the one that is stored.
        center = blocks.mean(dim=1).float().double()
        P, _, D = blocks.shape
        count = len(make_kernel(kernel, scales).scales)
        if alpha.ndim == 1:
            alpha = alpha.expand(P, count, -1)
        elif alpha.ndim == 2:
            alpha = alpha.expand(P, -1, -1)
        if sample_shape is None and layout != "mean":
            sample_shape = (P, D) if layout == "per_token" else (D,)
        return cls(
            blocks - center[:, None],
            center,
            alpha,
            sigma=[sigma] * P if isinstance(sigma, (int, float)) else sigma,
            k_rr=[k_rr] * P if isinstance(k_rr, (int, float)) else k_rr,
            kernel=kernel,
            scales=scales,
            layout=layout,
            name=name,
            sample_shape=sample_shape,
            identity=identity,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all."""
        reference_file.write(path, self._tensors(), self._metadata())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> NystromReference:
        """Read what :meth:`save` wrote. Nothing in it is executed.

        Raises:
            FileNotFoundError: there is no such file.
            ReferenceFileError: the file is truncated, damaged, foreign, of another version, or does not fit itself.
        """
        return reference_file.read(path, lambda tensors, metadata: cls(**tensors, **metadata))

    def describe(self) -> dict[str, Any]:
        """What it is and what it was made from, as plain JSON types."""
        return {
            "name": self.name,
            "kernel": self.kernel.name,
            "scales": list(self.kernel.scales),
            "sigma": list(self.sigma),
            "k_rr": list(self.k_rr),
            "layout": self.layout,
            "sample_shape": None if self.sample_shape is None else list(self.sample_shape),
            "landmarks": self.landmarks.shape[1],
            "condition_size": self.condition_size,
            "condition_weight": self.condition_weight,
            **self.identity,
        }

    def extra_repr(self) -> str:
        return f"{self.name!r}, kernel={self.kernel!r}, layout={self.layout!r}, landmarks={self.landmarks.shape[1]}"

    def targets(self, block: int, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Landmarks and coefficients of one block, for rows (x − shift) / sigma: z, [M, J], and α, [scales, M]."""
        landmarks = self.landmarks[block].to(shift) + (self.center[block].to(shift) - shift)
        return landmarks.div_(self.sigma[block]), self.alpha[block].to(shift)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).float() for name in ("landmarks", "center", "alpha")}

    def _metadata(self) -> dict[str, Any]:
        return {
            "sigma": list(self.sigma),
            "k_rr": list(self.k_rr),
            "kernel": self.kernel.name,
            "scales": list(self.kernel.scales),
            "layout": self.layout,
            "name": self.name,
            "sample_shape": None if self.sample_shape is None else list(self.sample_shape),
            "condition_size": self.condition_size,
            "condition_weight": self.condition_weight,
            "identity": self.identity,
        }

    def _check(self) -> None:
        """A ValueError unless all parts fit each other."""
        check_layout(self.layout, "sample_shape", (1, 1) if self.sample_shape is None else self.sample_shape)
        if self.landmarks.ndim != 3 or 0 in self.landmarks.shape:
            raise ValueError(
                f"landmarks: shape {list(self.landmarks.shape)}, expected [blocks, M, D], none of them 0."
            )
        P, M, J = self.landmarks.shape
        scales = len(self.kernel.scales)
        if self.center.shape != (P, J):
            raise ValueError(f"center: shape {list(self.center.shape)}, expected {[P, J]} as the landmarks.")
        if self.alpha.shape != (P, scales, M):
            raise ValueError(
                f"alpha: shape {list(self.alpha.shape)}, expected {[P, scales, M]}: one coefficient per block, scale "
                f"and landmark, of {P} block(s), {scales} scale(s) and {M} landmarks."
            )
        for name in ("landmarks", "center", "alpha"):
            if not getattr(self, name).isfinite().all():
                raise ValueError(f"{name}: found NaN or infinity, expected finite numbers.")
        for name in ("sigma", "k_rr"):
            values = torch.tensor(getattr(self, name), dtype=torch.float64)
            if len(values) != P or not values.isfinite().all() or (name == "sigma" and not (values > 0).all()):
                kind = "positive finite" if name == "sigma" else "finite"
                raise ValueError(f"{name}: found {list(values.tolist())}, expected {P} {kind} number(s), one a block.")
        if self.condition_size < 0:
            raise ValueError(f"condition_size: found {self.condition_size}, expected at least 0.")
        if self.layout != "per_token" and P != 1:
            raise ValueError(f"landmarks: {P} blocks, expected 1 with layout={self.layout!r}. Is it 'per_token'?")
        if self.sample_shape is None:
            return
        width = torch.Size(self.sample_shape).numel() if self.layout == "flatten" else self.sample_shape[-1]
        if width + self.condition_size != J or (self.layout == "per_token" and self.sample_shape[0] != P):
            raise ValueError(
                f"sample_shape: found {list(self.sample_shape)}, which does not fit landmarks of shape "
                f"{list(self.landmarks.shape)} with layout={self.layout!r} and condition_size={self.condition_size}."
            )
