"""Pairs of texts of real lengths that every machine has: what Python packages say of their own names."""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm.auto import tqdm


def docstring_pairs(packages: Sequence[str], *, show_progress_bar: bool = False) -> Iterator[tuple[str, str]]:
    """(name of a class or function in words, first paragraph of its docstring), of installed packages.

    Files are read, not imported; those that are no valid Python are passed over, and packages that are not installed.

    Args:
        packages: their names, in order.
        show_progress_bar: show a progress bar over the files.
    """
    site_packages = Path(sysconfig.get_paths()["purelib"])
    files = [file for package in packages for file in sorted((site_packages / package).rglob("*.py"))]
    for file in tqdm(files, desc="Read docstrings", leave=False, disable=not show_progress_bar):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (docstring := ast.get_docstring(node)):
                name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", node.name).strip().lower()
                paragraph = " ".join(docstring.split("\n\n")[0].split())
                if name and len(paragraph.split()) > 2:
                    yield name, paragraph
