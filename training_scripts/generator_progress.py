"""What `train_video_generator.py` keeps while it trains, writes into checkpoints, and tells when it is done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from generator_evaluation import GeneratorEvaluator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from st_cached_extras.cards import (
    command_line,
    contact_sheet_figure,
    generator_curves_figure,
    machine,
    markdown_table,
    save_generator_card,
)
from st_cached_extras.data.moving_shapes import scenes
from st_cached_extras.objectives.mmd import EncoderBalance
from st_cached_extras.recipes.hub import Push, push_folder
from st_cached_extras.replay import FeatureGradientReplay

SHOWN = 8  # captions on the contact sheet


class Progress:
    """The state of a run besides the generator's weights.

    Attributes:
        raw: per step, the raw value of every encoder.
        scores: by step, what the evaluator found.
        sheets: by step, clips of the same captions and noise, uint8 [captions, T, H, W, 3].
        seconds: that training has taken, evaluations not included.
    """

    def __init__(
        self,
        average: AveragedModel,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        replay: FeatureGradientReplay,
        balance: EncoderBalance,
    ) -> None:
        self._average, self._replay, self._balance = average, replay, balance
        self._parts = {"average": average, "optimizer": optimizer, "schedule": schedule}
        self.raw: list[dict[str, float]] = []
        self.scores: dict[int, dict[str, float]] = {}
        self.sheets: dict[int, Tensor] = {}
        self.seconds = 0.0
        self._since = time.perf_counter()

    @property
    def step(self) -> int:
        return len(self.raw)

    def add(self, raw: dict[str, float]) -> None:
        """A step is done."""
        self.raw.append(raw)
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def evaluate(self, evaluator: GeneratorEvaluator) -> None:
        """Score the averaged weights, and keep what they draw."""
        scores = evaluator(self._average.module.generate)
        self.scores[self.step] = scores
        self.sheets[self.step] = self._average.module.generate(shown_captions(evaluator))
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"step {self.step:5d}  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        self._since = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: part.state_dict() for name, part in self._parts.items()},
            "replay": self._replay.replay_state(),
            "balance": self._balance.replay_state(),
            **{name: getattr(self, name) for name in ("raw", "scores", "sheets", "seconds")},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._replay.load_replay_state(state["replay"])
        self._balance.load_replay_state(state["balance"])
        for name in ("raw", "scores", "sheets", "seconds"):
            setattr(self, name, state[name])


def save_checkpoint(folder: Path, generator: nn.Module, progress: Progress) -> None:
    """Write a checkpoint in place of the last one, whole or not at all."""
    unfinished = folder / "checkpoint.pt.tmp"
    torch.save({"generator": generator.state_dict(), "progress": progress.state_dict()}, unfinished)
    os.replace(unfinished, folder / "checkpoint.pt")


def load_checkpoint(folder: Path, generator: nn.Module, progress: Progress) -> None:
    """Go on from the checkpoint in the folder, if there is one."""
    path = folder / "checkpoint.pt"
    if not path.is_file():
        print(f"There is no checkpoint in {folder}: beginning anew.")
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    generator.load_state_dict(state["generator"])
    progress.load_state_dict(state["progress"])


def shown_captions(evaluator: GeneratorEvaluator) -> list[str]:
    """The captions of the contact sheet, spread over the held-out ones."""
    return evaluator.captions[:: max(1, len(evaluator.captions) // SHOWN)][:SHOWN]


def report(
    final: Path, args: Any, generator: nn.Module, progress: Progress, evaluator: GeneratorEvaluator, held_out: Tensor
) -> None:
    """Save the generator with its figures and its card, print the scores, and push where that was asked for."""
    generator.save_pretrained(final)
    captions = shown_captions(evaluator)
    drawn = {f"step {step}": sheet.numpy() for step, sheet in _thinned(progress.sheets, 4).items()}
    rows = [evaluator.captions.index(caption) for caption in captions]
    columns = {**drawn, "a real clip": held_out[rows].movedim(2, -1).cpu().numpy()}
    contact_sheet_figure(final / "clips.png", captions, columns)
    generator_curves_figure(
        final / "curves.png", progress.raw, evaluator.floors, progress.scores, evaluator.floor_distance
    )
    scores = score_rows(progress.scores, evaluator, generator, held_out)
    found = {"scores": scores, "steps": progress.step, "seconds": progress.seconds}
    (final / "scores.json").write_text(json.dumps(found, indent=1))
    save_generator_card(
        final,
        name="Moving-shapes video generator",
        summary="Draws clips of eight frames of one moving shape from captions such as "
        f"“{captions[0]}”. It was trained by matching the joint distribution of clips and captions under "
        f"{len(evaluator.encoders)} frozen encoders, without a discriminator or a teacher.",
        scores=scores,
        figures=[
            ("clips.png", "The same captions and noise as training went on, and a real clip of each caption."),
            (
                "curves.png",
                "Left: each encoder's raw MMD² of held-out captions, faint that of batches in training, dashed that "
                "of real clips. Right: what was never trained against, the sliced Wasserstein distance under "
                "the judge's features and the share of clips that show what was asked for.",
            ),
        ],
        run={
            "Batch": f"{args.batch_size} clips a device, {args.differentiated} of them differentiated, in "
            f"mini-batches of {args.mini_batch_size}",
            "Steps": f"{progress.step}, in {progress.seconds:.0f} seconds",
            "Encoders": ", ".join(evaluator.encoders),
            "Objective": f"MMD² of clips and captions, gaussian kernels of {args.scales} median distances, "
            f"{args.landmarks} landmarks, captions weighing {args.condition_weight}",
            "Real clips": f"{args.clips} to train on, {len(held_out)} to compare with",
            "Seed": args.seed,
            "Machine": machine(held_out.device),
        },
        command=command_line(),
        usage=f'python training_scripts/sample_video_generator.py --generator {final} --captions "{captions[0]}"',
        limits=[
            "It has seen nothing but drawings of one moving shape, and knows the words of their captions alone.",
            "It can draw nothing but one sprite over a plain background: its architecture says so.",
            "The scores are those of one run.",
        ],
        untested=["Other seeds, other words, real videos.", "What people see in its clips: no one was asked."],
    )
    print(f"\n{markdown_table(scores)}\n\ngenerator  {final}\ncard       {final / 'README.md'}")
    print(f"figures    {final / 'clips.png'}, {final / 'curves.png'}")
    if args.push_to_hub:
        print(f"pushed     {push_folder(final, Push(args.push_to_hub))}")


@torch.no_grad()
def score_rows(
    scores: Mapping[int, Mapping[str, float]], evaluator: GeneratorEvaluator, generator: nn.Module, held_out: Tensor
) -> list[dict[str, Any]]:
    """The table of results: real clips, the generator at the start, and after training."""
    first, last = scores[min(scores)], scores[max(scores)]
    rows = []
    for name, floor in evaluator.floors.items():
        start, end = first[f"mmd/{name}"], last[f"mmd/{name}"]
        left = f"{(end - floor) / (start - floor):.3f} of the excess"
        rows.append([f"MMD² x 1000, {name}", 1000 * floor, 1000 * start, 1000 * end, left])
    start, end = first["sliced_wasserstein"], last["sliced_wasserstein"]
    rows.append(
        ["sliced Wasserstein, held-out encoder", evaluator.floor_distance, start, end, f"{end / start:.3f} of it"]
    )
    real = evaluator.read(held_out.float() / 255, evaluator.captions)
    novel = [scene.caption for scene in scenes("novel")]
    clips = generator.generate(novel, seed=1).movedim(-1, 2).to(held_out.device).float() / 255
    for what, share in real.items():
        rows.append([f"{what} as asked for", share, first[f"read/{what}"], last[f"read/{what}"], ""])
    for what, share in evaluator.read(clips, novel).items():
        if what not in evaluator.judge.groups:
            rows.append([f"{what}, captions never trained on", "", "", share, ""])
    names = ["Measure", "Real clips", "Before", "After", "What is left"]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _thinned(sheets: Mapping[int, Tensor], count: int) -> dict[int, Tensor]:
    """The first and the last sheet, and some between that are more dense at the beginning."""
    steps = sorted(sheets)
    last = len(steps) - 1
    chosen = sorted({round(last * (i / (count - 1)) ** 2) for i in range(count)}) if last else [0]
    return {steps[i]: sheets[steps[i]] for i in chosen}
