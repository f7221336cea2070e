"""Paths as scripts give them, and the errors that are raised about them."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["AnyPath", "ErrorsName", "error_of", "is_descriptor", "is_dots", "parent_of", "text_of"]

AnyPath = str | bytes | os.PathLike[Any]


class ErrorsName:
    """Have OSErrors within a block name the paths that the script gave."""

    def __init__(self, path: AnyPath | None, other: AnyPath | None = None) -> None:
        self._paths = path, other

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            error.filename, error.filename2 = self._paths


def text_of(path: AnyPath) -> str:
    """Return a path as text."""
    return os.fsdecode(path)


def is_descriptor(path: object) -> bool:
    """Return whether a file is given by its descriptor."""
    return isinstance(path, int) or (hasattr(path, "__index__") and not isinstance(path, str | bytes))


def parent_of(logical: str) -> str:
    """Return the folder of a logical path; the root is the empty text."""
    return logical[: logical.rfind("/")] if logical else ""


def error_of(number: int) -> OSError:
    """Return the exception that the system's call would raise."""
    return OSError(number, os.strerror(number))


def is_dots(text: str) -> bool:
    """Return whether a path ends in no name: `/`, `.` or `..`."""
    return text.rstrip("/").rpartition("/")[2] in {"", ".", ".."}
