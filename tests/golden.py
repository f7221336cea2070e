"""Compare a rendered text with the file that keeps it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

__all__ = ["assert_golden"]


def assert_golden(path: Path, text: str) -> None:
    """Fail with a diff where the text differs from the file; with AUTOTUNE_UPDATE_GOLDEN set, write the file."""
    if os.environ.get("AUTOTUNE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8")
    diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(path), "rendered now", lineterm="")
    assert text == expected, "\n".join(diff)
