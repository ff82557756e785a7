"""Distils one or more teachers into a small embedder: each text where they put it, and all texts spread as theirs are.

    python training_scripts/distil_embedder.py

needs no download: two layers of MiniLM learn from the whole of it, on what the installed Python packages say of their
own functions, in minutes on two CPU cores; the model, its card and a figure go to output/distilled-embedder/final.
Any texts and teachers go the same way; with several teachers, the student's embedding is theirs side by side:

    python training_scripts/distil_embedder.py --dataset my/pairs --columns question answer \\
        --teachers BAAI/bge-base-en-v1.5 intfloat/e5-base-v2 --model microsoft/MiniLM-L12-H384-uncased

The paired loss is the squared distance from the teachers' embeddings. The other, the MMD, compares the cloud of a
batch with a reference of each teacher, made here or by fit_reference.py; docs/mmd.md tells when that helps, and
`--mmd_weight 0` leaves it out. `--help` lists every argument; all of the Trainer's are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset, concatenate_datasets
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MSELoss
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from text_pairs import text_pairs
from torch import Tensor, nn
from transformers import set_seed

from st_cached_extras import CachedCompositeLoss, CachedMultiEncoderMMDLoss, ReplaySentenceTransformerTrainer
from st_cached_extras.cards import ReplayModelCardData, command_line
from st_cached_extras.data import hold_out
from st_cached_extras.evaluation import RetrievalEvaluator
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.recipes.arguments import DataArguments, RecipeTrainingArguments, parse_arguments
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.finish import finish
from st_cached_extras.recipes.hub import take_push
from st_cached_extras.recipes.models import MINILM, keep_layers, load_model
from st_cached_extras.recipes.run import one_line, run
from st_cached_extras.recipes.training import check_training, stop_early


@dataclass
class ScriptArguments:
    """What the Trainer has no argument for."""

    model: str | None = field(default=None, metadata={"help": "Id or path of the student. Default: MiniLM, cut."})
    num_layers: int | None = field(
        default=None, metadata={"help": "Keep the student's first layers only. Default: 2 of the default student."}
    )
    teachers: list[str] | None = field(default=None, metadata={"help": "Ids or paths. Default: MiniLM."})
    references: list[str] | None = field(
        default=None, metadata={"help": "Files of fit_reference.py, one for each teacher. Default: made here."}
    )
    mmd_weight: float = field(default=0.01, metadata={"help": "Weight of the MMD; 0 leaves it out."})
    landmarks: int = field(default=512, metadata={"help": "Landmarks of the references that are made here."})
    dataset: str | None = field(default=None, metadata={"help": "Hub id or path. Default: installed docstrings."})
    columns: list[str] | None = field(default=None, metadata={"help": "Its two columns. Default: the first two."})
    train_pairs: int = field(default=4000, metadata={"help": "Pairs whose texts are learnt from, at most."})
    eval_pairs: int = field(default=500, metadata={"help": "Pairs held out."})
    mini_batch_size: int = field(default=32, metadata={"help": "Texts that are in memory at once."})
    gather_across_devices: bool = field(default=False, metadata={"help": "One cloud of the texts of all devices."})


@dataclass
class TrainingArguments(RecipeTrainingArguments):
    """The Trainer's arguments, with defaults for the default run."""

    output_dir: str = field(default="output/distilled-embedder", metadata={"help": "Where the model goes."})
    num_train_epochs: float = field(default=3, metadata={"help": "Passes over the texts."})
    per_device_train_batch_size: int = field(default=512, metadata={"help": "Texts that make a cloud."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Texts that are embedded at once."})


def main() -> None:
    script, args = parse_arguments((ScriptArguments, TrainingArguments))
    push = take_push(args)
    resume = check_training(args, DataArguments(), ("text",))
    set_seed(args.seed)

    # Data: the texts of pairs, each once, with what the teachers make of them; whole pairs are held out
    pairs = text_pairs(script.dataset, script.columns, script.train_pairs + script.eval_pairs, args.seed)
    train, held_out = hold_out(pairs, "query", args.seed, script.eval_pairs)
    unseen = {*held_out["query"], *held_out["answer"]}
    texts = [text for text in dict.fromkeys([*train["query"], *train["answer"]]) if text not in unseen]
    teachers = {name: load_model(name).eval() for name in script.teachers or [MINILM]}
    targets = {name: embed(teacher, texts, args) for name, teacher in teachers.items()}  # each [texts, D]
    labels = torch.cat(list(targets.values()), dim=1).numpy()
    train = concatenate_datasets([Dataset.from_dict({"text": texts}), Dataset.from_dict({"label": labels})], axis=1)

    # Student
    names = [Path(name).name for name in teachers]
    card = ReplayModelCardData(
        model_name="Distilled text embedder",
        summary=f"Embeds texts where {' and '.join(names)} put them.",
        task_name="retrieval of texts by texts",
        command=command_line(),
        limits=["What its teachers get wrong it gets wrong, too: it saw no other judgement of what belongs together."],
    )
    model = load_model(script.model or MINILM, model_card_data=card)
    if script.num_layers or script.model is None:
        keep_layers(model, script.num_layers or 2)
    fit_width(model, labels.shape[1])
    if args.learning_rate is None:
        args.learning_rate = 5e-4 if script.model is None else 1e-4

    # Loss: squared distance from each text's targets, and the MMD of the batch from each teacher's reference
    losses = {"paired": (MSELoss(model), float(labels.shape[1]))}  # a sum over dimensions, where MSELoss has a mean
    if script.mmd_weight:
        losses["law"] = (law(model, targets, script, args.seed), script.mmd_weight)
    gather = script.gather_across_devices
    loss = CachedCompositeLoss(model, losses, script.mini_batch_size, gather_across_devices=gather)

    # Training, evaluated by how well queries of held-out pairs find their answers
    evaluator = RetrievalEvaluator(held_out, batch_size=args.per_device_eval_batch_size)
    trainer = ReplaySentenceTransformerTrainer(
        model, args, train_dataset=train, loss=loss, evaluator=[evaluator], callbacks=stop_early(args, [evaluator])
    )
    trainer.train(resume_from_checkpoint=resume)

    # Scores, figure, card, model, and the Hub where it is asked for
    facts = {f"Teacher {Path(name).name}": scores_of(teacher, held_out, args) for name, teacher in teachers.items()}
    sources = script.dataset and [script.dataset]
    finish(trainer, card, [evaluator], train=train, unit="texts", push=push, facts=facts, sources=sources)


def embed(teacher: SentenceTransformer, texts: list[str], args: TrainingArguments) -> Tensor:
    """Targets of unit length, [texts, D], on the CPU."""
    options = {"normalize_embeddings": True, "convert_to_tensor": True, "show_progress_bar": not args.disable_tqdm}
    return teacher.encode(texts, batch_size=args.per_device_eval_batch_size, **options).float().cpu()


def fit_width(model: SentenceTransformer, width: int) -> None:
    """Let the student's embeddings be as wide as all targets together, by a linear map where they are not."""
    if isinstance(model[-1], Normalize):
        del model[len(model) - 1]  # several targets of length 1, side by side, are not of length 1
    if (dimension := model.get_embedding_dimension()) != width:
        model.append(Dense(dimension, width, activation_function=nn.Identity()))


class Part(nn.Module):
    """A teacher's part of the student's embedding."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, embeddings: Tensor) -> Tensor:
        return embeddings[:, self.columns]


def law(
    model: SentenceTransformer, targets: Mapping[str, Tensor], script: ScriptArguments, seed: int
) -> CachedMultiEncoderMMDLoss:
    """The MMD from each teacher's reference, of the student's part for that teacher."""
    if script.references and len(script.references) != len(targets):
        raise UsageError(f"--references has {len(script.references)} files for {len(targets)} teacher(s).")
    references, heads, begin = {}, {}, 0
    for index, (name, rows) in enumerate(targets.items()):
        key, end = f"{index + 1} {Path(name).name}", begin + rows.shape[1]
        try:
            if script.references:
                references[key] = NystromReference.load(script.references[index])
            else:
                references[key] = NystromReference.fit(rows, landmarks=script.landmarks, seed=seed, name=key)
        except (OSError, ValueError) as error:
            raise UsageError(f"The reference of the teacher {name!r} cannot be had: {one_line(error)}") from error
        if references[key].sample_shape != (rows.shape[1],):
            raise UsageError(
                f"--references: {script.references[index]!r} is of features of shape "
                f"{references[key].sample_shape}, but the teacher {name!r} gives ({rows.shape[1]},)."
            )
        heads[key], begin = Part(slice(begin, end)), end
    return CachedMultiEncoderMMDLoss(model, MultiEncoderMMD(references), heads)


def scores_of(teacher: SentenceTransformer, held_out: Dataset, args: TrainingArguments) -> str:
    """What a teacher itself scores on the held-out pairs."""
    metrics = RetrievalEvaluator(held_out, name="t", batch_size=args.per_device_eval_batch_size)(teacher)
    chosen = {"R@1": "recall@1", "R@10": "recall@10", "MRR": "mrr"}
    return ", ".join(f"{label} {metrics[f't_query_to_answer_{name}']:.3f}" for label, name in chosen.items())


if __name__ == "__main__":
    run(main)
