"""Peak memory of one training step of a video generator: a backward through everything, and staged replay.

    python -m tests.benchmarks.staged_memory --batch_sizes 32 128

A convolutional generator, a decoder to clips of 8 x 56 x 56 pixels and two frozen encoders (a VideoMAE on clips, a
DINOv2 on their frames; small ones, with random weights) are matched to a reference. Every figure is the growth of the
peak over one step, in a process of its own that gives freed memory back at once. The sides differ in how they come by
the same gradient: one backward through the whole batch; one backward through each mini-batch of the replay; and staged
replay, where one mini-batch of one stage has a graph, with all rows differentiated and with a quarter of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, VideoMAEConfig, VideoMAEModel

from st_cached_extras.encoders.frozen import FrameEncoder, VideoEncoder
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.replay import FeatureGradientReplay, Stage, Staged
from tests.benchmarks.measure import MIB, header, peak_resident, reset_peak, resident, table

SIDES = ("one backward", "a backward per mini-batch", "staged", "staged, b = B/4")
FRAMES, SIDE, NOISE = 8, 56, 32


def generator() -> nn.Module:
    """Noise [B, 32] → latents [B, 32, 14, 14]."""
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 49),
        nn.Unflatten(1, (64, 7, 7)),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(64, 32, 3, padding=1),
    )


def decoder() -> nn.Module:
    """Latents → clips [B, 8, 3, 56, 56] in [0, 1]."""
    return nn.Sequential(
        nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(48, 3 * FRAMES, 3, padding=1),
        nn.Sigmoid(),
        nn.Unflatten(1, (FRAMES, 3)),
    )


def encoders(mini_batch_size: int) -> dict[str, nn.Module]:
    size = {
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 14,
    }
    video = VideoMAEModel(VideoMAEConfig(**size, intermediate_size=768, num_frames=FRAMES))
    frames = Dinov2Model(Dinov2Config(**size))
    return {
        "videomae": VideoEncoder(video, input_name="pixel_values", mini_batch_size=mini_batch_size),
        "dinov2": FrameEncoder(frames, mini_batch_size=mini_batch_size),
    }


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Growth of the peak over one step in MiB, and its seconds."""
    torch.manual_seed(0)
    draw, decode, encode = generator(), decoder().requires_grad_(False), encoders(arguments.mini_batch_size)
    stages = Stage("generator", draw), Stage("decoder", decode), Stage("encoders", encode)
    staged = Staged(*stages)
    real = staged.collect(torch.randn(64, NOISE), replayed=False).features
    objective = MultiEncoderMMD({name: NystromReference.fit(x, landmarks=32, name=name) for name, x in real.items()})

    def end_to_end(noise: Tensor) -> dict[str, Tensor]:
        clips = decode(draw(noise))
        return {name: encoder(clips) for name, encoder in encode.items()}

    def step(batch_size: int) -> None:
        noise = torch.randn(batch_size, NOISE)
        if arguments.side == "one backward":
            loss, _ = objective(gradient_students=end_to_end(noise))
            loss.backward()
            return
        share = batch_size // 4 if arguments.side == "staged, b = B/4" else batch_size
        replay = FeatureGradientReplay(
            objective,
            target_local_samples=batch_size,
            differentiated_local_samples=share,
            selection="suffix",
        )
        parts = noise.split(min(arguments.mini_batch_size, share))
        first = (batch_size - share) // len(parts[0])
        passes = [staged.collect(part, replayed=index >= first) for index, part in enumerate(parts)]
        for one in passes:
            replay.add(one.features)
        replay.finalize()
        if arguments.side == "a backward per mini-batch":
            replay.replay(lambda index: end_to_end(parts[index]))
        else:
            replay.replay(lambda index: passes[index].replay())

    step(4)  # gradients and thread stacks are there whatever the batch
    reset_peak()
    before, began = resident(), time.perf_counter()
    step(arguments.of)
    return {"growth": (peak_resident() - before) / MIB, "seconds": time.perf_counter() - began}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--mini_batch_size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--of", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--side", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.of is not None:
        print(json.dumps(measure(arguments)))
        return
    print(header())
    rows = []
    for side in SIDES:
        cells = []
        for batch_size in arguments.batch_sizes:
            command = [sys.executable, "-m", "tests.benchmarks.staged_memory", *sys.argv[1:]]
            command += ["--of", str(batch_size), "--side", side]
            # The C library would keep what earlier steps have freed, and later ones would seem to need less.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            result = json.loads(output.splitlines()[-1])
            cells.append(f"{result['growth']:.0f} MiB, {result['seconds']:.1f} s")
        rows.append([side, *cells])
    print(table(["growth of the peak, time of the step", *(f"B={b}" for b in arguments.batch_sizes)], rows))


if __name__ == "__main__":
    main()
