"""What makes a step fast without changing its gradients, each with a switch.

All are on. A switch is for measuring what a lever is worth, for testing that it changes nothing, and for ruling one
out when a training run looks wrong. What a user chooses by an argument (``sort_by_length``,
``mini_batch_num_tokens``, ``kept_graphs``) has no switch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass
class Levers:
    """The levers, as they stand.

    Attributes:
        embedding_rows: replays add the gradient of word embeddings by rows, :mod:`.replay.embedding_rows`.
        symmetric_products: InfoNCE in both directions makes each product of features once for both,
            :mod:`.objectives.infonce_symmetric`.
    """

    embedding_rows: bool = True
    symmetric_products: bool = True


LEVERS = Levers()
"""What the package reads, whenever it could use one; the same for all threads."""


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Within it, the named levers are off: forward and backward of a loss must both lie within.

    Raises:
        ValueError: no lever has that name.
    """
    known = [field.name for field in fields(Levers)]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"names: found {', '.join(map(repr, unknown))}, expected any of {', '.join(known)}.")
    before = {name: getattr(LEVERS, name) for name in names}
    try:
        for name in names:
            setattr(LEVERS, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(LEVERS, name, value)
