from st_cached_extras.losses.cached_infonce import CachedInfoNCELoss

__all__ = ["CachedInfoNCELoss"]
