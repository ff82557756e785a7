"""The rules by name. A rule answers one backward of a layer, given as a ``LayerCall``, with the input gradient.

Rules that draw are told everything that their draws may depend on, so that a run can be repeated. To add one:
``register_mode("mine", rule)``; configurations accept its name from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from st_cached_extras.zbp.config import KNOWN_MODES
from st_cached_extras.zbp.estimators import LayerCall, broadcast, estimate, exact, skip

Rule: TypeAlias = Callable[[LayerCall], Tensor]
RULES: dict[str, Rule] = {}


def register_mode(name: str, rule: Rule) -> None:
    """Make a rule known under a name.

    Raises:
        ValueError: the name is taken.
    """
    if name in KNOWN_MODES:
        raise ValueError(f"There is a mode {name!r} already; choose another name.")
    RULES[name] = rule
    KNOWN_MODES.add(name)


for _name in ("cd", "fd", "jvp", "oracle"):
    register_mode(_name, estimate)
register_mode("exact", exact)
register_mode("skip", skip)
register_mode("broadcast", broadcast)
