"""The contract between features and cotangents.

An objective is pure tensor mathematics: it sees features (embeddings by name), never a model, a hook or an
optimizer. It answers with the value of the loss and its derivative with respect to every feature, the cotangents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from st_cached_extras.distributed.world import World


@dataclass(frozen=True)
class ObjectiveResult:
    """What one evaluation of an objective yields.

    Attributes:
        loss: fp32 scalar (fp64 for fp64 features), the mean objective over all rows of the world, equal on every rank.
        cotangents: per name, d loss / d features[name][rows], shaped as those rows; fp32 (fp64 for fp64 features).
            Complete: what the blocks of other ranks contribute has been added. No world factor, selection weight or
            loss scale is in them.
        parameter_cotangents: per learnable parameter of the objective, keyed as ``named_parameters()``,
            d loss / d parameter, complete over the world.
        metrics: detached scalars worth logging beside the loss, by name.
        components: the parts of a loss that has several, detached scalars by name; their sum is the loss.
    """

    loss: Tensor
    cotangents: dict[str, Tensor]
    parameter_cotangents: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    components: dict[str, Tensor] = field(default_factory=dict)


class Objective(nn.Module, ABC):
    """A function of features with derivatives in closed form. A module only so that it can own learnable scalars.

    Attributes:
        names: the feature names it expects, or None for any.
        sample_shapes: the expected shape of one row by name, or None for any.
        uses_reference: whether it needs ``reference`` features.
    """

    names: tuple[str, ...] | None = None
    sample_shapes: Mapping[str, tuple[int, ...]] | None = None
    uses_reference: bool = False

    @abstractmethod
    def value_and_cotangents(
        self,
        features: Mapping[str, Tensor],
        *,
        labels: Tensor | None = None,
        reference: Mapping[str, Tensor] | None = None,
        rows: Tensor | None = None,
        world: World | None = None,
    ) -> ObjectiveResult:
        """Evaluate the objective and its derivatives.

        Args:
            features: this rank's rows by name, each [B, ...], detached, of a floating-point dtype.
            labels: one label per row, [B] or [B, ...], for the objectives that read them.
            reference: current-reference features under the same names, for the objectives that use them.
            rows: int64 [b], the local rows whose cotangents are wanted; None for all.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            An :class:`ObjectiveResult`, with arithmetic in fp32 or higher whatever the feature dtype and whatever
            the surrounding autocast.
        """


def compute_dtype(features: Mapping[str, Tensor]) -> torch.dtype:
    """fp64 if any feature is fp64, else fp32: the dtype of an objective's arithmetic and of its cotangents."""
    return torch.float64 if any(x.dtype == torch.float64 for x in features.values()) else torch.float32
