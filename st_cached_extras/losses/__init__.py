from st_cached_extras.losses.cached_composite import CachedCompositeLoss
from st_cached_extras.losses.cached_infonce import CachedInfoNCELoss
from st_cached_extras.losses.cached_loss import CachedLoss
from st_cached_extras.losses.cached_mmd import CachedMultiEncoderMMDLoss
from st_cached_extras.losses.cached_sigmoid import CachedSigmoidLoss
from st_cached_extras.losses.cached_supcon import CachedSupConLoss

__all__ = [
    "CachedCompositeLoss",
    "CachedInfoNCELoss",
    "CachedLoss",
    "CachedMultiEncoderMMDLoss",
    "CachedSigmoidLoss",
    "CachedSupConLoss",
]
