"""Data: clips as arrays, and a captioned video set that needs no download."""

from st_cached_extras.data.moving_shapes import moving_shapes
from st_cached_extras.data.video import VideoFrames, decode_videos, read_video, write_mp4

__all__ = ["VideoFrames", "decode_videos", "moving_shapes", "read_video", "write_mp4"]
