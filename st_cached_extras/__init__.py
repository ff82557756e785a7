"""Feature-gradient replay for sentence-transformers: batches and losses that do not fit the machine."""

from st_cached_extras.distributed.trainer import ReplaySentenceTransformerTrainer, ReplayTrainerMixin
from st_cached_extras.losses import (
    CachedCompositeLoss,
    CachedInfoNCELoss,
    CachedLoss,
    CachedMultiEncoderMMDLoss,
    CachedSigmoidLoss,
    CachedSupConLoss,
)

__version__ = "0.1.0"
__all__ = [
    "CachedCompositeLoss",
    "CachedInfoNCELoss",
    "CachedLoss",
    "CachedMultiEncoderMMDLoss",
    "CachedSigmoidLoss",
    "CachedSupConLoss",
    "ReplaySentenceTransformerTrainer",
    "ReplayTrainerMixin",
    "__version__",
]
