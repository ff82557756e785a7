"""The card of a model that is the best of several ways to train it through hardware without a backward."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from st_cached_extras.cards.fingerprint import describe_dataset
from st_cached_extras.cards.model_card import ReplayModelCardData, command_line


def arms_card(
    hardware: str,
    arm: str,
    *,
    scores: Sequence[dict[str, Any]],
    figure: str | os.PathLike,
    run: Mapping[str, Any],
    data: Mapping[str, Dataset],
    model_id: str | None = None,
) -> ReplayModelCardData:
    """Card data of the arm whose model is kept.

    Args:
        hardware: what it was trained through, such as "simulated int8 layers".
        arm: name of the arm, as in the table.
        scores: the table, a row for each arm.
        figure: the table as a picture.
        run: facts of the run; those that are None or empty are left out.
        data: datasets of pairs, by what they were used for.
        model_id: id on the Hub.
    """
    return ReplayModelCardData(
        model_name=f"Text encoder trained through {hardware}",
        model_id=model_id,
        summary=f"Trained through {hardware} without a backward; the arm {arm!r} of the table.",
        command=command_line(),
        scores=list(scores),
        figures=[(os.fspath(figure), "How often a held-out query finds its answer first, by the way of training.")],
        run={"Arm": arm, **{label: fact for label, fact in run.items() if fact not in (None, "")}},
        data={use: describe_dataset(pairs, "pairs") for use, pairs in data.items()},
        limits=[
            "The hardware is a simulation: noise, medium and converter are those of the code, not of an instrument.",
            "One seed; the scores are those of the held-out pairs named above.",
        ],
        untested=["A real instrument.", "Other data, seeds and scales of the model than those named here."],
    )
