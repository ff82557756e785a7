"""Frozen image and video encoders as feature branches, differentiable from the pixels."""

from st_cached_extras.encoders.frozen import FrameEncoder, FrozenEncoder, VideoEncoder, load_encoder
from st_cached_extras.encoders.glimpse import Glimpse, Motion
from st_cached_extras.encoders.preprocessing import PixelPreprocessing
from st_cached_extras.encoders.random_features import PooledPixels, RandomConvolution3d
from st_cached_extras.encoders.sentence_transformer import SentenceTransformerEncoder

__all__ = [
    "FrameEncoder",
    "FrozenEncoder",
    "Glimpse",
    "Motion",
    "PixelPreprocessing",
    "PooledPixels",
    "RandomConvolution3d",
    "SentenceTransformerEncoder",
    "VideoEncoder",
    "load_encoder",
]
