"""The end of every recipe: what the model is worth, said in its card, shown in a figure, saved, and pushed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset

from st_cached_extras.cards import (
    ReplayModelCardData,
    describe_dataset,
    markdown_table,
    retrieval_figure,
    training_facts,
)
from st_cached_extras.cards.model_card import is_local
from st_cached_extras.distributed.trainer import ReplaySentenceTransformerTrainer
from st_cached_extras.evaluation import RetrievalEvaluator
from st_cached_extras.recipes.hub import Push, push_folder

SCORE_NOTE = (
    "In brackets: 95 % intervals over queries, by bootstrap. They say nothing of other seeds or data, and one without "
    "width only says that all queries came out alike. Chance is answers in random order; a wrong answer with the same "
    "score as the right one counts as ahead of it."
)
MAX_K = 20  # of the recall curves


def finish(
    trainer: ReplaySentenceTransformerTrainer,
    card: ReplayModelCardData,
    evaluators: Sequence[RetrievalEvaluator],
    *,
    train: Dataset | IterableDataset | Mapping[str, Any],
    unit: str = "pairs",
    push: Push | None = None,
    facts: Mapping[str, Any] | None = None,
    sources: Sequence[str] | None = None,
) -> Path:
    """Evaluates the trained model, writes its card and figure, saves all in ``OUTPUT_DIR/final``, prints, and pushes.

    Call it on all ranks, last. The folder appears whole, in place of one that was there.

    Args:
        trainer: after training; its evaluators are those below.
        card: the model's card data, with what the recipe alone can say: name, summary, command, limits.
        evaluators: on held-out data.
        train: what was trained on, by name if several.
        unit: what a row is, for the card.
        push: where to push to, from `take_push`; None for nowhere.
        facts: more facts of the run, for the card.
        sources: the ids or paths of the datasets in ``train``, in their order; the card links those on the Hub.

    Returns:
        The folder of the model.

    Raises:
        UsageError: the push failed; the model is saved.
    """
    folder = Path(trainer.args.output_dir)
    final, unfinished = folder / "final", folder / ".final.unfinished"
    _evaluate(trainer)
    run = {**training_facts(trainer, unit), **(facts or {})}
    if trainer.is_world_process_zero():
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        _fill_in(card, evaluators, train, unit, run)
        _link(card, sources or ())
        figure, caption = _figure(unfinished / "retrieval.png", evaluators)
        others = [other for other in card.figures if Path(other[0]).name != figure.name]
        card.figures = [*others, (str(figure), caption)]
        if push is not None:
            card.set_model_id(push.repo_id)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(unfinished))  # on all ranks: some engines leave each of them a part of the model
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle, and of no use to who loads the model
        _replace(final, unfinished)
        card.figures = [*others, (str(final / figure.name), caption)]  # for a save of the model to come
        print(f"\n{as_text(card.scores)}\n\nmodel   {final}\ncard    {final / 'README.md'}")
        for path, _ in card.figures:
            print(f"figure  {final / Path(path).name}")
        if push is not None:
            print(f"pushed  {push_folder(final, push)}")
    return final


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for the terminal, its columns in line."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown_table(rows).splitlines()]
    del cells[1:2]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _evaluate(trainer: ReplaySentenceTransformerTrainer) -> None:
    """Score the model as it is now, unless the last thing that this run did was that."""
    args, state = trainer.args, trainer.state
    scored = [entry["step"] for entry in state.log_history if "eval_runtime" in entry]
    # A checkpoint brings its log along, and not what the evaluators found.
    if args.load_best_model_at_end or args.resume_from_checkpoint or scored[-1:] != [state.global_step]:
        trainer.evaluate()


def _fill_in(
    card: ReplayModelCardData,
    evaluators: Sequence[RetrievalEvaluator],
    train: Dataset | IterableDataset | Mapping[str, Any],
    unit: str,
    run: Mapping[str, Any],
) -> None:
    card.scores = [row for evaluator in evaluators for row in evaluator.rows()]
    card.score_note = SCORE_NOTE
    card.run = {**card.run, **run}
    card.ir_model = True
    held_out = {evaluator.name.replace("_", " "): evaluator for evaluator in evaluators}
    card.data = {
        "Training": describe_dataset(train, unit),
        **{f"Evaluation, {name}": describe_dataset(evaluator.pairs, unit) for name, evaluator in held_out.items()},
    }
    largest = max(max(evaluator.answers_of.values()) for evaluator in evaluators)
    untested = [
        f"Other data than the splits above ({', '.join(held_out)}): other domains, languages and styles.",
        f"Retrieval among more than {largest:,} answers: it gets harder with their number.",
        "Other seeds: this is one run.",
        "Anything but retrieval, such as clustering or classification.",
        "What the model has taken over of the biases in its data.",
    ]
    card.untested += [item for item in untested if item not in card.untested]


def _link(card: ReplayModelCardData, sources: Sequence[str]) -> None:
    """Name the datasets that came from the Hub, which `datasets` does not remember."""
    for entry, source in zip(card.train_datasets, sources, strict=False):
        if not is_local(source):
            entry["name"] = entry["id"] = source
    card.train_datasets = card.validate_datasets(card.train_datasets)


def _figure(path: Path, evaluators: Sequence[RetrievalEvaluator]) -> tuple[Path, str]:
    """The figure and its caption: recall of all splits, and clips or images that queries of the last one bring up."""
    names = {evaluator.name.replace("_", " "): evaluator for evaluator in evaluators}
    ranks = {
        name: (evaluator.first.ranks[evaluator.forward], evaluator.last.ranks[evaluator.forward])
        for name, evaluator in names.items()
    }
    chance = {name: evaluator.chance_of_recall(evaluator.forward, MAX_K) for name, evaluator in names.items()}
    split, shown = list(names.items())[-1]
    query, answer = shown.queries.column, shown.answers.column
    shows_answers = shown.queries.texts is not None and shown.answers.texts is None
    retrieved = shown.retrieved(queries=8, answers=3) if shows_answers else ()
    captions_are = f"{query}, {split}"
    figure = retrieval_figure(path, retrieved, ranks, chance, captions_are=captions_are, answers_are=answer)
    caption = f"How often the right {answer} is among the k best, before and after training."
    if shows_answers:
        caption = (
            f"Left: the best of {len(shown.answers)} for {len(retrieved)} queries of {split!r}, right ones framed in "
            f"green. Right: {caption[0].lower()}{caption[1:]}"
        )
    return figure, caption


def _replace(final: Path, unfinished: Path) -> None:
    """Put the new folder in place of the old one."""
    old = final.with_name(".final.old")
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        os.replace(final, old)
    os.replace(unfinished, final)
    if old.exists():
        shutil.rmtree(old)
