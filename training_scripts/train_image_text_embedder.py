"""Trains a text-to-image retriever, and shows what it finds.

    python training_scripts/train_image_text_embedder.py

draws shapes, trains a tiny two-tower model on them in a minute or two on two CPU cores, and writes the model,
its card and a figure to output/image-retriever/final. Any captioned images and any model that sentence-transformers
loads go the same way, be it two towers (CLIP, SigLIP) or one vision-language model:

    python training_scripts/train_image_text_embedder.py --dataset my/images --text_column sentence \\
        --model openai/clip-vit-base-patch32 --loss symmetric \\
        --per_device_train_batch_size 4096 --mini_batch_size 64 --bf16 --dataloader_num_workers 8

The memory of a step goes with the mini-batch, and what the model learns with the batch: that is what the loss is for.
`accelerate launch --config_file training_scripts/configs/ddp.yaml` trains on several devices, `--config my.yaml` reads
arguments from a file, `--loss list` prints the losses, and `--help` every argument; docs/recipes.md explains them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # captions are short, and DataLoader workers fork

from datasets import Dataset
from tiny_image_tower import tiny_image_tower
from transformers import set_seed

from st_cached_extras import ReplaySentenceTransformerTrainer
from st_cached_extras.cards import ReplayModelCardData, command_line
from st_cached_extras.data.still_shapes import still_shapes
from st_cached_extras.evaluation import RetrievalEvaluator
from st_cached_extras.recipes.arguments import (
    DataArguments,
    LoraArguments,
    LossArguments,
    MediaArguments,
    RecipeTrainingArguments,
    parse_arguments,
)
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.finish import finish
from st_cached_extras.recipes.hub import take_push
from st_cached_extras.recipes.lora import add_lora
from st_cached_extras.recipes.models import load_model, router_mapping
from st_cached_extras.recipes.run import run
from st_cached_extras.recipes.splits import (
    columns_of,
    decode_images,
    load_splits,
    texts_of,
    with_media,
    without_broken,
)
from st_cached_extras.recipes.training import check_training, make_losses, stop_early


@dataclass
class ScriptArguments(DataArguments, MediaArguments, LossArguments, LoraArguments):
    """What the Trainer has no argument for."""

    model: str | None = field(default=None, metadata={"help": "Id or path of a model. Default: a tiny two-tower."})
    image_column: list[str] = field(
        default_factory=lambda: ["image"],
        metadata={"help": "Column of images of each dataset: Image, bytes or paths."},
    )
    text_column: list[str] = field(
        default_factory=lambda: ["caption"], metadata={"help": "Column of captions of each dataset."}
    )


@dataclass
class TrainingArguments(RecipeTrainingArguments):
    """The Trainer's arguments, with defaults for the default run."""

    output_dir: str = field(default="output/image-retriever", metadata={"help": "Where the model goes."})
    num_train_epochs: float = field(default=5, metadata={"help": "Passes over the training images."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Images that are contrasted at once."})
    warmup_steps: float = field(default=0.2, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})


def main() -> None:
    script, args = parse_arguments((ScriptArguments, TrainingArguments))
    push = take_push(args)
    resume = check_training(args, script, ("caption",))
    if script.model is None and script.lora_rank is not None:
        raise UsageError("--lora_rank needs --model: the default one has nothing yet that adapters could adapt.")
    set_seed(args.seed)

    # Data: a caption is the query (first column), its image the right answer (second).
    if script.dataset is None:
        train, evaluation = still_shapes_splits(script, args)
    else:
        train, evaluation = load_splits(script, lambda *rows: prepare(*rows, script), args.seed, held_out="caption")

    # Model
    card = ReplayModelCardData(
        model_name="Text-to-image retriever",
        summary="Finds images by a sentence that describes them.",
        task_name="text-to-image retrieval",
        command=command_line(),
        limits=limits(script),
    )
    if script.model is None:
        model = tiny_image_tower(texts_of(train, "caption"), model_card_data=card)
    else:
        model = load_model(script.model, takes="image", model_card_data=card)
    add_lora(model, script)
    args.router_mapping = args.router_mapping or router_mapping(model, "caption", train)
    if args.learning_rate is None:
        args.learning_rate = 1.5e-3 if script.model is None else 2e-4 if script.lora_rank else 2e-5

    # Loss: embeds everything mini-batch by mini-batch, and contrasts the whole batch.
    loss = make_losses(model, script, train)

    # Evaluators, which keep what they find before training, whenever --eval_strategy says, and after
    evaluators = [
        RetrievalEvaluator(rows, "caption", "image", name, script.mini_batch_size) for name, rows in evaluation.items()
    ]

    # Training. The Trainer evaluates, as it alone knows how where devices hold shards of the model.
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
    finish(trainer, card, evaluators, train=train, unit="images", push=push, sources=script.dataset)


def still_shapes_splits(script: ScriptArguments, args: TrainingArguments) -> tuple[Dataset, dict[str, Dataset]]:
    """The embedded data: new images of captions in training, and images of captions that are not."""
    splits = {"train": script.train_rows, "test": script.eval_rows, "novel": script.eval_rows}
    seed = args.seed if args.data_seed is None else args.data_seed
    images = {split: still_shapes(split, n, seed) for split, n in splits.items()}
    return images.pop("train").select_columns(["caption", "image"]), images


def prepare(rows: Any, source: str, index: int, script: ScriptArguments) -> Any:
    """Columns "caption" and "image" of one dataset, in this order, images decoded where they are read."""
    text = columns_of(script.text_column, script, "--text_column")[index]
    image = columns_of(script.image_column, script, "--image_column")[index]
    rows = with_media(rows, source, "image", text_column=text, media_column=image)
    return without_broken(decode_images(rows), "image", script)


def limits(script: ScriptArguments) -> list[str]:
    """What the card says of the model's limits."""
    if script.model is None and script.dataset is None:
        return ["It has seen nothing but drawings of one shape, and knows the two dozen words of their captions."]
    return ["The scores are those of one run on the evaluation data named above, and of no other data."]


if __name__ == "__main__":
    run(main)
