"""What frozen encoders see of a clip of moving shapes, before anything is trained against them.

    python -m tests.benchmarks.encoder_probe

Per encoder, from held-out real clips: how often each word of the caption is read off the features by a ridge
regression and by three nearest neighbours. A generator cannot be taught by an encoder what the encoder does not
tell apart. `--tower PATH` adds a model of `train_video_embedder.py`, or the tower that `train_video_generator.py`
leaves in its folder.
"""

from __future__ import annotations

import argparse

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional as F

from st_cached_extras.data import moving_shapes
from st_cached_extras.data.moving_shapes import COLOURS, DIRECTIONS, SHAPES, SIZES, SPEEDS
from st_cached_extras.encoders import Glimpse, Motion, PooledPixels, RandomConvolution3d, SentenceTransformerEncoder
from tests.benchmarks.measure import header, table

GROUPS = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "direction": DIRECTIONS, "speed": SPEEDS}


def load(split: str, count: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Clips in [0, 1], [N, T, 3, H, W], and the index of each caption's word by group, [N]."""
    data = moving_shapes(split, count, seed, show_progress_bar=False)
    clips = torch.stack([torch.from_numpy(row["video"]).movedim(-1, 1) for row in data]).float() / 255
    said = [caption.split() for caption in data["caption"]]
    labels = {
        name: torch.tensor([next(i for i, word in enumerate(group) if word in words) for words in said])
        for name, group in GROUPS.items()
    }
    return clips, labels


def accuracies(x: Tensor, y: Tensor, labels: Tensor, held_out_labels: Tensor) -> tuple[float, float]:
    """Of ridge regression and of three nearest neighbours, from features x [n, D] to those of held-out y [m, D]."""
    mean = x.mean(dim=0)
    x, y = (x - mean).double(), (y - mean).double()
    nearest = labels[torch.cdist(y, x).topk(3, largest=False).indices].mode(dim=1).values
    x, y = (F.pad(z / x.std(), (0, 1), value=1.0) for z in (x, y))
    weight = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(x.shape[1]), x.T @ F.one_hot(labels).double())
    found = ((y @ weight).argmax(dim=1), nearest)
    return tuple(float((one == held_out_labels).double().mean()) for one in found)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=1024)
    parser.add_argument("--held_out_clips", type=int, default=256)
    parser.add_argument("--tower", default=None)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(header())
    encoders = {
        "convolution": RandomConvolution3d(),
        "glimpse": Glimpse(),
        "motion": Motion(),
        "pixels": PooledPixels(),
        "colours": PooledPixels(rows=1, columns=1),
    }
    if arguments.tower:
        encoders["tower"] = SentenceTransformerEncoder(SentenceTransformer(arguments.tower, device="cpu"))
    train, labels = load("train", arguments.clips, arguments.seed)
    held_out, held_out_labels = load("test", arguments.held_out_clips, arguments.seed)
    rows = []
    for name, encoder in encoders.items():
        x, y = (torch.cat([encoder(part) for part in clips.split(64)]).flatten(1) for clips in (train, held_out))
        cells = [accuracies(x, y, labels[group], held_out_labels[group]) for group in GROUPS]
        rows.append([name, *(f"{ridge:.2f} / {nearest:.2f}" for ridge, nearest in cells)])
    chance = [f"{1 / len(words):.2f}" for words in GROUPS.values()]
    print(table(["ridge / 3 neighbours", *GROUPS], [*rows, ["chance", *chance]]))


if __name__ == "__main__":
    main()
