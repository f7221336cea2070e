"""Find the user's code among running functions, and write its lines in one way in all results.

Imports nothing heavy: each Python process of a command starts with this.
"""

from __future__ import annotations

import os
from pathlib import Path

from autotune.config.plan import INSTALLED

_OTHERS = (
    str(Path(__file__).resolve().parents[1]) + os.sep,
    str(Path(os.__file__).parent) + os.sep,
    "<",
)
"""Beginnings of file names that are not the user's: autotune's, Python's own library, and code
without a file."""


def is_users(file: str) -> bool:
    """Return whether a file of running code is the user's: no package, no library, not autotune."""
    return not file.startswith(_OTHERS) and INSTALLED.isdisjoint(Path(file).parts)


def shown_line(file: str, line: int) -> str:
    """Return a line of code as results show it, such as "pkg/train.py:41".

    Args:
        file: Its file. Below the working folder it is shown from there, else by its name alone.
        line: Number of the line.
    """
    path = Path(file)
    try:
        folder = Path.cwd()
    except OSError:  # it may have been removed
        return f"{path.name}:{line}"
    path = folder / path
    shown = path.relative_to(folder) if path.is_relative_to(folder) else path.name
    return f"{shown}:{line}"
