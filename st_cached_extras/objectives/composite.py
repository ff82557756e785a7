"""A weighted sum of objectives, each on its own features of the same batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.base import Objective, ObjectiveResult

T = TypeVar("T")


class Composite(Objective):
    """Σ_k w_k L_k. Features and references are named "component.name"; weights are applied here and nowhere else.

    Args:
        objectives: by name, an objective and its weight.

    Attributes:
        weights: by name, as given.
    """

    def __init__(self, objectives: Mapping[str, tuple[Objective, float]]) -> None:
        super().__init__()
        self.objectives = nn.ModuleDict({name: objective for name, (objective, _) in objectives.items()})
        self.weights = {name: float(weight) for name, (_, weight) in objectives.items()}
        self.uses_reference = any(objective.uses_reference for objective, _ in objectives.values())

    def extra_repr(self) -> str:
        return f"weights={self.weights}"

    def value_and_cotangents(
        self,
        features: Mapping[str, Tensor],
        *,
        labels: Tensor | Mapping[str, Tensor | None] | None = None,
        reference: Mapping[str, Tensor] | None = None,
        rows: Tensor | Mapping[str, Tensor] | None = None,
        world: World | None = None,
    ) -> ObjectiveResult:
        """Evaluate every component and add up.

        Args:
            features: "component.name" to [B, ...], for every component those that it expects.
            labels: by component; or one tensor for all of them.
            reference: as ``features``, for the components that use references.
            rows: by component, the rows whose cotangents are wanted; or the same for all; None for all rows.
            world: the ranks that share the batch; None for this rank alone.

        Returns:
            An :class:`ObjectiveResult`, whose components are the weighted values, and whose metrics are those of the
            components as "component/metric", a component's own parts among them.
        """
        loss: Tensor | None = None
        cotangents: dict[str, Tensor] = {}
        parameter_cotangents: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        components: dict[str, Tensor] = {}
        for name, objective in self.objectives.items():
            result = objective.value_and_cotangents(
                _of_component(name, features),
                labels=labels.get(name) if isinstance(labels, Mapping) else labels,
                reference=_of_component(name, reference) if objective.uses_reference else None,
                rows=rows[name] if isinstance(rows, Mapping) else rows,
                world=world,
            )
            weight = self.weights[name]
            components[name] = result.loss * weight
            loss = components[name] if loss is None else loss + components[name]
            cotangents |= {f"{name}.{key}": weight * x for key, x in result.cotangents.items()}
            parameter_cotangents |= {
                f"objectives.{name}.{key}": weight * x for key, x in result.parameter_cotangents.items()
            }
            metrics |= {f"{name}/{key}": x for key, x in {**result.metrics, **result.components}.items()}
        cotangents = {name: cotangents[name] for name in features if name in cotangents}
        return ObjectiveResult(loss, cotangents, parameter_cotangents, metrics, components)


def of_component(component: str, values: Mapping[str, T]) -> dict[str, T]:
    """Put a component's name before those of its features."""
    return {f"{component}.{name}": value for name, value in values.items()}


def _of_component(component: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): x for name, x in (values or {}).items() if name.startswith(prefix)}
