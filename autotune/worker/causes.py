"""An exception in one line: what a report says of it, while its traceback goes to the log."""

from __future__ import annotations

__all__ = ["cause_of"]

_LONGEST = 300


def cause_of(error: BaseException) -> str:
    """Type and first line; the last one where torch quotes the traceback of a loader worker."""
    kind = type(error).__name__
    lines = (str(error).strip() or "no message").splitlines()
    told = lines[-1].removeprefix(f"{kind}: ") if lines[0].startswith("Caught ") else lines[0]
    return f"{kind}: {told}"[:_LONGEST]
