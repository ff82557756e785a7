"""Trains an encoder through hardware that has no backward, in every way there is, and shows what each is worth.

    python training_scripts/train_with_zbp.py

puts a simulated optical head (intensities behind an unknown medium, 5 % noise, 8 bits) behind MiniLM's first three
layers and trains them on pairs of texts, once for each arm: nothing, head ignored, linear surrogate, ZBP at several
budgets, and the exact gradient that only a simulation has. It writes the report, a figure, and the model of the best
arm, with its card, to output/zbp-optical; that of the exact gradient is kept only if no other arm was trained. Each
takes a few minutes on two CPU cores.

    python training_scripts/train_with_zbp.py --scenario int8 --dataset my/pairs --model my/encoder

does the same through two simulated int8 layers, whose exact gradient everybody has, so that its model may be kept as
well. `--help` lists every argument; all of the Trainer's are there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Normalize
from text_pairs import text_pairs
from transformers import set_seed

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.cards import arms_card, layers_without_backward, machine, markdown_table
from st_cached_extras.recipes.arguments import parse_arguments
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.hub import push_folder, take_push
from st_cached_extras.recipes.models import MINILM, load_model
from st_cached_extras.recipes.run import run
from st_cached_extras.zbp import ZBPRecorder, remove_zbp, total_queries
from st_cached_extras.zbp.ladder import (
    Arm,
    int8_arms,
    keep_layers,
    ladder_figure,
    last_layers,
    optical_arms,
    with_int8_layers,
    with_optical_head,
)

HARDWARE = {"optical": "a simulated optical head", "int8": "simulated int8 layers"}


@dataclass
class ScriptArguments:
    """What the Trainer has no argument for."""

    scenario: Literal["optical", "int8"] = field(default="optical", metadata={"help": "optical or int8."})
    model: str = field(default=MINILM, metadata={"help": "Id or path of a model."})
    num_layers: int | None = field(default=3, metadata={"help": "Keep the encoder's first layers; 0 for all."})
    dataset: str | None = field(default=None, metadata={"help": "Hub id or path. Default: installed docstrings."})
    columns: list[str] | None = field(default=None, metadata={"help": "Its two columns. Default: the first two."})
    train_pairs: int = field(default=20_000, metadata={"help": "Pairs to train on, at most."})
    eval_pairs: int = field(default=1000, metadata={"help": "Pairs held out, at most a tenth."})
    arms: list[str] | None = field(default=None, metadata={"help": "Names of arms. Default: all."})
    probes: list[int] = field(default_factory=lambda: [16, 64], metadata={"help": "Budgets of ZBP."})
    modes: list[str] = field(default_factory=list, metadata={"help": "More arms, such as dfa, or ZBPConfig JSON."})
    camera_pixels: int = field(default=128, metadata={"help": "What the optical head measures of an embedding."})
    int8_layers: int = field(default=2, metadata={"help": "How many of the last layers compute in int8."})
    mini_batch_size: int = field(default=32, metadata={"help": "Rows that are embedded at once."})
    record_every: int = field(default=0, metadata={"help": "Compare with exact gradients every so many steps."})


@dataclass
class TrainingArguments(SentenceTransformerTrainingArguments):
    """The Trainer's arguments, with defaults for the default run."""

    output_dir: str | None = field(default=None, metadata={"help": "Default: output/zbp-SCENARIO."})
    max_steps: int = field(default=140, metadata={"help": "Steps of every arm."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Pairs that are contrasted at once."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps of warm-up; below 1, a share of all."})
    batch_sampler: str = field(default="no_duplicates", metadata={"help": "no_duplicates: no text twice a batch."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between two lines of the log."})
    save_strategy: str = field(default="no", metadata={"help": "When to write checkpoints."})
    report_to: str = field(default="none", metadata={"help": "Where else to log, such as wandb."})


def main() -> None:
    script, args = parse_arguments((ScriptArguments, TrainingArguments))
    folder = Path(args.output_dir or f"output/zbp-{script.scenario}")
    push = take_push(args, folder.name)

    # Data: a query (first column) and its answer, no query twice
    pairs = text_pairs(script.dataset, script.columns, script.train_pairs + script.eval_pairs, args.seed)
    held_out = min(script.eval_pairs, len(pairs) // 10)
    evaluation, train = pairs.select(range(held_out)), pairs.select(range(held_out, len(pairs)))
    evaluator = retrieval(evaluation, args.per_device_eval_batch_size)

    # Every arm: the same model, hardware, data and seed
    rows, best, best_score, arms = [], None, -1.0, arms_of(script)
    # Behind optics, the exact gradient is the simulation's privilege
    privileged = script.scenario == "optical" and any(arm.trains and arm.name != "exact" for arm in arms)
    for arm in arms:
        set_seed(args.seed)
        model = model_with_hardware(script)
        arm.prepare(model)
        args.output_dir = str(folder / arm.name.replace(" ", "-"))
        if arm.trains:
            fit(model, arm, train, args, script, folder)
        scores, layers = evaluator(model), layers_without_backward(model)
        recall, mrr = (scores[f"held_out_{model.similarity_fn_name}_{metric}"] for metric in ("accuracy@1", "mrr@10"))
        rows.append({"Arm": arm.name, "R@1": float(recall), "MRR@10": float(mrr), "Queries": total_queries(model)})
        print(rows[-1], flush=True)
        if not (privileged and arm.name == "exact") and recall > best_score:
            best, best_score = (arm.name, model, layers), recall

    # Report, figure, card, model
    if args.process_index > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(rows, indent=1))
    (folder / "report.md").write_text(markdown_table(rows) + "\n")
    figure = ladder_figure(folder / "arms.png", {row["Arm"]: row["R@1"] for row in rows}, len(evaluation))
    name, model, layers = best
    card = arms_card(
        HARDWARE[script.scenario],
        name,
        scores=rows,
        figure=figure,
        run={"Steps": args.max_steps, "Batch": args.per_device_train_batch_size, "Seed": args.seed}
        | {"Machine": machine(args.device), "Layers without a backward": layers},
        data={"train": train, "held out": evaluation},
        model_id=push and push.repo_id,
    )
    remove_zbp(model)
    model.model_card_data = card
    card.register_model(model)
    model.save_pretrained(str(folder / "final"))
    print(f"\n{markdown_table(rows)}\n\nmodel   {folder / 'final'} ({name})\nreport  {folder / 'report.md'}")
    print(f"figure  {figure}")
    if push is not None:
        print(f"pushed  {push_folder(folder / 'final', push)}")


def model_with_hardware(script: ScriptArguments) -> SentenceTransformer:
    """A new model, cut, with the scenario's hardware in place."""
    model = load_model(script.model)
    if isinstance(model[-1], Normalize):
        del model[len(model) - 1]  # the loss normalises, and a head is given vectors as they are
        model.similarity_fn_name = "cosine"  # ranks as the dot product did behind it
    if script.num_layers:
        keep_layers(model, script.num_layers)
    if script.scenario == "optical":
        return with_optical_head(model, script.camera_pixels)
    return with_int8_layers(model, last_layers(model, script.int8_layers))


def arms_of(script: ScriptArguments) -> list[Arm]:
    """The arms of the scenario that were asked for."""
    budgets = tuple(script.probes), tuple(script.modes)
    if script.scenario == "optical":
        arms = optical_arms(*budgets)
    else:
        arms = int8_arms(last_layers(model_with_hardware(script), script.int8_layers), *budgets)
    if unknown := set(script.arms or ()) - {arm.name for arm in arms}:
        raise UsageError(f"--arms has {sorted(unknown)}; the arms are {[arm.name for arm in arms]}.")
    return [arm for arm in arms if script.arms is None or arm.name in script.arms]


def fit(
    model: SentenceTransformer,
    arm: Arm,
    train: Dataset,
    args: TrainingArguments,
    script: ScriptArguments,
    folder: Path,
) -> None:
    """Train one arm."""
    loss = CachedInfoNCELoss(model, scale=arm.scale, mini_batch_size=script.mini_batch_size)
    trainer = ReplaySentenceTransformerTrainer(model=model, args=args, train_dataset=train, loss=loss)
    recorder = ZBPRecorder(trainer, script.record_every) if script.record_every and arm.estimates else None
    trainer.train()
    if recorder is not None and recorder.history and args.process_index == 0:
        recorder.figure(folder / f"gradients-{Path(args.output_dir).name}.png")


def retrieval(pairs: Dataset, batch_size: int) -> InformationRetrievalEvaluator:
    """How often a query finds its answer."""
    queries, answers = ({str(row): text for row, text in enumerate(pairs[name])} for name in ("query", "answer"))
    relevant = {row: {row} for row in queries}
    return InformationRetrievalEvaluator(
        queries, answers, relevant, accuracy_at_k=[1], mrr_at_k=[10], name="held_out", batch_size=batch_size
    )


if __name__ == "__main__":
    run(main)
