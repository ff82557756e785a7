"""ZBP: training through layers that have no usable backward, by forward queries, with the skip path exact."""

from st_cached_extras.zbp.apply import (
    apply_zbp,
    remove_zbp,
    reset_queries,
    set_mode,
    total_queries,
    zbp_blocks,
    zbp_stats,
)
from st_cached_extras.zbp.block import ZBPBlock
from st_cached_extras.zbp.config import Local, ZBPConfig
from st_cached_extras.zbp.estimators import estimate_vjp
from st_cached_extras.zbp.modes import register_mode
from st_cached_extras.zbp.recorder import GradientQuality, ZBPRecorder, compare_with_exact
from st_cached_extras.zbp.research import register  # noqa: F401
from st_cached_extras.zbp.research.channels import Droop, Noise, Quantise
from st_cached_extras.zbp.research.error_tap import ErrorTap
from st_cached_extras.zbp.research.opzo import opzo_update

__all__ = [
    "Droop",
    "ErrorTap",
    "GradientQuality",
    "Local",
    "Noise",
    "Quantise",
    "ZBPBlock",
    "ZBPConfig",
    "ZBPRecorder",
    "apply_zbp",
    "compare_with_exact",
    "estimate_vjp",
    "opzo_update",
    "register_mode",
    "remove_zbp",
    "reset_queries",
    "set_mode",
    "total_queries",
    "zbp_blocks",
    "zbp_stats",
]
