"""Video clips as arrays of frames: how clips are read, written, and decoded inside a dataset.

sentence-transformers takes a [frames, height, width, 3] array for a video. A string it may take for *text*, and
`datasets.Video` decodes only where torchcodec is installed; everything here ends in the array.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import datasets
import numpy as np
from torch.nn.functional import interpolate

from st_cached_extras.data.errors import BrokenClipError

INSTALL_HINT = 'Install it with: pip install "st-cached-extras[video]"'

AnyDataset = TypeVar("AnyDataset", datasets.Dataset, datasets.IterableDataset, datasets.DatasetDict)


def read_video(
    source: bytes | str | os.PathLike,
    num_frames: int | None = None,
    *,
    fps: float | None = None,
    size: int | None = None,
    name: str | None = None,
) -> np.ndarray:
    """Decodes a clip to RGB frames, with torchcodec where it is installed, else with PyAV.

    Args:
        source: The bytes of a video file, or the path of one.
        num_frames: How many frames to keep, at the middles of as many equal stretches of the clip. A shorter clip
            repeats frames, so that every clip has the same length. None keeps every frame.
        fps: Frames to keep per second, at least two in all. With `num_frames`, that is the most: a clip too long for
            it is sampled more sparsely, over its whole length.
        size: Pixels to which the shorter side of larger frames is scaled down. None: as they are.
        name: What error messages call the clip. None: its path, or the length and hash of its bytes.

    Returns:
        Frames, uint8 of shape [frames, height, width, 3].

    Raises:
        FileNotFoundError: `source` is a path at which there is no file.
        ValueError: An argument is out of its range, or the bytes are not a video that can be decoded
            (`BrokenClipError`, which names the clip and the cause).
        ImportError: Neither torchcodec nor PyAV is installed.
    """
    return read_clip(source, Sampling(num_frames, fps, size), name=name)[0]


@dataclass(frozen=True)
class Sampling:
    """Which frames of a clip are kept, and how large: see `read_video`."""

    num_frames: int | None = None
    fps: float | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_frames", "size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {getattr(self, name)}.")
        if self.fps is not None and not self.fps > 0:
            raise ValueError(f"fps must be above 0 or None, got {self.fps}.")

    def indices(self, total: int, rate: float | None) -> np.ndarray:
        """Which of `total` frames at `rate` a second to keep, int of shape [frames]."""
        if self.fps is None:
            return sample_indices(total, self.num_frames)
        if rate is None:
            raise ValueError("it does not say how many frames a second it has, so fps cannot be kept: use num_frames")
        wanted = max(2, round(total / rate * self.fps))
        return sample_indices(total, min(wanted, self.num_frames or wanted))

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the frames that are kept."""
        factor = min(1.0, (self.size or height) / min(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))


def read_clip(
    source: bytes | str | os.PathLike, sampling: Sampling, *, name: str | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames of a clip as from `read_video`, and what vision-language models ask of them.

    Returns:
        Frames, uint8 of shape [frames, height, width, 3], and, of the clip that they make: "fps" (None where the file
        does not say), "total_num_frames", "duration" in seconds, and "frames_indices", all of them. A processor that
        draws frames by itself so draws from these, and finds each where it looks for it.
    """
    name = name or _describe(source)
    if isinstance(source, bytes | bytearray | memoryview):
        source = bytes(source)
    elif not os.path.isfile(source):
        raise FileNotFoundError(f"There is no video file at {name}. Relative paths start from {os.getcwd()}.")
    else:
        source = os.fspath(source)
    decode = _decoder()
    try:
        decoded = decode(source, sampling)
    except Exception as error:  # PyAV and torchcodec raise many types, all of which mean the same to a user
        raise BrokenClipError(f"Cannot decode the video {name}: {type(error).__name__}: {error}") from error
    if decoded is None:
        raise BrokenClipError(f"Cannot decode the video {name}: it has no video stream, or no frame in it.")
    frames, total, rate = decoded
    metadata = {
        "fps": rate and rate * len(frames) / total,
        "total_num_frames": len(frames),
        "duration": rate and total / rate,
        "frames_indices": list(range(len(frames))),
    }
    return frames, metadata


def write_mp4(frames: np.ndarray, fps: float = 8) -> bytes:
    """Encodes RGB frames as an H.264 mp4 file, in memory. The same frames give the same bytes.

    Args:
        frames: uint8 of shape [frames, height, width, 3]; height and width even, as the yuv420p format demands.
        fps: Frames per second.
    """
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) == 0:
        raise ValueError(
            f"frames must be uint8 of shape [frames, height, width, 3], got {frames.dtype} {list(frames.shape)}."
        )
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(f"frames must have an even height and width, got {height}x{width}: crop or pad them.")
    av = _import_av()
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # One thread, no look-ahead: short clips encode several times faster, and always to the same bytes.
        stream.options = {"crf": "18", "preset": "veryfast", "tune": "zerolatency", "threads": "1"}
        convert = _converter("yuv420p")
        for frame in frames:
            rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(convert(rgb)))
        container.mux(stream.encode())
    return file.getvalue()


@dataclass
class VideoFrames(datasets.Video):
    """A `datasets.Video` feature whose decoded value is an array of frames, not a torchcodec decoder.

    Being a *feature*, the decoding follows the column through indexing, slicing, iteration, `select`, `shuffle`,
    `filter`, `map`, `sort`, `train_test_split`, `concatenate_datasets`, `rename_column`, `set_transform`, pickling
    and the workers of a DataLoader. On disk and on the Hub it is an ordinary `Video` column, which anybody can read:
    after `load_from_disk` or `load_dataset`, apply `decode_videos` once more.

    Args:
        num_frames: As in `read_video`.
        fps: As in `read_video`.
        size: As in `read_video`.
        with_metadata: Whether a clip decodes to the mapping that sentence-transformers takes for one that knows its
            time: "array", the frames, and "video_metadata", as from `read_clip`.
    """

    num_frames: int | None = None
    fps: float | None = None
    size: int | None = None
    with_metadata: bool = False

    def decode_example(
        self, value: Any, token_per_repo_id: dict[str, str | bool | None] | None = None
    ) -> np.ndarray | dict[str, Any]:
        """Frames of one stored clip, uint8 of shape [frames, height, width, 3]."""
        if isinstance(value, np.ndarray):
            return value  # already decoded
        path, data = (value, None) if isinstance(value, str) else (value.get("path"), value.get("bytes"))
        if data is None and path is None:
            raise BrokenClipError("A video has neither bytes nor a path: the row is empty.")
        if data is None and _is_remote(path):
            data = _download(path, token_per_repo_id)
        name = None if data is None else path and f"{path!r} ({len(data)} bytes)"
        sampling = Sampling(self.num_frames, self.fps, self.size)
        frames, metadata = read_clip(path if data is None else data, sampling, name=name)
        return {"array": frames, "video_metadata": metadata} if self.with_metadata else frames

    def encode_example(self, value: Any) -> dict[str, Any]:
        """What is stored for a clip; an array of frames becomes an mp4, with its loss of detail."""
        return (
            {"path": None, "bytes": write_mp4(value)}
            if isinstance(value, np.ndarray)
            else super().encode_example(value)
        )


def decode_videos(
    dataset: AnyDataset,
    column: str = "video",
    num_frames: int | None = None,
    *,
    fps: float | None = None,
    size: int | None = None,
    with_metadata: bool = False,
) -> AnyDataset:
    """Makes a column of clips decode to arrays of frames on access, so that sentence-transformers can take it.

    No clip is read or copied here. See `VideoFrames` for what the decoding survives.

    Args:
        dataset: A `Dataset`, `DatasetDict` or streamed `IterableDataset` whose column is a `datasets.Video`, the
            bytes of video files, their paths, or a mapping with "bytes" and "path". Relative paths start from the
            working directory.
        column: The column's name.
        num_frames: How many frames of each clip to keep, evenly spaced; None keeps all.
        fps: Frames to keep per second; with `num_frames`, that is the most.
        size: Pixels to which the shorter side of larger frames is scaled down.
        with_metadata: Decode to a mapping of "array" and "video_metadata", for models that ask when a frame was.
    """
    if isinstance(dataset, dict):
        options = {"fps": fps, "size": size, "with_metadata": with_metadata}
        return type(dataset)({k: decode_videos(rows, column, num_frames, **options) for k, rows in dataset.items()})
    if dataset.features is None or column not in dataset.features:
        found = "unknown (a stream without features)" if dataset.features is None else list(dataset.features)
        raise ValueError(f"There is no column {column!r} to decode as video. The columns are: {found}.")
    feature = dataset.features[column]
    if not holds_clips(feature):
        raise TypeError(
            f"Column {column!r} does not hold video clips but {feature}. Expected a datasets.Video feature, "
            "bytes, paths (strings), or a mapping with 'bytes' and 'path'."
        )
    Sampling(num_frames, fps, size)  # checks them
    frames = VideoFrames(num_frames=num_frames, fps=fps, size=size, with_metadata=with_metadata)
    return dataset.cast_column(column, frames)


def sample_indices(total: int, num_frames: int | None) -> np.ndarray:
    """Which of `total` frames to keep: the middles of `num_frames` equal stretches, [num_frames]."""
    if num_frames is None:
        return np.arange(total)
    return ((np.arange(num_frames) + 0.5) * total / num_frames).astype(np.int64)


def holds_clips(feature: Any) -> bool:
    """Whether a column of this feature may hold videos: as such, as bytes, as paths, or as a mapping of both."""
    if isinstance(feature, datasets.Video):
        return True
    if isinstance(feature, dict):
        return bool(feature) and set(feature) <= {"bytes", "path"}
    return isinstance(feature, datasets.Value) and feature.dtype in (
        "string",
        "large_string",
        "binary",
        "large_binary",
    )


def _describe(source: bytes | str | os.PathLike) -> str:
    if isinstance(source, str | os.PathLike):
        return repr(os.fspath(source))
    return f"of {len(source)} bytes (sha256 {hashlib.sha256(source).hexdigest()[:12]})"


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ImportError(f"Reading and writing video needs PyAV. {INSTALL_HINT}") from error
    return av


def _decoder() -> Any:
    """torchcodec where it is installed with its FFmpeg libraries, else PyAV: the same frames."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # without the libraries it is a RuntimeError
        _import_av()
        return _decode_av
    return _decode_torchcodec


def _decode_av(source: bytes | str, sampling: Sampling) -> tuple[np.ndarray, int, float | None] | None:
    """Frames [frames, height, width, 3], of how many, at how many a second; None if there are none."""
    total, rate = _count_packets(source)
    while True:
        # Frames that are not kept are decoded but never converted: a long clip needs no more memory than a short one.
        indices = sampling.indices(total, rate)
        wanted = np.bincount(indices, minlength=total)
        frames: list[np.ndarray] = []
        convert = _converter("rgb24", sampling)
        decoded = 0
        for frame in _iterate_frames(source):
            repeats = int(wanted[decoded]) if decoded < len(wanted) else 0
            if repeats:
                frames.extend([convert(frame).to_ndarray()] * repeats)
            decoded += 1
        if decoded == 0:
            return None
        if decoded == total:
            return np.stack(frames), total, rate
        total = decoded  # packets are not always frames: once more, with the true count


def _converter(pixel_format: str, sampling: Sampling | None = None) -> Callable[[Any], Any]:
    """Converts the frames of one clip; one converter for all of them is three times faster than one for each."""
    reformat = _import_av().video.reformatter.VideoReformatter().reformat

    def convert(frame: Any) -> Any:
        options = {"format": pixel_format}
        if sampling is not None and sampling.size is not None:
            options["height"], options["width"] = sampling.shape(frame.height, frame.width)
        try:
            return reformat(frame, **options, threads=1)
        except TypeError:  # PyAV before threads were an option: there was one
            return reformat(frame, **options)

    return convert


def _iterate_frames(source: bytes | str) -> Any:
    av = _import_av()
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source) as container:
        if container.streams.video:
            stream = container.streams.video[0]
            if stream.width * stream.height <= 256 * 256:
                stream.codec_context.thread_count = 1  # starting threads takes longer than decoding small frames
            yield from container.decode(stream)


def _count_packets(source: bytes | str) -> tuple[int, float | None]:
    """About how many frames a clip has, and how many a second."""
    av = _import_av()
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source) as container:
        if not container.streams.video:
            return 1, None
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        packets = sum(packet.size > 0 for packet in container.demux(stream))
        return max(1, packets), float(rate) if rate else None


def _decode_torchcodec(source: bytes | str, sampling: Sampling) -> tuple[np.ndarray, int, float | None] | None:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(source, dimension_order="NHWC")
    if len(decoder) == 0:
        return None
    rate = decoder.metadata.average_fps
    indices = sampling.indices(len(decoder), rate)
    frames = decoder.get_frames_at(indices=indices.tolist()).data  # [frames, height, width, 3]
    if (shape := sampling.shape(*frames.shape[1:3])) != tuple(frames.shape[1:3]):
        scaled = interpolate(frames.permute(0, 3, 1, 2), shape, mode="bilinear", antialias=True)
        frames = scaled.permute(0, 2, 3, 1)
    return frames.numpy(), len(decoder), rate


def _is_remote(path: str) -> bool:
    return "://" in path or "::" in path


def _download(path: str, token_per_repo_id: dict[str, str | bool | None] | None) -> bytes:
    """The bytes behind a remote path of a streamed dataset."""
    from datasets.download.download_config import DownloadConfig
    from datasets.utils.file_utils import xopen

    token = next((token for repo, token in (token_per_repo_id or {}).items() if repo in path), None)
    with xopen(path, "rb", download_config=DownloadConfig(token=token)) as file:
        return file.read()
