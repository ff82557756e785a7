"""Draws clips with a generator of `train_video_generator.py`.

    python training_scripts/sample_video_generator.py --generator output/video-generator/final \\
        --captions "a large red circle moving left slowly" "a small cyan cross moving up quickly"

writes one mp4 per caption and sample, and a contact sheet of all of them, to the folder `--output_dir`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tiny_video_generator import TinyVideoGenerator
from transformers import HfArgumentParser

from st_cached_extras.cards import contact_sheet_figure
from st_cached_extras.data import write_mp4


@dataclass
class Arguments:
    generator: str = field(metadata={"help": "Folder or Hub id of a trained generator."})
    captions: list[str] = field(
        default_factory=lambda: ["a large red circle moving left slowly"], metadata={"help": "What to draw."}
    )
    samples: int = field(default=3, metadata={"help": "Clips per caption."})
    output_dir: str = field(default="output/samples", metadata={"help": "Where the clips go."})
    fps: float = field(default=8.0, metadata={"help": "Frames per second of the mp4 files."})
    enlarge: int = field(default=4, metadata={"help": "Pixels of the mp4 files per pixel drawn."})
    seed: int = field(default=0, metadata={"help": "Of the noise."})


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    generator = TinyVideoGenerator.from_pretrained(args.generator).eval()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    columns = {}
    for sample in range(args.samples):
        clips = generator.generate(args.captions, seed=args.seed + sample).numpy()
        columns[f"sample {sample}"] = clips
        for row, clip in enumerate(clips):
            large = np.repeat(np.repeat(clip, args.enlarge, axis=1), args.enlarge, axis=2)
            (folder / f"{row:02d}-{sample}.mp4").write_bytes(write_mp4(large, args.fps))
    figure = contact_sheet_figure(folder / "clips.png", args.captions, columns)
    print(f"{len(args.captions) * args.samples} clips in {folder}, and all of them on {figure}")


if __name__ == "__main__":
    main()
