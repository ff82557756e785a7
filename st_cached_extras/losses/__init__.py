from st_cached_extras.losses.cached_infonce import CachedInfoNCELoss
from st_cached_extras.losses.cached_loss import CachedLoss

__all__ = ["CachedInfoNCELoss", "CachedLoss"]
