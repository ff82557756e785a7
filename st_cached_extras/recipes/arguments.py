"""Arguments of the recipes: one dataclass per script, made of the parts here, beside the Trainer's own.

Every argument can be given on the command line, or in a YAML file (``--config``) by the same names; the command line
comes second and wins.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import HfArgumentParser

from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.losses import describe_losses
from st_cached_extras.recipes.run import one_line


@dataclass
class DataArguments:
    """Where the data come from."""

    dataset: list[str] | None = field(
        default=None,
        metadata={
            "help": "Hub ids, folders (of clips or images with metadata.csv or .jsonl, of parquet files, or saved by "
            "save_to_disk) or files (parquet, csv, json, jsonl). Default: data that need no download."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the Hub."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(
        default=None, metadata={"help": "Split to evaluate on. Default: a tenth of the training split, held out."}
    )
    train_rows: int | None = field(
        default=None,
        metadata={"help": "Train on the first so many rows only.", "aliases": ["--train_clips", "--train_pairs"]},
    )
    eval_rows: int | None = field(
        default=None,
        metadata={"help": "Evaluate on so many rows only.", "aliases": ["--eval_clips", "--eval_pairs"]},
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read the dataset while training; needs --max_steps, and shuffles nothing."}
    )


@dataclass
class MediaArguments:
    """What happens with clips or images that cannot be read."""

    broken: Literal["error", "skip"] = field(
        default="error", metadata={"help": "What to do about missing and corrupt files: error, or skip and count."}
    )
    max_broken: float = field(
        default=0.1, metadata={"help": "How many may be skipped: a number, or below 1 a share of the rows."}
    )
    check_files: bool = field(
        default=True, metadata={"help": "Decode every file once before training, so that a broken one costs no run."}
    )


@dataclass
class LossArguments:
    """The loss, and how it is cached."""

    loss: list[str] = field(
        default_factory=lambda: ["infonce"],
        metadata={"help": "Name of the loss, or one for each dataset; 'list' prints those there are."},
    )
    loss_options: list[str] | None = field(
        default=None,
        metadata={"help": "Its arguments as JSON, or as many for each loss, such as '{\"scale\": 30}'."},
    )
    mini_batch_size: int = field(default=32, metadata={"help": "Rows that are in memory at once."})
    mini_batch_num_tokens: int | None = field(
        default=None, metadata={"help": "Fill mini-batches up to so many tokens instead (rows x longest row)."}
    )
    kept_graphs: float = field(default=0.0, metadata={"help": "Share of the mini-batches that is not embedded twice."})
    differentiated_samples: float | None = field(
        default=None, metadata={"help": "Rows that are embedded twice: a number, or below 1 a share. Default: all."}
    )
    gather_across_devices: bool = field(default=False, metadata={"help": "One loss over the rows of all devices."})
    matryoshka_dims: list[int] | None = field(
        default=None, metadata={"help": "Also train the first so many dimensions, for each of these numbers."}
    )


@dataclass
class LoraArguments:
    """Low-rank adapters in place of full training."""

    lora_rank: int | None = field(default=None, metadata={"help": "Train adapters of this rank, and nothing else."})
    lora_alpha: float | None = field(default=None, metadata={"help": "Their scale. Default: twice the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout in front of them."})
    lora_modules: list[str] | None = field(
        default=None, metadata={"help": "Names of the layers that get one. Default: every linear layer."}
    )


@dataclass
class RecipeTrainingArguments(SentenceTransformerTrainingArguments):
    """The Trainer's arguments, with the defaults that all recipes share."""

    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate. Default: what suits the model."}
    )
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})
    batch_sampler: str = field(default="no_duplicates", metadata={"help": "no_duplicates: no text twice a batch."})
    eval_on_start: bool = field(default=True, metadata={"help": "Score the model before training, too."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})
    save_strategy: str = field(default="no", metadata={"help": "When to write checkpoints: no, steps or epoch."})
    report_to: str = field(default="none", metadata={"help": "Where else to log: tensorboard, trackio, wandb, ..."})
    hub_private_repo: bool = field(default=True, metadata={"help": "Whether --push_to_hub makes a private model."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Folder of a checkpoint, or 'last': the last one in --output_dir."}
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Stop after so many evaluations without a better score, and keep the best model."},
    )


def parse_arguments(classes: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Instances of dataclasses from the command line and the file that ``--config`` names.

    Args:
        classes: the dataclasses, each field an argument.
        argv: the command line without the script; None for that of this process.

    Raises:
        UsageError: an unknown argument, a value that it cannot have, or a file that cannot be read.
        SystemExit: ``--help``, or a loss called 'list', after printing what was asked for.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    before = _Parser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    known, argv = before.parse_known_args(argv)
    parser = _Parser(classes, allow_abbrev=False)
    parser.add_argument("--config", help="A YAML file of arguments; those on the command line win.")
    given = [*([] if known.config is None else _from_yaml(known.config)), *argv]
    try:
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            given, return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, TypeError, ImportError) as error:  # the Trainer's arguments check themselves
        raise UsageError(one_line(error)) from error
    if unknown:
        raise UsageError(_unknown(unknown, classes))
    for arguments in parsed:
        if "list" in (getattr(arguments, "loss", None) or []):
            print(describe_losses())
            raise SystemExit(0)
    return tuple(parsed)


class _Parser(HfArgumentParser):
    """Tells mistakes by an exception, not by a page of usage."""

    def error(self, message: str) -> None:
        raise UsageError(message)


def _from_yaml(path: str) -> list[str]:
    """A file of arguments as a command line, so that both are checked by the same rules."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path!r} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(
            f"--config {path!r} must hold lines of 'argument: value', such as 'learning_rate: 2e-5', "
            f"got {type(content).__name__}."
        )
    argv: list[str] = []
    for key, value in content.items():
        if value is None:
            continue  # the default
        values = value if isinstance(value, list) else [value]
        argv += [f"--{key}", *(json.dumps(v) if isinstance(v, dict | bool) else str(v) for v in values)]
    return argv


def _unknown(unknown: Sequence[str], classes: Sequence[type]) -> str:
    name = next((argument for argument in unknown if argument.startswith("--")), unknown[0])
    close = difflib.get_close_matches(
        name.lstrip("-").split("=")[0], [known.name for cls in classes for known in fields(cls)], 1
    )
    return f"There is no argument {name}. " + (f"Did you mean --{close[0]}?" if close else "--help lists them all.")


def one_for_each(values: Sequence[Any], count: int, argument: str) -> list[Any]:
    """One value for each of ``count`` datasets: as they are, or the only one for all.

    Raises:
        UsageError: neither one nor as many as datasets.
    """
    if len(values) not in (1, count):
        raise UsageError(f"{argument} has {len(values)} values for {count} dataset(s): give one, or one for each.")
    return list(values) * (count if len(values) == 1 else 1)
