from st_cached_extras.objectives.adapter import LossObjective
from st_cached_extras.objectives.base import Objective, ObjectiveResult
from st_cached_extras.objectives.composite import Composite
from st_cached_extras.objectives.infonce import InfoNCE
from st_cached_extras.objectives.sigmoid import Sigmoid
from st_cached_extras.objectives.supcon import SupCon

__all__ = ["Composite", "InfoNCE", "LossObjective", "Objective", "ObjectiveResult", "Sigmoid", "SupCon"]
