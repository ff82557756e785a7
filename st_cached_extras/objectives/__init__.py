from st_cached_extras.objectives.base import Objective, ObjectiveResult
from st_cached_extras.objectives.infonce import InfoNCE

__all__ = ["InfoNCE", "Objective", "ObjectiveResult"]
