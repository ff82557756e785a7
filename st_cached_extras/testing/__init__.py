"""What losses, objectives and their tests share: check cases to inherit, tiny models, ranks in processes or threads.

The check cases need pytest, the rest does not, so they are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from st_cached_extras.testing.estimator_check import EstimatorCheckCase
    from st_cached_extras.testing.loss_check import LossCheckCase, LossEqualityCase
    from st_cached_extras.testing.objective_check import ObjectiveCheckCase

__all__ = ["EstimatorCheckCase", "LossCheckCase", "LossEqualityCase", "ObjectiveCheckCase"]

_MODULES = {
    "EstimatorCheckCase": "estimator_check",
    "LossCheckCase": "loss_check",
    "LossEqualityCase": "loss_check",
    "ObjectiveCheckCase": "objective_check",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
