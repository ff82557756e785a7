"""How close generated clips are to real ones: what the objective sees, and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from clip_classifier import ClipClassifier, word_indices
from generator_encoders import features_of
from torch import Tensor
from torch.nn import functional as F

from st_cached_extras.data.moving_shapes import DIRECTIONS, SPEEDS
from st_cached_extras.encoders import FrozenEncoder
from st_cached_extras.encoders.glimpse import centre_of, stands_out
from st_cached_extras.objectives.mmd import MultiEncoderMMD


class GeneratorEvaluator:
    """Scores a generator on captions in whose clips real and generated ones are compared.

    Args:
        objective: whose raw values are reported.
        encoders: that it matches under.
        judge: reads words off clips; it was never trained against.
        clips: real, uint8 [N, T, 3, H, W], which the references were not made from.
        captions: of these clips.
        conditions: of these captions, [N, words].
        other_clips: as many real clips again.
        batch_size: of the raw values, whose floor goes with one over it.
        batches: random batches of real clips whose mean raw value is the floor, and of generated ones.

    Attributes:
        floors: by encoder, the mean raw value of real clips.
        floor_distance: the sliced Wasserstein distance between the two samples of real clips.
    """

    def __init__(
        self,
        objective: MultiEncoderMMD,
        encoders: Mapping[str, FrozenEncoder],
        judge: ClipClassifier,
        clips: Tensor,
        captions: Sequence[str],
        conditions: Tensor,
        other_clips: Tensor,
        *,
        batch_size: int,
        batches: int = 8,
    ) -> None:
        self.objective, self.encoders, self.judge = objective, encoders, judge
        self.captions, self.conditions = list(captions), conditions
        rng = torch.Generator().manual_seed(0)
        size = min(batch_size, len(clips))
        self.batches = [torch.randperm(len(clips), generator=rng)[:size] for _ in range(batches)]
        self.floors = self._raw(features_of(encoders, clips))
        self.real = judge.features(clips.float() / 255)
        self.floor_distance = sliced_wasserstein(judge.features(other_clips.float() / 255), self.real)

    def __call__(self, generate: Callable[[Sequence[str]], Tensor]) -> dict[str, float]:
        """Score a generator.

        Args:
            generate: captions → clips, uint8 [n, T, H, W, 3].

        Returns:
            "mmd/ENCODER", the raw values; "sliced_wasserstein", under the judge's features; and what :meth:`read`
            says, as "read/NAME".
        """
        clips = generate(self.captions).movedim(-1, 2).to(self.real.device)
        raw = self._raw(features_of(self.encoders, clips))
        floats = clips.float() / 255
        return {
            **{f"mmd/{name}": value for name, value in raw.items()},
            "sliced_wasserstein": sliced_wasserstein(self.judge.features(floats), self.real),
            **{f"read/{name}": share for name, share in self.read(floats, self.captions).items()},
        }

    def read(self, clips: Tensor, captions: Sequence[str]) -> dict[str, float]:
        """What share of clips [n, T, 3, H, W] in [0, 1] show what their captions ask for.

        Returns:
            By group of the judge, such as "shape", the share off which it reads the right word; by these names in a
            row, such as "shape and colour", the share off which it reads all; and "motion", see
            :func:`moves_as_asked`.
        """
        right = self.judge.read(clips, captions)
        return {
            **dict(zip(self.judge.groups, right.float().mean(0).tolist(), strict=True)),
            " and ".join(self.judge.groups): float(right.all(1).float().mean()),
            "motion": float(moves_as_asked(clips, captions).float().mean()),
        }

    def _raw(self, features: dict[str, Tensor]) -> dict[str, float]:
        """The mean over batches of each encoder's raw value."""
        none = torch.zeros(0, dtype=torch.int64)
        joint = {**features, "condition": self.conditions}
        values = [
            self.objective.value_and_cotangents({name: x[rows] for name, x in joint.items()}, rows=none).metrics
            for rows in self.batches
        ]
        return {name: float(torch.stack([value[f"mmd/{name}"] for value in values]).mean()) for name in features}


def moves_as_asked(clips: Tensor, captions: Sequence[str]) -> Tensor:
    """Whether what stands out moves in the direction and at the speed that each caption names, bool [n].

    Measured from its centre in the first picture to that in the last: the direction that is nearest, and "quickly"
    where the way is nearer to that of the quick clips than to that of the slow ones.
    """
    _, weight = stands_out(clips[:, [0, -1]].flatten(0, 1))
    first, last = centre_of(weight).unflatten(0, (len(clips), 2)).unbind(1)
    way = (last - first).cpu() / (clips.shape[1] - 1)  # [n, 2], pixels per frame
    along = way @ torch.tensor(list(DIRECTIONS.values()), dtype=way.dtype).T  # [n, directions]
    forward, direction = along.max(1)
    speed = (forward[:, None] - torch.tensor(list(SPEEDS.values()))).abs().argmin(1)
    wanted = word_indices(captions, {"direction": DIRECTIONS, "speed": SPEEDS})
    return (direction == wanted["direction"]) & (speed == wanted["speed"])


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = 256, seed: int = 0) -> float:
    """The mean over random directions of the Wasserstein-1 distance between two samples' projections.

    Args:
        a, b: [n, D] and [m, D]; the larger one is thinned out at random to the size of the smaller.
        directions: unit vectors that both are projected on (Bonneel et al., J. Math. Imaging Vis. 2015).
        seed: of directions and thinning.
    """
    rng = torch.Generator().manual_seed(seed)
    size = min(len(a), len(b))
    a, b = (x[torch.randperm(len(x), generator=rng)[:size]] for x in (a, b))
    projections = F.normalize(torch.randn(a.shape[1], directions, generator=rng), dim=0)
    difference = (a @ projections).sort(dim=0).values - (b @ projections).sort(dim=0).values
    return float(difference.abs().mean())
