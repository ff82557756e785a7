from st_cached_extras.testing.loss_check import LossCheckCase
from st_cached_extras.testing.objective_check import ObjectiveCheckCase

__all__ = ["LossCheckCase", "ObjectiveCheckCase"]
