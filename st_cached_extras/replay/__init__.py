from st_cached_extras.replay.loss import ReplayLoss
from st_cached_extras.replay.passes import NonFiniteFeaturesError
from st_cached_extras.replay.protocol import (
    FeatureGradientReplay,
    FeatureGradientReplayResult,
    MiniBatchError,
    ReplayStateError,
)
from st_cached_extras.replay.stages import ParityError, Stage, Staged, StagedPass

__all__ = [
    "FeatureGradientReplay",
    "FeatureGradientReplayResult",
    "MiniBatchError",
    "NonFiniteFeaturesError",
    "ParityError",
    "ReplayLoss",
    "ReplayStateError",
    "Stage",
    "Staged",
    "StagedPass",
]
