from st_cached_extras.replay.loss import ReplayLoss
from st_cached_extras.replay.passes import NonFiniteFeaturesError
from st_cached_extras.replay.protocol import (
    FeatureGradientReplay,
    FeatureGradientReplayResult,
    MiniBatchError,
    ReplayStateError,
)

__all__ = [
    "FeatureGradientReplay",
    "FeatureGradientReplayResult",
    "MiniBatchError",
    "NonFiniteFeaturesError",
    "ReplayLoss",
    "ReplayStateError",
]
