"""Feature-gradient replay for sentence-transformers: batches and losses that do not fit the machine."""

from st_cached_extras.losses import CachedInfoNCELoss

__version__ = "0.1.0"
__all__ = ["CachedInfoNCELoss", "__version__"]
