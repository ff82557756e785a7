"""How the benchmarks time and weigh: sides in turn within one run, medians, and memory in fresh processes."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch

MIB = 2**20


def restart_with_sleeping_threads() -> None:
    """Restart this command with OpenMP threads that sleep while they wait, so that waiting is not CPU time."""
    if os.environ.get("OMP_WAIT_POLICY") != "passive":
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def header() -> str:
    """Machine, versions and command."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "sentence-transformers", "transformers"))
    return (
        f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s); "
        f"Python {platform.python_version()}, {versions}\n{' '.join(['python', *sys.orig_argv[1:]])}\n"
    )


def time_in_turn(
    sides: dict[str, Callable[[], object]], repeats: int, warm_ups: int = 1
) -> dict[str, tuple[float, float]]:
    """Median CPU-seconds of the process and median wall seconds of each side, after calls that are not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repeat in range(repeats + warm_ups):
        for name, side in sides.items():
            cpu, wall = time.process_time(), time.perf_counter()
            side()
            if repeat >= warm_ups:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {name: tuple(map(statistics.median, zip(*of_side, strict=True))) for name, of_side in times.items()}


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return _status("VmRSS")


def peak_resident() -> int:
    """Most bytes that this process has held since :func:`reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Forget the peak. (``getrusage`` would keep it, and pass it on to children.)"""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
