"""Runs a training script on the CPU, and keeps what each rank's model began and ended with.

    accelerate launch ... tests/training_scripts/weights_of_ranks.py FOLDER training_scripts/SCRIPT.py ARGUMENTS...

writes FOLDER/start-RANK.safetensors and FOLDER/end-RANK.safetensors, the parameters of the model that Accelerate
wrapped.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn


def main(folder: Path, script: Path, *arguments: str) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    prepare, models = Accelerator.prepare, []

    def save(time: str) -> None:
        [model] = models
        weights = {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}
        save_file(weights, folder / f"{time}-{os.environ['RANK']}.safetensors")

    def noting(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(accelerator, *args, **kwargs)
        models.extend(x for x in prepared if isinstance(x, nn.Module))
        save("start")
        return prepared

    Accelerator.prepare = noting
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    runpy.run_path(str(script), run_name="__main__")
    save("end")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), *sys.argv[3:])
