"""Trains a text-to-video retriever, and shows what it finds.

    python training_scripts/train_video_embedder.py

draws moving shapes, trains a tiny two-tower model on them in a minute or two on two CPU cores, and writes the model,
its card and a figure to output/video-retriever/final. Any captioned videos and any model that sentence-transformers
loads go the same way:

    python training_scripts/train_video_embedder.py --dataset my/videos --text_column sentence \\
        --model Qwen/Qwen3-VL-Embedding-2B --per_device_train_batch_size 512 --mini_batch_size 8 --bf16

The memory of a step goes with the mini-batch, and what the model learns with the batch: that is what the loss is for.
`--help` lists every argument; all of the Trainer's are there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # captions are short, and DataLoader workers fork

import datasets
import numpy as np
from datasets import Dataset
from retrieval_evaluation import CaptionToVideoEvaluator, bootstrap_interval, mean_reciprocal_rank, recall
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.base.training_args import BatchSamplers
from tiny_video_tower import tiny_video_tower
from transformers import HfArgumentParser, set_seed

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.cards import ReplayModelCardData, command_line, describe_dataset, retrieval_figure
from st_cached_extras.data import decode_videos, moving_shapes


@dataclass
class ScriptArguments:
    """What the Trainer has no argument for."""

    model: str | None = field(default=None, metadata={"help": "Id or path of a model. Default: a tiny two-tower."})
    dataset: str | None = field(default=None, metadata={"help": "Hub id or local path. Default: moving shapes."})
    dataset_config: str | None = field(default=None, metadata={"help": "Name of the dataset's configuration."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(
        default=None, metadata={"help": "Split to evaluate on. Default: a tenth of the training split, held out."}
    )
    video_column: str = field(default="video", metadata={"help": "Column of videos: Video, bytes or paths."})
    text_column: str = field(default="caption", metadata={"help": "Column of captions."})
    num_frames: int = field(default=8, metadata={"help": "Frames per clip, evenly spaced."})
    train_clips: int | None = field(default=None, metadata={"help": "Train on the first so many clips only."})
    eval_clips: int | None = field(default=None, metadata={"help": "Evaluate on the first so many clips only."})
    mini_batch_size: int = field(default=32, metadata={"help": "Clips that are in memory at once."})
    scale: float = field(default=20.0, metadata={"help": "Factor on the cosine similarities, 1 / temperature."})


@dataclass
class TrainingArguments(SentenceTransformerTrainingArguments):
    """The Trainer's arguments, with defaults for the default run."""

    output_dir: str = field(default="output/video-retriever", metadata={"help": "Where the model goes."})
    num_train_epochs: float = field(default=5, metadata={"help": "Passes over the training clips."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Clips that are contrasted at once."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate. Default: 1.5e-3 for the tiny model, else 2e-5."}
    )
    warmup_steps: float = field(default=0.2, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})
    batch_sampler: str = field(default="no_duplicates", metadata={"help": "no_duplicates: no caption twice a batch."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})
    save_strategy: str = field(default="no", metadata={"help": "When to write checkpoints: no, steps or epoch."})
    report_to: str = field(default="none", metadata={"help": "Where else to log, such as wandb."})
    hub_private_repo: bool = field(default=True, metadata={"help": "Whether --push_to_hub makes a private model."})


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    push, args.push_to_hub = args.push_to_hub, False  # only the finished model goes up, below
    token, args.hub_token = args.hub_token, None  # the Trainer writes its arguments beside the model
    if args.learning_rate is None:
        args.learning_rate = 1.5e-3 if script.model is None else 2e-5
    if args.batch_sampler == BatchSamplers.NO_DUPLICATES:
        args.batch_sampler = distinct_captions
    final = Path(args.output_dir) / "final"

    # Data: a caption is the query (first column), its clip the right answer (second).
    train, evaluation = moving_shapes_splits(script, args) if script.dataset is None else load_splits(script, args)

    # Model
    card = ReplayModelCardData(
        model_name="Text-to-video retriever",
        summary="Finds short videos by a sentence that describes them.",
        task_name="text-to-video retrieval",
        command=command_line(),
        limits=limits(script),
    )
    if script.model is None:
        model = tiny_video_tower(train["caption"], num_frames=script.num_frames, model_card_data=card)
    else:
        model = SentenceTransformer(script.model, model_card_data=card)
    if isinstance(model[0], Router) and not args.router_mapping:
        args.router_mapping = {"caption": "query", "video": "document"}

    # Loss: embeds everything mini-batch by mini-batch, and contrasts the whole batch.
    loss = CachedInfoNCELoss(model, scale=script.scale, mini_batch_size=script.mini_batch_size)

    # Evaluators, which keep what they found at every call: before training, whenever --eval_strategy says, and after
    evaluators = {
        name: CaptionToVideoEvaluator(clips, name, script.mini_batch_size) for name, clips in evaluation.items()
    }

    # Training. The trainer evaluates, as it alone knows how where devices hold shards of the model.
    args.eval_on_start = True
    trainer = ReplaySentenceTransformerTrainer(
        model=model, args=args, train_dataset=train, loss=loss, evaluator=SequentialEvaluator([*evaluators.values()])
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()

    # Figure
    shown = evaluators["novel" if "novel" in evaluators else next(iter(evaluators))]
    if trainer.is_world_process_zero():
        sizes = {name: np.minimum(np.arange(1, 21) / len(clips), 1) for name, clips in evaluation.items()}
        ranks = {name: (evaluator.ranks_before, evaluator.ranks) for name, evaluator in evaluators.items()}
        captions_are = "caption, never trained on" if shown.name == "novel" else "caption"
        rows = shown.retrieved(captions=8, clips=3)
        figure = retrieval_figure(final / "retrieval.png", rows, ranks, sizes, captions_are=captions_are)
        card.figures = [
            (
                str(figure),
                f"Left: the three best clips for eight captions of {shown.name!r}, right ones framed in green. "
                "Right: how often the right clip is among the k best, before and after training.",
            )
        ]
        card.scores = score_rows(ranks, evaluation)

    # Card and model. All ranks save: some engines leave each of them a part of the model.
    card.run = {
        "Batch": f"{args.train_batch_size} clips a device on {args.world_size} device(s), "
        f"{args.gradient_accumulation_steps} batch(es) a step, in mini-batches of {script.mini_batch_size}",
        "In a batch": "no caption twice" if args.batch_sampler is distinct_captions else str(args.batch_sampler),
        "Steps": trainer.state.global_step,
        "Seed": args.seed,
    }
    if shown.first_step > 0:
        card.run["Before"] = f"step {shown.first_step}, from which this run went on"
    card.data = {name: describe_dataset(clips, "clips") for name, clips in {"train": train, **evaluation}.items()}
    name = args.hub_model_id or Path(args.output_dir).name
    if push:
        card.set_model_id(name)
    trainer.save_model(str(final))
    if not trainer.is_world_process_zero():
        return

    print_table(card.scores)
    print(f"\nmodel   {final}\ncard    {final / 'README.md'}\nfigure  {figure}")
    if push:
        url = model.push_to_hub(
            name, token=token, private=args.hub_private_repo, exist_ok=True, local_model_path=str(final)
        )
        print(f"pushed  {url}")


def moving_shapes_splits(script: ScriptArguments, args: TrainingArguments) -> tuple[Dataset, dict[str, Dataset]]:
    """The embedded data: new clips of captions in training, and clips of captions that are not."""
    splits = {"train": script.train_clips, "test": script.eval_clips, "novel": script.eval_clips}
    seed = args.seed if args.data_seed is None else args.data_seed
    clips = {split: moving_shapes(split, n, seed) for split, n in splits.items()}
    clips = {split: decode_videos(data, num_frames=script.num_frames) for split, data in clips.items()}
    train = clips.pop("train").select_columns(["caption", "video"])
    return train, clips


def load_splits(script: ScriptArguments, args: TrainingArguments) -> tuple[Dataset, dict[str, Dataset]]:
    """Somebody's captioned videos, from the Hub or from this machine."""
    saved = any((Path(script.dataset) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    splits = (
        datasets.load_from_disk(script.dataset)
        if saved
        else datasets.load_dataset(script.dataset, script.dataset_config)
    )
    if isinstance(splits, Dataset):
        splits = {"train": splits}
    for split in (script.train_split, script.eval_split or script.train_split):
        if split not in splits:
            raise ValueError(f"{script.dataset} has no split {split!r}; its splits are {list(splits)}.")

    train = prepare(splits[script.train_split], script)
    if script.eval_split is None:
        parts = train.train_test_split(test_size=max(2, min(1000, len(train) // 10)), seed=args.seed)
        train, evaluation = parts["train"], parts["test"]
        name = "held out"
    else:
        name, evaluation = script.eval_split, prepare(splits[script.eval_split], script)
    train = train.select(range(min(len(train), script.train_clips or len(train))))
    evaluation = evaluation.select(range(min(len(evaluation), script.eval_clips or len(evaluation))))
    return train, {name: evaluation}


def prepare(clips: Dataset, script: ScriptArguments) -> Dataset:
    """Columns "caption" and "video", in this order, with videos decoded on access."""
    # The names are fixed because the Trainer tells columns apart by their prefix: "video" and "video_caption" collide.
    for argument, column in (("--text_column", script.text_column), ("--video_column", script.video_column)):
        if column not in clips.column_names:
            raise ValueError(f"{argument} is {column!r}, but the columns are {clips.column_names}.")
    clips = clips.select_columns([script.text_column, script.video_column])
    clips = clips.rename_columns({script.text_column: "caption_", script.video_column: "video_"})
    clips = clips.rename_columns({"caption_": "caption", "video_": "video"})
    if getattr(clips.features["caption"], "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"--text_column {script.text_column!r} must hold text, got {clips.features['caption']}.")
    return decode_videos(clips, num_frames=script.num_frames)


def distinct_captions(dataset: Dataset, **kwargs) -> NoDuplicatesBatchSampler:
    """Batches in which no caption comes twice, as the twin's clip would count as wrong.

    The plain sampler would compare the clips as well, and decode each of them once more to do so.
    """
    return NoDuplicatesBatchSampler(dataset.select_columns("caption"), **kwargs)


def limits(script: ScriptArguments) -> list[str]:
    """What the card says of the model's limits."""
    if script.model is None and script.dataset is None:
        return [
            "It has seen nothing but drawings of one moving shape, and knows the two dozen words of their captions.",
            f"Clips are read as {script.num_frames} frames; anything that happens between them is lost.",
            "The scores are those of one run, among 64 clips; the intervals are over captions, not over seeds, "
            "and one of no width only says that every caption was right.",
        ]
    return [
        f"Clips are read as {script.num_frames} frames; anything that happens between them is lost.",
        "The scores are those of one run on the evaluation split named above, and of no other data.",
    ]


def score_rows(ranks: dict, evaluation: dict[str, Dataset]) -> list[dict]:
    """Recall and mean reciprocal rank of each split, before and after training, beside chance."""
    rows = []
    for split, clips in evaluation.items():
        before, after = ranks[split]
        for k in (1, 5, 10):
            low, high = bootstrap_interval(after < k)
            rows.append(
                {
                    "Split": split,
                    "Text to video": f"R@{k}",
                    "Chance": min(1.0, k / len(clips)),
                    "Before": recall(before, k),
                    "After": recall(after, k),
                    "95 % interval": f"{low:.3f} to {high:.3f}",
                }
            )
        low, high = bootstrap_interval(1 / (after + 1))
        rows.append(
            {
                "Split": split,
                "Text to video": "MRR",
                "Chance": float(np.mean(1 / np.arange(1, len(clips) + 1))),
                "Before": mean_reciprocal_rank(before),
                "After": mean_reciprocal_rank(after),
                "95 % interval": f"{low:.3f} to {high:.3f}",
            }
        )
    return rows


def print_table(rows: list[dict]) -> None:
    cells = [list(rows[0])] + [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
