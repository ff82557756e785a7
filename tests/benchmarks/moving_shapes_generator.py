"""How close the recipe's generator comes to real clips of moving shapes, over seeds.

    python -m tests.benchmarks.moving_shapes_generator --seeds 3

runs `training_scripts/train_video_generator.py` with its defaults, once per seed, and reads the scores that it leaves.
"Excess" is what is left of each encoder's MMD² above its floor, which real clips score, as a share of what there was
before training. Arguments that are not known here are handed to the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.measure import header, table

SCRIPT = Path(__file__).parents[2] / "training_scripts" / "train_video_generator.py"


def run(seed: int, folder: Path, options: list[str]) -> dict[str, float]:
    """Figures of one run."""
    command = [sys.executable, str(SCRIPT), "--seed", str(seed), "--output_dir", str(folder), *options]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    whole = time.perf_counter() - began
    found = json.loads((folder / "final" / "scores.json").read_text())
    figures = {}
    for row in found["scores"]:
        measure = row["Measure"]
        if measure.startswith("MMD²"):
            figures[f"excess, {measure.removeprefix('MMD² x 1000, ')}"] = (row["After"] - row["Real clips"]) / (
                row["Before"] - row["Real clips"]
            )
        elif measure.startswith("sliced"):
            figures["sliced Wasserstein, after / before"] = row["After"] / row["Before"]
            figures["sliced Wasserstein, real / before"] = row["Real clips"] / row["Before"]
        else:
            figures[measure] = row["After"]
            if row["Real clips"] != "":
                figures[f"{measure}, off real clips"] = row["Real clips"]
    return {**figures, "seconds of training": found["seconds"], "seconds in all": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=None, help="folder that keeps the runs")
    arguments, options = parser.parse_known_args()
    print(header())
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        results = [run(seed, folder / f"seed{seed}", options) for seed in range(arguments.seeds)]
    rows = []
    for name in results[0]:
        values = [result[name] for result in results]
        digits = 0 if name.startswith("seconds") else 3
        rows.append([name, *(f"{value:.{digits}f}" for value in values)])
    print(table(["", *(f"seed {seed}" for seed in range(arguments.seeds))], rows))


if __name__ == "__main__":
    main()
