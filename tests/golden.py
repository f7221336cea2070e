"""Golden files: what renderers make of known input, kept in tests/report/golden for people to read and judge.

A change of words changes these files, by `pytest tests/report --update`, and the code of no test.
"""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

__all__ = ["GOLDEN", "assert_golden"]

GOLDEN = Path(__file__).parent / "report" / "golden"
is_updating = False
"""Set by conftest from `--update`: golden files are written in place of compared."""


def assert_golden(name: str, text: str) -> None:
    """Fail with a diff unless the golden file of this name, "terminal/rich.txt", holds this text."""
    path = GOLDEN / name
    if is_updating:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != golden:
        diff = unified_diff(golden.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
        remedy = "If it should read so: pytest tests/report --update"
        pytest.fail("\n".join([*diff, "", remedy]), pytrace=False)
