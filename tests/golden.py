"""Golden files: what renderers make of known input, kept for people to read and judge.

A change of words changes these files, by `pytest TEST_FILE --update`, and the code of no test.
"""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

__all__ = ["GOLDEN", "assert_golden"]

GOLDEN = Path(__file__).parent / "report" / "golden"
is_updating = False
"""Set by conftest from `--update`: golden files are written in place of compared."""


def assert_golden(name: str | Path, text: str) -> None:
    """Fail with a diff unless the golden file holds this text.

    Args:
        name: A path, or a name within tests/report/golden, such as "terminal/rich.txt".
        text: What was rendered.
    """
    path = GOLDEN / name
    if is_updating:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != golden:
        diff = unified_diff(
            golden.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
        )
        remedy = "If it should read so: run this test with --update"
        pytest.fail("\n".join([*diff, "", remedy]), pytrace=False)
