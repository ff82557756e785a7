"""ZBP: training through layers that have no usable backward, by forward queries, with the skip path exact."""

from st_cached_extras.zbp.apply import apply_zbp, remove_zbp, zbp_blocks, zbp_stats
from st_cached_extras.zbp.block import ZBPBlock
from st_cached_extras.zbp.config import Local, ZBPConfig
from st_cached_extras.zbp.estimators import estimate_vjp
from st_cached_extras.zbp.modes import register_mode
from st_cached_extras.zbp.recorder import GradientQuality, ZBPRecorder, compare_with_exact

__all__ = [
    "GradientQuality",
    "Local",
    "ZBPBlock",
    "ZBPConfig",
    "ZBPRecorder",
    "apply_zbp",
    "compare_with_exact",
    "estimate_vjp",
    "register_mode",
    "remove_zbp",
    "zbp_blocks",
    "zbp_stats",
]
