"""What is wrong with the data that somebody gave."""


class DataError(ValueError):
    """Data that cannot be trained on as it is: the message says what was found, what was expected and what to do."""


class BrokenClipError(DataError):
    """A video that cannot be decoded."""
