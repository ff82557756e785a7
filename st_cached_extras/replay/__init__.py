from st_cached_extras.replay.loss import ReplayLoss
from st_cached_extras.replay.passes import NonFiniteFeaturesError

__all__ = ["NonFiniteFeaturesError", "ReplayLoss"]
