"""How a recipe is started: mistakes of its user end it with one line that says what to change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from st_cached_extras.data.errors import DataError
from st_cached_extras.recipes.errors import UsageError


def run(main: Callable[[], None]) -> None:
    """Call ``main``. A :class:`UsageError` or :class:`DataError` becomes one line on stderr and the exit code 2.

    Any other error is one of the recipe, not of its user, and keeps its traceback.
    """
    try:
        main()
    except (UsageError, DataError) as error:
        print(f"{Path(sys.argv[0]).name}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def one_line(error: BaseException) -> str:
    """What an error says, on one line; of one that a worker of a DataLoader passed on, what the worker said."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "DataLoader worker" in lines[0]:
        return lines[-1].split(": ", 1)[-1]
    return " ".join(line.strip() for line in lines)
