"""Trains a text-to-video retriever, and shows what it finds.

    python training_scripts/train_video_embedder.py

draws moving shapes, trains a tiny two-tower model on them in a minute or two on two CPU cores, and writes the model,
its card and a figure to output/video-retriever/final. Any captioned videos and any model that sentence-transformers
loads go the same way, be it two towers or one vision-language model:

    python training_scripts/train_video_embedder.py --dataset my/videos --text_column sentence \\
        --model Qwen/Qwen3-VL-Embedding-2B --fps 2 --num_frames 32 --lora_rank 16 \\
        --per_device_train_batch_size 512 --mini_batch_size 8 --bf16 --dataloader_num_workers 8

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
from tiny_video_tower import tiny_video_tower
from transformers import set_seed

from st_cached_extras import ReplaySentenceTransformerTrainer
from st_cached_extras.cards import ReplayModelCardData, command_line
from st_cached_extras.data import decode_videos, moving_shapes
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
from st_cached_extras.recipes.models import knows_time, load_model, router_mapping
from st_cached_extras.recipes.run import run
from st_cached_extras.recipes.splits import columns_of, decoded, load_splits, texts_of, with_media, without_broken
from st_cached_extras.recipes.training import check_training, make_losses, stop_early


@dataclass
class ScriptArguments(DataArguments, MediaArguments, LossArguments, LoraArguments):
    """What the Trainer has no argument for."""

    model: str | None = field(default=None, metadata={"help": "Id or path of a model. Default: a tiny two-tower."})
    video_column: list[str] = field(
        default_factory=lambda: ["video"],
        metadata={"help": "Column of videos of each dataset: Video, bytes or paths."},
    )
    text_column: list[str] = field(
        default_factory=lambda: ["caption"], metadata={"help": "Column of captions of each dataset."}
    )
    num_frames: int = field(default=8, metadata={"help": "Frames per clip, evenly spaced; with --fps, at most."})
    fps: float | None = field(default=None, metadata={"help": "Frames per second, where the model takes any number."})
    frame_size: int | None = field(
        default=None, metadata={"help": "Pixels of the shorter side to which larger frames are scaled down."}
    )


@dataclass
class TrainingArguments(RecipeTrainingArguments):
    """The Trainer's arguments, with defaults for the default run."""

    output_dir: str = field(default="output/video-retriever", metadata={"help": "Where the model goes."})
    num_train_epochs: float = field(default=5, metadata={"help": "Passes over the training clips."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Clips that are contrasted at once."})
    warmup_steps: float = field(default=0.2, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})


def main() -> None:
    script, args = parse_arguments((ScriptArguments, TrainingArguments))
    push = take_push(args)
    resume = check_training(args, script, ("caption",))
    check_model_arguments(script)
    set_seed(args.seed)

    # Data: a caption is the query (first column), its clip the right answer (second).
    if script.dataset is None:
        train, evaluation = moving_shapes_splits(script, args)
    else:
        train, evaluation = load_splits(script, lambda *rows: prepare(*rows, script), args.seed, held_out="caption")

    # Model
    card = ReplayModelCardData(
        model_name="Text-to-video retriever",
        summary="Finds short videos by a sentence that describes them.",
        task_name="text-to-video retrieval",
        command=command_line(),
        limits=limits(script),
    )
    if script.model is None:
        model = tiny_video_tower(texts_of(train, "caption"), num_frames=script.num_frames, model_card_data=card)
    else:
        model = load_model(script.model, takes="video", model_card_data=card)
    add_lora(model, script)
    args.router_mapping = args.router_mapping or router_mapping(model, "caption", train)
    if args.learning_rate is None:
        args.learning_rate = 1.5e-3 if script.model is None else 2e-4 if script.lora_rank else 2e-5

    # Clips become frames where they are read, in the workers; a model that asks when a frame was is told.
    def decode(rows: Any) -> Any:
        sampling = {"num_frames": script.num_frames, "fps": script.fps, "size": script.frame_size}
        rows = decode_videos(rows, "video", **sampling, with_metadata=knows_time(model))
        return without_broken(rows, "video", script) if script.dataset else rows

    train, evaluation = decoded(train, decode), {name: decode(rows) for name, rows in evaluation.items()}

    # Loss: embeds everything mini-batch by mini-batch, and contrasts the whole batch.
    loss = make_losses(model, script, train)

    # Evaluators, which keep what they find before training, whenever --eval_strategy says, and after
    evaluators = [
        RetrievalEvaluator(rows, "caption", "video", name, script.mini_batch_size) for name, rows in evaluation.items()
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
    finish(trainer, card, evaluators, train=train, unit="clips", push=push, sources=script.dataset)


def check_model_arguments(script: ScriptArguments) -> None:
    """What the default model cannot be, before anything is drawn."""
    if script.num_frames < 2:
        raise UsageError(
            f"--num_frames must be at least 2, because video models look at pairs, got {script.num_frames}."
        )
    if script.model is not None:
        return
    if script.lora_rank is not None:
        raise UsageError("--lora_rank needs --model: the default one has nothing yet that adapters could adapt.")
    if script.num_frames % 2 or script.fps is not None:
        raise UsageError("The default model takes an even number of frames, the same for every clip: --num_frames 8.")


def moving_shapes_splits(script: ScriptArguments, args: TrainingArguments) -> tuple[Dataset, dict[str, Dataset]]:
    """The embedded data: new clips of captions in training, and clips of captions that are not."""
    splits = {"train": script.train_rows, "test": script.eval_rows, "novel": script.eval_rows}
    seed = args.seed if args.data_seed is None else args.data_seed
    clips = {split: moving_shapes(split, n, seed) for split, n in splits.items()}
    return clips.pop("train").select_columns(["caption", "video"]), clips


def prepare(rows: Any, source: str, index: int, script: ScriptArguments) -> Any:
    """Columns "caption" and "video" of one dataset, in this order."""
    text = columns_of(script.text_column, script, "--text_column")[index]
    video = columns_of(script.video_column, script, "--video_column")[index]
    return with_media(rows, source, "video", text_column=text, media_column=video)


def limits(script: ScriptArguments) -> list[str]:
    """What the card says of the model's limits."""
    frames = f"{script.num_frames} frames" if script.fps is None else f"{script.fps:g} frames a second"
    lost = f"Clips are read as {frames}; anything that happens between them is lost."
    if script.model is None and script.dataset is None:
        return [
            "It has seen nothing but drawings of one moving shape, and knows the two dozen words of their captions.",
            lost,
        ]
    return [lost, "The scores are those of one run on the evaluation data named above, and of no other data."]


if __name__ == "__main__":
    run(main)
