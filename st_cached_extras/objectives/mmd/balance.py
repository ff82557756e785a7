"""Weights of several encoders from how far each still is from what real data score (after arXiv 2607.02375).

Two samples of real data are not at distance 0: each encoder has a floor, which the student's score approaches as it
gets good. What is above the floor, the excess, says where work is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from st_cached_extras.objectives.mmd.objective import MultiEncoderMMD


class EncoderBalance(nn.Module):
    """A proportional controller of encoder weights.

    With s̄_e the moving average of encoder e's score and f_e its floor, over the violators V, those with s̄_e > f_e::

        excess_e = s̄_e − f_e,     weight = total · softmax over V of excess_e / (temperature · mean excess over V)

    The temperature follows the mean excess, so that the weights depend on how the excess is spread and not on its
    size; encoders at or below their floor get 0. Where none is above, all get the same. A module only so that its
    state is saved with the loss that holds it (``replay_state``).

    Args:
        floors: the score of real data by encoder; measure it with :meth:`from_real_data`.
        total: sum of the weights; None for the number of encoders.
        temperature: how evenly the weights are spread: high is even.
        ema: share of the old average that is kept at every update, from 0 up to 1.

    Attributes:
        weights: by encoder, as they stand now; equal before the first update.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self, floors: Mapping[str, float], *, total: float | None = None, temperature: float = 2.0, ema: float = 0.5
    ) -> None:
        super().__init__()
        self.floors = {name: float(floor) for name, floor in floors.items()}
        if not self.floors or not all(map(math.isfinite, self.floors.values())):
            raise ValueError(
                f"floors: found {dict(floors)}, expected a finite score for each of one or more encoders."
            )
        self.total = float(len(self.floors) if total is None else total)
        self.temperature, self.ema = temperature, ema
        for name, value in (("total", self.total), ("temperature", temperature)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: found {value!r}, expected a positive finite number.")
        if not 0 <= ema < 1:
            raise ValueError(f"ema: found {ema!r}, expected a share from 0 up to but not including 1.")
        self._averages: dict[str, float] | None = None

    @classmethod
    def from_real_data(
        cls, objective: MultiEncoderMMD, batches: Iterable[Mapping[str, Tensor]], **options: float
    ) -> EncoderBalance:
        """Floors measured from real data: the mean raw value of held-out batches.

        Args:
            objective: whose references and statistic are scored.
            batches: features of real samples that the references were not made from, in batches of the size that
                will be trained with, because the floor goes with one over the batch size.
            options: of the constructor.
        """
        scores: list[Tensor] = []
        for features in batches:
            metrics = objective.value_and_cotangents(features, rows=torch.zeros(0, dtype=torch.int64)).metrics
            scores.append(torch.stack([metrics[f"mmd/{name}"] for name in objective.references]))
        if not scores:
            raise ValueError("batches: found none, expected at least one batch of real features.")
        floors = torch.stack(scores).double().mean(dim=0).tolist()
        return cls(dict(zip(objective.references, floors, strict=True)), **options)

    @property
    def weights(self) -> dict[str, float]:
        excess = {name: average - self.floors[name] for name, average in (self._averages or {}).items()}
        violators = {name: x for name, x in excess.items() if x > 0}
        if not violators:
            return dict.fromkeys(self.floors, self.total / len(self.floors))
        scale = self.temperature * sum(violators.values()) / len(violators)
        powers = {name: math.exp((x - max(violators.values())) / scale) for name, x in violators.items()}
        return {name: self.total * powers.get(name, 0.0) / sum(powers.values()) for name in self.floors}

    def update(self, scores: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Take in new scores and return the new weights.

        Args:
            scores: a score per encoder, or the ``metrics`` of a :class:`MultiEncoderMMD`, whose names are "mmd/NAME".
                The same on every rank.

        Raises:
            ValueError: an encoder's score is missing or not finite.
        """
        found = {name: float(scores.get(name, scores.get(f"mmd/{name}", math.nan))) for name in self.floors}
        if bad := [name for name, score in found.items() if not math.isfinite(score)]:
            raise ValueError(
                f"scores: missing or not finite for {', '.join(bad)} among {list(scores)}, expected a finite score "
                f"for each of {', '.join(self.floors)}."
            )
        before = found if self._averages is None else self._averages
        self._averages = {name: self.ema * before[name] + (1 - self.ema) * score for name, score in found.items()}
        return self.weights

    def extra_repr(self) -> str:
        return f"floors={self.floors}, total={self.total}, temperature={self.temperature}, ema={self.ema}"

    def replay_state(self) -> dict[str, Tensor]:
        """The moving averages, [encoders] in fp64, NaN before the first update."""
        averages = self._averages or dict.fromkeys(self.floors, math.nan)
        return {"averages": torch.tensor([averages[name] for name in self.floors], dtype=torch.float64)}

    def load_replay_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`replay_state` returned."""
        averages = dict(zip(self.floors, state["averages"].tolist(), strict=True))
        self._averages = None if any(map(math.isnan, averages.values())) else averages
