from st_cached_extras.replay.loss import NonFiniteFeaturesError, ReplayLoss

__all__ = ["NonFiniteFeaturesError", "ReplayLoss"]
