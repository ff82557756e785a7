"""Arguments come from the command line and a file, by the same rules, and mistakes are told in one line."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from st_cached_extras.data import DataError
from st_cached_extras.recipes.arguments import (
    DataArguments,
    LoraArguments,
    LossArguments,
    MediaArguments,
    RecipeTrainingArguments,
    one_for_each,
    parse_arguments,
)
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.run import run


@dataclass
class Script(DataArguments, MediaArguments, LossArguments, LoraArguments):
    """All parts together."""


def parse(*argv: str) -> tuple[Script, RecipeTrainingArguments]:
    return parse_arguments((Script, RecipeTrainingArguments), argv)


def test_a_file_gives_arguments_and_the_command_line_wins(tmp_path):
    lines = [
        "dataset: [a/b, c.parquet]",
        "loss: infonce",
        "learning_rate: 2e-5",  # a string to YAML
        "num_train_epochs: 3",
        "eval_on_start: false",
        "streaming: true",
        "train_clips: 7",
        "router_mapping: {caption: query, video: document}",
        "eval_split: null",
    ]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    script, args = parse("--num_train_epochs", "1", "--config", str(tmp_path / "run.yaml"), "--lora_rank", "4")
    assert script.dataset == ["a/b", "c.parquet"] and script.loss == ["infonce"] and script.streaming
    assert script.train_rows == 7 and script.eval_split is None and script.lora_rank == 4
    assert args.learning_rate == 2e-5 and args.num_train_epochs == 1 and args.eval_on_start is False
    assert args.router_mapping == {"caption": "query", "video": "document"}


@pytest.mark.parametrize(
    "content, message",
    [
        ("learning_rate: [1", "cannot be read"),
        ("- learning_rate", "must hold lines of 'argument: value'.*got list"),
        ("just words", "got str"),
        ("lerning_rate: 1", "no argument --lerning_rate. Did you mean --learning_rate?"),
        ("learning_rate: fast", "--learning_rate.*invalid float value: 'fast'"),
        ("broken: maybe", "--broken.*invalid choice"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_reason(content, message, tmp_path):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(UsageError, match=message):
        parse("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--config", "nowhere.yaml"], r"'nowhere\.yaml' cannot be read: .*No such file"),
        (["--config"], "expected one argument"),
        (["--zzz", "1"], "no argument --zzz. --help lists them all"),
        (["--batch_sampler", "best"], "best is not a valid BatchSamplers"),
        (["--eval_strategy", "steps", "--save_strategy", "epoch", "--load_best_model_at_end", "true"], "to match"),
        (["--mini_batch_size", "many"], "invalid int value"),
    ],
)
def test_a_wrong_argument_is_told_by_name(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(*argv)


def test_the_losses_list_themselves(capsys):
    with pytest.raises(SystemExit) as done:
        parse("--loss", "list")
    printed = capsys.readouterr().out
    assert not done.value.code
    assert all(name in printed for name in ("infonce", "sigmoid", "supcon", "mmd", "CoSENTLoss", "TripletLoss"))


def test_help_says_all(capsys):
    with pytest.raises(SystemExit) as done:
        parse("--help")
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert all(
        f"--{name}" in printed for name in ("config", "dataset", "loss", "lora_rank", "report_to", "max_broken")
    )


def test_one_value_serves_all_datasets_or_there_is_one_for_each():
    assert one_for_each(["a"], 3, "--x") == ["a", "a", "a"]
    assert one_for_each(["a", "b"], 2, "--x") == ["a", "b"]
    with pytest.raises(UsageError, match=r"--x has 2 values for 3 dataset\(s\)"):
        one_for_each(["a", "b"], 3, "--x")


@pytest.mark.parametrize("kind", [UsageError, DataError])
def test_a_mistake_ends_a_recipe_with_one_line_and_the_code_2(kind, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/train.py"])

    def main():
        raise kind("--x is wrong:\n  it is 3.")

    with pytest.raises(SystemExit) as done:
        run(main)
    assert done.value.code == 2
    assert capsys.readouterr() == ("", "train.py: --x is wrong: it is 3.\n")


def test_a_mistake_found_by_a_worker_is_told_as_the_worker_told_it(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    message = (
        "Caught DataError in DataLoader worker process 0.\nOriginal Traceback:\n  File x\na.b.DataError: clip: bad\n"
    )

    def main():
        raise DataError(message)

    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "train.py: clip: bad\n"


def test_an_error_of_the_recipe_itself_keeps_its_traceback():
    def main():
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        run(main)
