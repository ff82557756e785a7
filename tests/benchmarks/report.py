"""What a benchmark has printed, as data: the machine, the command and every table."""

from __future__ import annotations

import re
from typing import Any


def read_report(markdown: str) -> dict[str, Any]:
    """Parse the output of one command.

    Returns:
        ``machine`` and ``command``, as :func:`~tests.benchmarks.measure.header` prints them, and ``tables``: of each
        its ``title`` (the line of text before it), ``columns``, and ``rows`` by column, numbers as numbers.
    """
    lines = markdown.splitlines()
    tables: list[dict[str, Any]] = []
    title, open_table = "", None
    for line in lines:
        if not line.startswith("|"):
            open_table = None
            title = line.strip("# ") or title
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if open_table is None:
            open_table = {"title": title, "columns": cells, "rows": []}
            tables.append(open_table)
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            open_table["rows"].append(dict(zip(open_table["columns"], map(_as_number, cells), strict=True)))
    command = next((line for line in lines if line.startswith("python -m ")), "")
    machine = next((line for line in lines if "Python 3" in line), "")
    return {"machine": machine, "command": command, "tables": tables}


def find_table(reports: list[dict[str, Any]], *columns: str) -> list[dict[str, Any]]:
    """The rows of all tables that have these columns."""
    return [
        row
        for report in reports
        for table in report["tables"]
        if set(columns) <= set(table["columns"])
        for row in table["rows"]
    ]


def _as_number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
