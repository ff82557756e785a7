"""Does a generator that is trained on a share of each batch cover a distribution, and does a small error in the
gradient show?

    python -m tests.benchmarks.spiral --radius 0.15

A spiral of two and a half turns and radius 2, in a plane of 64 dimensions, is the reference under two encoders: the
identity, and random sine features [B, 4, 16]. A small network learns to draw it from noise, by the MMD of 128 points,
of which 32 drawn at random are differentiated and weighted by 4. Beside it: batches of 32 points, all differentiated,
which costs as much in the second pass; and a mutant whose repulsion among the points lets only one side of every pair
move, so that it is half as strong, which leaves the cosine to the right gradient near 1.

Recall is the share of 200 places along the spiral that have one of 2000 drawn points within the radius; the distance
is the median over the drawn points of that to the nearest place on the spiral, in all 64 dimensions.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from st_cached_extras.objectives.base import ObjectiveResult
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.replay import FeatureGradientReplay, Stage, Staged
from tests.benchmarks.measure import header, table

DIMENSIONS, TURNS, RADIUS = 64, 2.5, 2.0
MINI_BATCH = 32
NOISE = 2  # dimensions


class OneSided(MultiEncoderMMD):
    """The mutant: in k(x_i, x_j) only x_i is live, so the repulsion is half of what it is."""

    def value_and_cotangents(self, features: Mapping[str, Tensor], *, rows=None, **kwargs: Any) -> ObjectiveResult:
        result = super().value_and_cotangents(features, rows=rows, **kwargs)
        cotangents = {}
        for name, reference in self.references.items():
            x = features[name].flatten(1)
            live = x if rows is None else x[rows]
            squared = torch.cdist(live, x).square()
            widths = [scale * reference.sigma[0] for scale in reference.kernel.scales]
            w = sum(torch.exp(-squared / (2 * width**2)) / width**2 for width in widths) / len(widths)
            repulsion = -2 / len(x) ** 2 * (w.sum(1, keepdim=True) * live - w @ x)
            scale = 1 / (result.metrics[f"mmd/{name}"].abs() + self.eps)
            cotangents[name] = result.cotangents[name] - 0.5 * scale * repulsion.view_as(result.cotangents[name])
        return replace(result, cotangents=cotangents)


def spiral(places: Tensor) -> Tensor:
    """Points of the spiral, [n, 64], at places in [0, 1] along its length."""
    radius = RADIUS * (0.05 + 0.95 * places).sqrt()  # places of equal length lie at equal distances, nearly
    angle = 2 * math.pi * TURNS * radius / RADIUS
    plane = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return plane @ embedding()


def embedding() -> Tensor:
    """An orthonormal basis of the plane, [2, 64]."""
    basis = torch.randn(DIMENSIONS, 2, generator=torch.Generator().manual_seed(1))
    return torch.linalg.qr(basis).Q.T


def sine_encoder() -> nn.Module:
    """Random sine features of a point, [B, 4, 16]."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(DIMENSIONS, 64, generator=generator), 2 * math.pi * torch.rand(64, generator=generator)

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x @ weight + bias).unflatten(1, (4, 16))

    return Sine()


def train(arguments: argparse.Namespace, variant: str, seed: int) -> tuple[float, float]:
    """Recall and median distance after training."""
    torch.manual_seed(seed)
    batch, mutant = (32, False) if variant == "B = b = 32" else (128, variant.startswith("one-sided"))
    encoders = {"identity": nn.Identity(), "sine": sine_encoder()}
    real = spiral(torch.rand(arguments.real, generator=torch.Generator().manual_seed(3)))
    references = {
        name: NystromReference.fit(
            encoder(real), landmarks=arguments.landmarks, scales=tuple(arguments.scales), name=name
        )
        for name, encoder in encoders.items()
    }
    objective = (OneSided if mutant else MultiEncoderMMD)(references)
    width = arguments.width
    generator = nn.Sequential(
        nn.Linear(NOISE, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
    ).append(nn.Linear(width, DIMENSIONS))
    optimizer = torch.optim.Adam(generator.parameters(), arguments.learning_rate, betas=(0.5, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    staged = Staged(Stage("generator", generator), Stage("encoders", encoders))
    replay = FeatureGradientReplay(
        objective,
        target_local_samples=batch,
        differentiated_local_samples=32,
        # Whole mini-batches of independent points: as random as single rows, and the rest need not run again.
        selection="mini_batches",
        seed=seed,
    )
    for _ in range(arguments.steps):
        passes = [staged.collect(noise) for noise in torch.randn(batch, NOISE).split(MINI_BATCH)]
        for one in passes:
            replay.add(one.features)
        replay.finalize()
        replay.replay(lambda index, passes=passes: passes[index].replay())
        replay.commit()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        drawn = generator(torch.randn(2000, NOISE))
    places = spiral((torch.arange(200) + 0.5) / 200)
    recall = (torch.cdist(places, drawn).amin(1) <= arguments.radius).float().mean()
    dense = spiral(torch.linspace(0, 1, 4000))
    return float(recall), float(torch.cdist(drawn, dense).amin(1).median())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--radius", type=float, default=0.15, help="of what counts as found")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real", type=int, default=4000)
    parser.add_argument("--landmarks", type=int, default=512)
    parser.add_argument("--scales", type=float, nargs="+", default=[0.05, 0.1, 0.3, 1.0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    print(header())
    rows = []
    for variant in ("B = 128, b = 32 at random", "B = b = 32", "one-sided, B = 128, b = 32"):
        results = [train(arguments, variant, seed) for seed in range(arguments.seeds)]
        recalls, distances = (sorted(values) for values in zip(*results, strict=True))
        cells = [f"{v[len(v) // 2]:.3f} ({v[0]:.3f} to {v[-1]:.3f})" for v in (recalls, distances)]
        rows.append([variant, *cells])
    recall = f"recall within {arguments.radius}"
    print(table([f"{arguments.steps} steps, {arguments.seeds} seeds", recall, "median distance"], rows))


if __name__ == "__main__":
    main()
