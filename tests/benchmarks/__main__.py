"""Runs benchmarks, and writes their tables and figures.

    python -m tests.benchmarks                            # every one, each command in a process of its own: hours
    python -m tests.benchmarks step loss_stage memory     # only these
    python -m tests.benchmarks --quick                    # miniatures, to see that they run: figures mean nothing

For every benchmark NAME, the output folder gets NAME.md with what its commands print, NAME.json with the same as data,
and NAME.png where there is something to draw. Any command can be run by itself, as it stands at the top of its table.
The trainings of zbp are kept run by run in zbp_optical.json and zbp_int8.json there, and those that these files have
are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.report import read_report

WORDNET = Path("/usr/share/wordnet")


@dataclass(frozen=True)
class Benchmark:
    """A module of this folder that is a command.

    Attributes:
        full: arguments of its commands, in their order; {output} stands for the output folder.
        quick: arguments of a miniature of it; None if it has none.
        reads_texts: whether it takes the arguments that say where texts come from.
    """

    full: tuple[str, ...] = ("",)
    quick: str | None = None
    reads_texts: bool = False


SETTINGS = {
    "step": Benchmark(
        (
            "--batch_size 2048 --repeats 3 --sides ours 'ST cached 32'",
            "--batch_size 512 --plain --kept_graphs .5",
            "--batch_size 256 --plain --equal_lengths --kept_graphs .5 .75 1",
            "--batch_size 64 --mini_batch_sizes 8 --video",
        ),
        "--batch_size 12 --mini_batch_sizes 4 --layers 1 --repeats 1 --plain",
        reads_texts=True,
    ),
    "scaling": Benchmark(("",), "--batch_sizes 8 --mini_batch_sizes 4 --layers 1", reads_texts=True),
    "levers": Benchmark(
        (
            "--batch_size 2048 --repeats 2",
            "--batch_size 128 --mini_batch_size 8 --vocabulary_size 150000 --by_rows "
            "--levers 'word-embedding gradients by rows'",
            "--table directions --batch_size 4096",
        ),
        "--batch_size 12 --mini_batch_size 4 --layers 1 --repeats 1 --warm_ups 0",
        reads_texts=True,
    ),
    "profile_step": Benchmark(("",), "--batch_size 12 --mini_batch_size 4 --layers 1", reads_texts=True),
    "loss_stage": Benchmark(
        ("--batch_sizes 1024 4096 16384", "--batch_sizes 65536 --tables blocks"),
        "--batch_sizes 64 --repeats 1 --tables time blocks",
    ),
    "losses": Benchmark(("",), "--batch_size 64 --repeats 1"),
    "memory": Benchmark(
        ("--batch_sizes 512 8192", "--batch_sizes 1024 65536 --layers 1 --hidden 64"),
        "--batch_sizes 8 16 --mini_batch_size 4 --layers 1",
        reads_texts=True,
    ),
    "plan": Benchmark(
        ("--batch_size 65536",), "--batch_size 64 --step_rows 8 --layers 1 --repeats 1", reads_texts=True
    ),
    "compiled": Benchmark(
        ("",),
        "--batch_size 8 --mini_batch_size 4 --layers 1 --repeats 1 --backend aot_eager",
        reads_texts=True,
    ),
    "selection": Benchmark(
        ("", "--layers 1 --seconds 25 --draws 3"),
        "--batch_size 16 --mini_batch_size 4 --layers 1 --draws 1 --sampled_rows 4 --seeds 0 --held_out 16 "
        "--repeats 1",
        reads_texts=True,
    ),
    "mmd": Benchmark(("",), "--batch_sizes 64 --dims 8 --landmarks 16 --repeats 1 --tables time"),
    "mmd_companion": Benchmark(
        ("",), "--paired 8 --unpaired 32 --held_out 16 --seeds 0 --steps 2 --batch_size 16", reads_texts=True
    ),
    "spiral": Benchmark(("",), "--steps 20 --seeds 1 --real 200 --landmarks 16"),
    "staged_memory": Benchmark(("--batch_sizes 32 64",), "--batch_sizes 8"),
    "engines": Benchmark(("",), "--engines ddp --families infonce"),
    "zbp": Benchmark(
        (
            "optical --probes 64 --results {output}/zbp_optical.json",
            "equal_time --results {output}/zbp_optical.json",
            "int8 --batch_size 32 --learning_rate 2e-4 --held_out 1500 --probes 4 --results {output}/zbp_int8.json",
            "control --steps 20",
            "quality --batch_size 64",
            "cost",
            "memory",
        ),
        "cost --repeats 1",
        reads_texts=True,
    ),
    "zbp_modes": Benchmark(("",), "--steps 2 --every 1 --batch_size 8 --seeds 0 --modes cd"),
    "moving_shapes_generator": Benchmark(
        ("",),
        "--seeds 1 --clips 48 --held_out_clips 32 --steps 2 --batch_size 16 --differentiated 8 --mini_batch_size 4 "
        "--landmarks 32 --tower_steps 1 --judge_steps 2 --eval_steps 2 --warmup_steps 1",
    ),
    "data_loading": Benchmark(("",), "--clips 32 --batch 8 --mini_batch 4 --steps 2 --workers 0"),
    "encoder_probe": Benchmark(("",), "--clips 32 --held_out_clips 16"),
}


FOLDER = Path(__file__).parent
COMMANDS = {file.stem for file in FOLDER.glob("*.py") if "\ndef main(" in file.read_text()} - {"__main__"}
BENCHMARKS = {**SETTINGS, **{name: Benchmark() for name in sorted(COMMANDS - set(SETTINGS))}}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("output/benchmarks"))
    parser.add_argument(
        "--texts",
        default=f"--wordnet {WORDNET}" if WORDNET.exists() else "",
        help="arguments that say where texts come from; default: WordNet if it is installed, else docstrings",
    )
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return arguments


def commands(benchmark: Benchmark, arguments: argparse.Namespace) -> list[list[str]]:
    """The words of each of its commands."""
    texts = "--synthetic" if arguments.quick else arguments.texts
    output = shlex.quote(str(arguments.output))
    return [
        shlex.split(f"{options.format(output=output)} {texts if benchmark.reads_texts else ''}")
        for options in ([benchmark.quick] if arguments.quick else benchmark.full)
    ]


def run_in_process(name: str, arguments: list[str]) -> str:
    """What the benchmark prints; for miniatures, which would spend most of their time on imports."""
    module = f"tests.benchmarks.{name}"
    before = sys.argv, sys.orig_argv, os.environ.get("OMP_WAIT_POLICY")
    sys.argv, sys.orig_argv = [module, *arguments], [sys.executable, "-m", module, *arguments]
    os.environ["OMP_WAIT_POLICY"] = "passive"  # else it would restart this very process
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv, sys.orig_argv = before[:2]
        del os.environ["OMP_WAIT_POLICY"]
        if before[2] is not None:
            os.environ["OMP_WAIT_POLICY"] = before[2]
    return printed.getvalue()


def run_by_itself(name: str, arguments: list[str]) -> str:
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(argv: list[str] | None = None) -> None:
    from tests.benchmarks.figures import draw  # matplotlib, which no benchmark needs

    arguments = parse_arguments(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        if arguments.quick and benchmark.quick is None:
            print(f"{name} has no miniature", file=sys.stderr)
            continue
        printed = []
        for words in commands(benchmark, arguments):
            print(f"{name} {' '.join(words)}", file=sys.stderr, flush=True)
            printed.append((run_in_process if arguments.quick else run_by_itself)(name, words))
            write(arguments.output / f"{name}.md", "\n".join(printed))
        reports = [read_report(text) for text in printed]
        write(arguments.output / f"{name}.json", json.dumps(reports, indent=1, ensure_ascii=False) + "\n")
        draw(name, reports, arguments.output / f"{name}.png")


def write(file: Path, text: str) -> None:
    """The whole file or none of it."""
    partial = file.with_suffix(f"{file.suffix}.partial")
    partial.write_text(text)
    partial.replace(file)


if __name__ == "__main__":
    main()
