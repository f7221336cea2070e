"""Words about paths and errors that all of this room shares. Receives and hands on text alone."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["AnyPath", "Told", "error_of", "is_descriptor", "is_dots", "parent_of", "text_of"]

AnyPath = str | bytes | os.PathLike[Any]


class Told:
    """Tells an error's paths as the script gave them."""

    def __init__(self, path: AnyPath, other: AnyPath | None = None) -> None:
        self._paths = path, other

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            error.filename, error.filename2 = self._paths


def text_of(path: AnyPath) -> str:
    """A path as text."""
    return os.fsdecode(path)


def is_descriptor(path: object) -> bool:
    """Whether a file is given by its descriptor."""
    return isinstance(path, int) or (hasattr(path, "__index__") and not isinstance(path, str | bytes))


def parent_of(logical: str) -> str:
    """The folder of a logical path; the root is the empty text."""
    return logical[: logical.rfind("/")] if logical else ""


def error_of(number: int) -> OSError:
    """The exception that the system's call would raise."""
    return OSError(number, os.strerror(number))


def is_dots(text: str) -> bool:
    """Whether a path ends in no name: `/`, `.` or `..`."""
    return text.rstrip("/").rpartition("/")[2] in {"", ".", ".."}
