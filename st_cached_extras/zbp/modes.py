"""The rules by name. A rule answers one backward of a layer, given as a ``LayerCall``, with the input gradient.

Rules that draw are told everything that their draws may depend on, so that a run can be repeated. To add one:
``register_mode("mine", rule)``; configurations accept its name from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor

from st_cached_extras.zbp.config import KNOWN_MODES
from st_cached_extras.zbp.estimators import LayerCall, broadcast, estimate, exact, skip

Rule: TypeAlias = Callable[[LayerCall], Tensor]
RULES: dict[str, Rule] = {}
# What a layer is differentiated within, by mode.
INSIDE: dict[str, Callable[[LayerCall], AbstractContextManager[Any]]] = {}
TAUGHT_BY_OUTPUT: set[str] = set()
IGNORES_SKIP: set[str] = set()


def register_mode(
    name: str,
    rule: Rule,
    *,
    inside: Callable[[LayerCall], AbstractContextManager[Any]] | None = None,
    taught_by_output: bool = False,
    ignores_skip: bool = False,
) -> None:
    """Make a rule known under a name.

    Args:
        name: what configurations call it.
        rule: from a call to the gradient of the layer's input, of that input's shape and dtype.
        inside: from a call to a context, in which the rule and autograd inside the layer run.
        taught_by_output: it reads ``call.signal``, the error at the model's output, which an ErrorTap notes.
        ignores_skip: a path around the layer passes no gradient.

    Raises:
        ValueError: the name is taken.
    """
    if name in KNOWN_MODES:
        raise ValueError(f"There is a mode {name!r} already; choose another name.")
    RULES[name] = rule
    KNOWN_MODES.add(name)
    if inside is not None:
        INSIDE[name] = inside
    if taught_by_output:
        TAUGHT_BY_OUTPUT.add(name)
    if ignores_skip:
        IGNORES_SKIP.add(name)


def inside_of(call: LayerCall) -> AbstractContextManager[Any]:
    """The context of a call's mode."""
    return INSIDE.get(call.config.mode, lambda _: nullcontext())(call)


for _name in ("cd", "fd", "jvp", "oracle"):
    register_mode(_name, estimate)
register_mode("exact", exact)
register_mode("skip", skip)
register_mode("broadcast", broadcast)
