"""Data: rows from anywhere, clips as arrays, and a captioned video set that needs no download."""

from st_cached_extras.data.broken import drop_broken, drop_broken_from_stream, drop_empty
from st_cached_extras.data.columns import check_clips, check_images, check_text, take_columns
from st_cached_extras.data.errors import BrokenClipError, DataError
from st_cached_extras.data.loading import absolute_paths, load_rows
from st_cached_extras.data.moving_shapes import moving_shapes
from st_cached_extras.data.splits import distinct, first_of_each, hold_out
from st_cached_extras.data.video import VideoFrames, decode_videos, read_clip, read_video, write_mp4

__all__ = [
    "BrokenClipError",
    "DataError",
    "VideoFrames",
    "absolute_paths",
    "check_clips",
    "check_images",
    "check_text",
    "decode_videos",
    "distinct",
    "drop_broken",
    "drop_broken_from_stream",
    "drop_empty",
    "first_of_each",
    "hold_out",
    "load_rows",
    "moving_shapes",
    "read_clip",
    "read_video",
    "take_columns",
    "write_mp4",
]
