"""Distribution matching in representation space: objectives, references, and the balance of several encoders."""

from st_cached_extras.objectives.mmd.balance import EncoderBalance
from st_cached_extras.objectives.mmd.kernels import Kernel, median_bandwidth
from st_cached_extras.objectives.mmd.nystrom import NystromReference
from st_cached_extras.objectives.mmd.objective import MultiEncoderMMD
from st_cached_extras.objectives.mmd.reference_file import ReferenceFileError
from st_cached_extras.objectives.mmd.two_sample import TwoSampleMMD

__all__ = [
    "EncoderBalance",
    "Kernel",
    "MultiEncoderMMD",
    "NystromReference",
    "ReferenceFileError",
    "TwoSampleMMD",
    "median_bandwidth",
]
