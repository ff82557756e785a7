"""Makes the references of distribution matching: what frozen encoders make of a dataset, a file per encoder.

    python training_scripts/fit_reference.py --encoders sentence-transformers/all-MiniLM-L6-v2

sums up the captions of the embedded moving shapes; any column of texts or videos goes the same way:

    python training_scripts/fit_reference.py --encoders facebook/dinov2-small facebook/vjepa2-vitl-fpc64-256 \\
        --dataset my/videos --column video --num_frames 16 --landmarks 4096 --output_dir references

Texts are embedded by models of sentence-transformers, videos by image and video models of transformers. Features are
written part by part beside the references, so that an interrupted run goes on where it stopped and ends with the same
file. Train with them: `NystromReference.load(path)`. `--help` lists every argument.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import torch
from datasets import Dataset
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import get_device_name
from torch import Tensor
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from st_cached_extras.cards import describe_dataset
from st_cached_extras.cards.model_card import is_local
from st_cached_extras.data import decode_videos, moving_shapes
from st_cached_extras.objectives.mmd import NystromReference
from st_cached_extras.objectives.mmd.segments import pool_segments


@dataclass
class ScriptArguments:
    """What is summed up, by which encoders, and how."""

    encoders: list[str] = field(metadata={"help": "Hub ids, with @revision or without, or paths."})
    dataset: str | None = field(default=None, metadata={"help": "Hub id or local path. Default: moving shapes."})
    dataset_config: str | None = field(default=None, metadata={"help": "Name of the dataset's configuration."})
    split: str = field(default="train", metadata={"help": "Split to sum up."})
    column: str = field(default="caption", metadata={"help": "Column of texts or videos."})
    max_rows: int | None = field(default=None, metadata={"help": "Sum up the first so many rows only."})
    num_frames: int = field(default=8, metadata={"help": "Frames per clip, evenly spaced."})
    token_segments: int = field(default=0, metadata={"help": "Of texts: means of so many parts of the tokens."})
    landmarks: int = field(default=1024, metadata={"help": "Landmarks per reference."})
    kernel: str = field(default="gaussian", metadata={"help": "gaussian, laplace, rational_quadratic or energy."})
    scales: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0], metadata={"help": "Bandwidths, in medians."})
    layout: str = field(default="flatten", metadata={"help": "Of several vectors a row: flatten, per_token or mean."})
    jitter: float = field(default=1e-6, metadata={"help": "Added to the diagonal of the landmarks' kernel matrix."})
    seed: int = field(default=0, metadata={"help": "Of the landmarks."})
    batch_size: int = field(default=64, metadata={"help": "Rows that an encoder sees at once."})
    part_rows: int = field(default=4096, metadata={"help": "Rows per part: what an interruption can cost."})
    keep_features: bool = field(
        default=False, metadata={"help": "Keep the features of all rows beside the reference."}
    )
    output_dir: str = field(default="output/references", metadata={"help": "Where the references go."})


def main() -> None:
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    rows = load_rows(script)
    output_dir = Path(script.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in script.encoders:
        path = output_dir / f"{file_name(name)}.safetensors"
        request = request_for(name, rows, script)
        if path.exists():
            if NystromReference.load(path).identity.get("request") != request:
                raise ValueError(
                    f"{path} was made with other arguments or of other data. Give another --output_dir, or remove it."
                )
            print(f"there already  {path}")
            continue

        # Features, part by part
        features = Parts(output_dir / f"{file_name(name)}.features", len(rows), script.part_rows)
        features.begin(request)
        if features.missing():
            load = load_text_encoder if isinstance(rows[0]["input"], str) else load_clip_encoder
            features.fill(load(name, script), rows, name)

        # Reference
        reference = NystromReference.fit(
            features,
            landmarks=script.landmarks,
            kernel=script.kernel,
            scales=script.scales,
            layout=script.layout,
            jitter=script.jitter,
            seed=script.seed,
            name=name,
            identity={
                "encoder": name,
                "encoder_revision": cached_revision(name),
                "dataset": script.dataset or "moving shapes",
                "data": describe_dataset(rows),
                "request": request,
            },
            show_progress_bar=True,
        )
        reference.save(path)
        if not script.keep_features:
            shutil.rmtree(features.folder)
        sigma = ", ".join(f"{x:.3g}" for x in reference.sigma[:4])
        print(f"reference      {path}  {len(rows):,} rows, sigma {sigma}")


def load_rows(script: ScriptArguments) -> Dataset:
    """One column, "input": texts, or clips that are decoded on access."""
    if script.dataset is None:
        rows = moving_shapes(script.split, script.max_rows)
    elif (Path(script.dataset) / "state.json").is_file() or (Path(script.dataset) / "dataset_dict.json").is_file():
        rows = datasets.load_from_disk(script.dataset)
        rows = rows[script.split] if isinstance(rows, dict) else rows
    else:
        rows = datasets.load_dataset(script.dataset, script.dataset_config, split=script.split)
    if script.column not in rows.column_names:
        raise ValueError(f"--column is {script.column!r}, but the columns are {rows.column_names}.")
    rows = rows.select_columns([script.column]).rename_column(script.column, "input")
    rows = rows.select(range(min(len(rows), script.max_rows or len(rows))))
    is_video = isinstance(rows.features["input"], datasets.Video)
    return decode_videos(rows, "input", script.num_frames) if is_video else rows


Embed = Callable[[list], Tensor]


def load_text_encoder(name: str, script: ScriptArguments) -> Embed:
    """Texts → [n, D], or [n, segments, D] of their tokens."""
    name, _, revision = name.partition("@")
    model = SentenceTransformer(name, revision=revision or None).eval()
    options = {"batch_size": script.batch_size, "show_progress_bar": False}

    def embed(texts: list[str]) -> Tensor:
        if not script.token_segments:
            return model.encode(texts, convert_to_tensor=True, **options)
        of_texts = model.encode(texts, output_value="token_embeddings", **options)
        active = [torch.ones(1, len(x), device=x.device) for x in of_texts]
        parts = zip(of_texts, active, strict=True)
        return torch.cat([pool_segments(x[None], mask, script.token_segments) for x, mask in parts])

    return embed


def load_clip_encoder(name: str, script: ScriptArguments) -> Embed:
    """Clips, uint8 [T, H, W, 3] each → [n, N, D]."""
    from st_cached_extras.encoders import load_encoder

    name, _, revision = name.partition("@")
    encoder = load_encoder(name, revision=revision or None)
    device = get_device_name()
    encoder.to(device)

    @torch.no_grad()
    def embed(clips: list) -> Tensor:
        features = []
        for begin in range(0, len(clips), script.batch_size):
            batch = torch.stack([torch.as_tensor(clip) for clip in clips[begin : begin + script.batch_size]])
            features.append(encoder(batch.to(device).movedim(-1, 2).float() / 255))
        return torch.cat(features)

    return embed


def request_for(name: str, rows: Dataset, script: ScriptArguments) -> str:
    """All that a reference depends on, as a text."""
    arguments = asdict(script)
    for argument in ("encoders", "batch_size", "part_rows", "keep_features", "output_dir"):
        del arguments[argument]
    return json.dumps({"encoder": name, "data": describe_dataset(rows), **arguments}, sort_keys=True)


def cached_revision(name: str) -> str:
    """The commit of an encoder from the Hub, as the local cache has it."""
    name, _, revision = name.partition("@")
    if is_local(name):
        return "local"
    config = try_to_load_from_cache(name, "config.json", revision=revision or None)
    return Path(config).parent.name if isinstance(config, str) else revision or "unknown"


def file_name(encoder: str) -> str:
    """The last parts of an encoder's name, as a file may be called."""
    return re.sub(r"[^\w.-]+", "--", "/".join(encoder.rstrip("/").split("/")[-2:]))


class Parts:
    """Features of a dataset in files of so many rows, each written whole or not at all."""

    def __init__(self, folder: Path, rows: int, part_rows: int) -> None:
        self.folder = folder
        self.bounds = [(begin, min(begin + part_rows, rows)) for begin in range(0, rows, part_rows)]

    def begin(self, request: str) -> None:
        """Go on with the parts of an interrupted run, if they are of the same request."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "request.json"
        if path.exists() and path.read_text() != request:
            raise ValueError(
                f"{self.folder} holds features of other arguments or other data. Give another --output_dir, or "
                "remove the folder."
            )
        path.write_text(request)

    def missing(self) -> list[int]:
        return [index for index in range(len(self.bounds)) if not self._path(index).exists()]

    def fill(self, embed: Embed, rows: Dataset, name: str) -> None:
        for index in tqdm(self.missing(), desc=f"Embed with {name}"):
            features = embed(rows[slice(*self.bounds[index])]["input"]).float().cpu().contiguous()
            unfinished = self._path(index).with_suffix(".unfinished")
            save_file({"features": features}, unfinished)
            os.replace(unfinished, self._path(index))

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self.bounds)):
            yield load_file(self._path(index))["features"]

    def __len__(self) -> int:
        return len(self.bounds)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.safetensors"


if __name__ == "__main__":
    main()
