"""Runs training scripts under an engine on the CPU, and checks the class that wraps their models.

    accelerate launch --config_file training_scripts/configs/fsdp2.yaml tests/training_scripts/launched.py fsdp2 \\
        training_scripts/train_video_embedder.py ARGUMENTS... -- training_scripts/train_video_generator.py ARGUMENTS...

What a launcher asks for by environment variables and arguments, Accelerate grants on accelerators alone: see
:mod:`st_cached_extras.testing.engines`.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from st_cached_extras.testing.engines import check_wrapped, deepspeed_on_cpu, forget_engine, fsdp2_on_cpu


def run_script(engine: str, script: Path, *arguments: str) -> None:
    """Run it to its end, as its command line would.

    Args:
        engine: one of :data:`~st_cached_extras.testing.engines.ENGINES`.
        script: of training_scripts.
        arguments: of its command line.
    """
    torch.set_num_threads(1)
    launcher = dict(os.environ)
    forget_engine()
    os.environ.update(launcher)
    if engine.startswith("zero"):
        deepspeed_on_cpu()
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    prepare, prepared = Accelerator.prepare, []

    def noting(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs)
        prepared.extend(
            x for x in (result if isinstance(result, tuple | list) else (result,)) if isinstance(x, nn.Module)
        )
        return result

    Accelerator.prepare = noting
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    try:
        with fsdp2_on_cpu():
            runpy.run_path(str(script), run_name="__main__")
    finally:
        Accelerator.prepare, sys.argv, sys.path[:] = prepare, argv, path
    check_wrapped(prepared[-1], engine)
    print(f"{script.name}: wrapped by {engine}", flush=True)


if __name__ == "__main__":
    _, engine, *commands = sys.argv
    for is_end, command in itertools.groupby(commands, "--".__eq__):
        if not is_end:
            script, *arguments = command
            run_script(engine, Path(script), *arguments)
