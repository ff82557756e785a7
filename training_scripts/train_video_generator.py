"""Trains a small generator of captioned clips by matching distributions under frozen encoders.

    python training_scripts/train_video_generator.py

needs no download and some minutes on two CPU cores. It trains a judge and a small video encoder on real clips, sums
up real clips under every encoder, and then trains the generator, without a discriminator or a teacher: a batch of
clips is drawn without a graph, compared with the real ones under all encoders, and a share of it is drawn again to be
differentiated, one stage at a time. The folder output/video-generator/final gets the generator, its card and two
figures; sample_video_generator.py draws more. Other encoders, from the Hub or from a folder:

    python training_scripts/train_video_generator.py --encoders facebook/dinov2-small facebook/vjepa2-vitl-fpc64-256 \\
        --dtype bfloat16 --mini_batch_size 4

`accelerate launch training_scripts/train_video_generator.py` trains on several devices, `--resume` goes on from the
last checkpoint. `--help` lists every argument.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from accelerate import Accelerator
from clip_classifier import load_classifier, save_classifier, train_classifier
from generator_data import load_clips, random_batch
from generator_encoders import features_of, fit_references, make_encoders, train_tower
from generator_engines import check_resume, prepare, take_step
from generator_evaluation import GeneratorEvaluator
from generator_progress import Progress, load_checkpoint, report, save_checkpoint
from tiny_video_generator import TinyVideoGenerator, render, vocabulary
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import get_cosine_schedule_with_warmup, set_seed

from st_cached_extras.data.moving_shapes import COLOURS, SHAPES
from st_cached_extras.distributed.checkpoints import copy_whole_parameters
from st_cached_extras.objectives.mmd import EncoderBalance, MultiEncoderMMD
from st_cached_extras.recipes.arguments import parse_arguments
from st_cached_extras.recipes.hub import Push, check_push
from st_cached_extras.recipes.run import run
from st_cached_extras.replay import FeatureGradientReplay, Stage, Staged

READ = {"shape": list(SHAPES), "colour": list(COLOURS)}  # what the judge reads off a clip


@dataclass
class Arguments:
    output_dir: str = field(default="output/video-generator", metadata={"help": "Where everything goes."})
    encoders: list[str] = field(
        default_factory=lambda: ["tower", "convolution", "glimpse", "motion", "colours", "pixels"],
        metadata={"help": "These, and Hub ids and paths of image and video models."},
    )
    tower: str | None = field(default=None, metadata={"help": "A model of train_video_embedder.py, as the tower."})
    dtype: str | None = field(default=None, metadata={"help": "In which loaded encoders compute, e.g. bfloat16."})
    clips: int = field(default=1536, metadata={"help": "Real clips to train on."})
    held_out_clips: int = field(default=448, metadata={"help": "Real clips to compare with, at most 448."})
    steps: int = field(default=250, metadata={"help": "Steps of the generator."})
    batch_size: int = field(default=128, metadata={"help": "Clips per device that are matched at once."})
    differentiated: int = field(default=32, metadata={"help": "Clips of them that are differentiated."})
    mini_batch_size: int = field(default=32, metadata={"help": "Clips in memory at once."})
    learning_rate: float = field(default=6e-3, metadata={"help": "Peak learning rate of Adam."})
    warmup_steps: int = field(default=20, metadata={"help": "Steps of warm-up."})
    ema: float = field(default=0.98, metadata={"help": "Share of the averaged weights that is kept each step."})
    condition_weight: float = field(
        default=2.5, metadata={"help": "How far apart captions are, in units of how far apart real clips are."}
    )
    scales: list[float] = field(
        default_factory=lambda: [0.2, 0.3], metadata={"help": "Bandwidths, in units of the median distance."}
    )
    landmarks: int = field(default=1024, metadata={"help": "Landmarks that sum up real clips."})
    tower_steps: int = field(default=60, metadata={"help": "Steps of the tower."})
    judge_steps: int = field(default=450, metadata={"help": "Steps of the judge."})
    eval_steps: int = field(default=50, metadata={"help": "Steps between evaluations."})
    save_steps: int = field(default=50, metadata={"help": "Steps between checkpoints."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in output_dir."})
    seed: int = field(default=0, metadata={"help": "Of everything random."})
    push_to_hub: str | None = field(default=None, metadata={"help": "Id of a private model to push the result to."})


def main() -> None:
    (args,) = parse_arguments([Arguments])
    if args.push_to_hub:
        args.push_to_hub = check_push(Push(args.push_to_hub)).repo_id
    accelerator = Accelerator()
    checkpoints = check_resume(accelerator, args.resume)
    set_seed(args.seed)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)

    # Real clips
    train, train_captions = load_clips("train", args.clips, args.seed)
    held_out, held_out_captions = load_clips("test", args.held_out_clips, args.seed)

    # The judge, and the tower where it is wanted, are trained once
    judge_file, tower = folder / "judge.safetensors", Path(args.tower or folder / "tower")
    if not (args.resume and judge_file.is_file()):
        judge = train_classifier(train, train_captions, READ, steps=args.judge_steps, seed=args.seed)
        if accelerator.is_main_process:
            save_classifier(judge, judge_file)
    if "tower" in args.encoders and args.tower is None and not (args.resume and tower.is_dir()):
        train_tower(train, train_captions, tower, steps=args.tower_steps, seed=args.seed)
    accelerator.wait_for_everyone()
    train, held_out = train.to(accelerator.device), held_out.to(accelerator.device)
    judge = load_classifier(judge_file, READ).to(accelerator.device)
    encoders = make_encoders(args.encoders, tower, dtype=args.dtype, mini_batch_size=args.mini_batch_size)
    encoders = {name: encoder.to(accelerator.device) for name, encoder in encoders.items()}

    # Generator
    generator = TinyVideoGenerator(vocabulary(train_captions), frames=train.shape[1], side=train.shape[-1])
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(args.ema)).to(accelerator.device)
    optimizer = torch.optim.Adam(generator.parameters(), args.learning_rate, betas=(0.5, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.steps)
    conditions = generator.condition(train_captions).to(accelerator.device)
    whole = deepcopy(generator).to(accelerator.device)  # for the average, as devices may hold shards
    generator, optimizer = prepare(accelerator, generator, optimizer, args.batch_size)

    # Objective: the joint law of features and captions, because a marginal one cannot teach what a caption asks for
    options = {"scales": args.scales, "landmarks": args.landmarks}
    references = fit_references(features_of(encoders, train), conditions, args.condition_weight, **options)
    objective = MultiEncoderMMD(references)
    evaluator = GeneratorEvaluator(
        objective,
        encoders,
        judge,
        held_out,
        held_out_captions,
        average.module.condition(held_out_captions).to(accelerator.device),
        train[: len(held_out)],
        batch_size=args.batch_size * accelerator.num_processes,
    )
    balance = EncoderBalance(evaluator.floors)
    objective.set_weights(balance)

    # Replay: the last clips of a batch are differentiated, which are as random as any
    staged = Staged(
        Stage("generator", generator),
        Stage("renderer", partial(render, side=train.shape[-1])),
        Stage("encoders", encoders),
    )
    replay = FeatureGradientReplay(
        objective,
        target_local_samples=args.batch_size,
        differentiated_local_samples=args.differentiated,
        selection="suffix",
    )

    progress = Progress(average, optimizer, schedule, replay, balance)
    if args.resume:
        load_checkpoint(folder, accelerator.unwrap_model(generator), progress)

    # Training
    while progress.step < args.steps:
        if progress.step % args.eval_steps == 0:
            progress.evaluate(evaluator)
        seeds = (args.seed, progress.step, accelerator.process_index)
        inputs = random_batch(conditions, args.batch_size, average.module.noise_size, seeds)
        raw = train_step(replay, staged, generator, inputs, args)
        take_step(accelerator, generator, optimizer)
        schedule.step()
        copy_whole_parameters(generator, whole)
        average.update_parameters(whole)
        balance.update(raw)
        progress.add(raw)
        if checkpoints and progress.step % args.save_steps == 0 and accelerator.is_main_process:
            save_checkpoint(folder, accelerator.unwrap_model(generator), progress)
    progress.evaluate(evaluator)

    if accelerator.is_main_process:
        report(folder / "final", args, average.module, progress, evaluator, held_out)


def train_step(
    replay: FeatureGradientReplay,
    staged: Staged,
    generator: torch.nn.Module,
    inputs: dict[str, Tensor],
    args: Arguments,
) -> dict[str, float]:
    """Gradients of one batch, and the encoders' raw values."""
    passes, captions = [], []
    for begin in range(0, args.batch_size, args.mini_batch_size):
        part = {name: x[begin : begin + args.mini_batch_size] for name, x in inputs.items()}
        replayed = begin + args.mini_batch_size > args.batch_size - args.differentiated
        passes.append(staged.collect(part, replayed=replayed))
        captions.append({"condition": part["condition"]})
        replay.add({**passes[-1].features, **captions[-1]})
    result = replay.finalize()
    replay.replay(lambda index: {**passes[index].replay(), **captions[index]}, model=generator)
    replay.commit()
    return {name.removeprefix("mmd/"): float(value) for name, value in result.metrics.items()}


if __name__ == "__main__":
    run(main)
