"""Cards: what a trained model says of itself, in words, numbers and pictures."""

from st_cached_extras.cards.figures import Retrieved, retrieval_figure
from st_cached_extras.cards.model_card import ReplayModelCardData, command_line, describe_dataset

__all__ = ["ReplayModelCardData", "Retrieved", "command_line", "describe_dataset", "retrieval_figure"]
