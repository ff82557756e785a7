"""Cards: what a trained model says of itself, in words, numbers and pictures."""

from st_cached_extras.cards.arms_card import arms_card
from st_cached_extras.cards.figures import Retrieved, retrieval_figure
from st_cached_extras.cards.fingerprint import describe_dataset
from st_cached_extras.cards.generator_card import save_generator_card
from st_cached_extras.cards.generator_figures import contact_sheet_figure, generator_curves_figure
from st_cached_extras.cards.model_card import ReplayModelCardData, command_line, markdown_table
from st_cached_extras.cards.training_facts import layers_without_backward, machine, training_facts

__all__ = [
    "ReplayModelCardData",
    "Retrieved",
    "arms_card",
    "command_line",
    "contact_sheet_figure",
    "describe_dataset",
    "generator_curves_figure",
    "layers_without_backward",
    "machine",
    "markdown_table",
    "retrieval_figure",
    "save_generator_card",
    "training_facts",
]
