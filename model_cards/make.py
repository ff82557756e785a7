"""Makes the cards in this folder: runs recipes as their cards say, and keeps what they wrote beside the weights.

    python model_cards/make.py                  # all of them
    python model_cards/make.py video-embedder

The text embedder wants WordNet as a file of the columns term and definition; the others need no download. Cards and
figures are copied as they are, byte for byte; the weights stay in output/.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = {
    "text-embedder": "training_scripts/train_text_embedder.py --dataset wordnet_glosses.parquet "
    "--columns term,definition --eval_rows 500 --per_device_train_batch_size 256 --mini_batch_size 64 --max_steps 70 "
    "--learning_rate 5e-4 --seed 0 --output_dir output/text-embedder",
    "video-embedder": "training_scripts/train_video_embedder.py --train_rows 768 --num_train_epochs 6 "
    "--output_dir output/video-embedder",
    "distilled-embedder": "training_scripts/distil_embedder.py --train_pairs 1500 --eval_pairs 200 "
    "--output_dir output/distilled-embedder",
    "video-generator": "training_scripts/train_video_generator.py --output_dir output/video-generator",
}
"""By card, the command line that its recipe is run with, without the interpreter."""
KEPT = ("README.md", "*.png", "assets/*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECIPES)}; default: all")
    names = parser.parse_args().names or list(RECIPES)
    if unknown := set(names) - set(RECIPES):
        parser.error(f"there are no cards {sorted(unknown)}; they are {list(RECIPES)}.")
    for name in names:
        command = RECIPES[name].split()
        subprocess.run([sys.executable, *command], cwd=HERE.parent, check=True)
        keep(HERE.parent / command[-1] / "final", HERE / name)


def keep(model: Path, folder: Path) -> None:
    """Copy the card of a model and what it shows."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in sorted(file for pattern in KEPT for file in model.glob(pattern)):
        target = folder / file.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        print(f"kept  {target.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
