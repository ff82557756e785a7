"""A user's mistake, told in one line."""


class UsageError(ValueError):
    """Arguments that a recipe cannot go by: the message says which, what was found, and what to change."""
