"""Let a profiler that this process starts read its memory, and that of its loader workers.

Where Linux's security module Yama is on, a process may read the memory of its descendants alone,
unless these allow it; a profiler is no ancestor of the process that starts it. Imports nothing
heavy: loader workers start with this.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
"""Options of prctl. Source: linux/prctl.h."""


@dataclass(slots=True)
class _Reading:
    """Permission in this process."""

    root: int = 0
    """Process whose descendants may read; 0 for none."""
    is_at_fork: bool = False
    """Forked processes give the permission too: a fork does not inherit it."""


_READING = _Reading()


def allow_reading(root: int | None = None) -> None:
    """Let the descendants of a process read the memory of this one, and of those forked from now on.

    Call it before loader workers start. Without Yama it has no effect.

    Args:
        root: The process that starts the profiler; this one by default.
    """
    _READING.root = os.getpid() if root is None else root
    _apply()
    if not _READING.is_at_fork:
        _READING.is_at_fork = True
        os.register_at_fork(after_in_child=_apply)


def forbid_reading() -> None:
    """Take the permission back in this process; those that it started keep it until they end."""
    _READING.root = 0
    _apply()


def _apply() -> None:
    with suppress(OSError, AttributeError):  # a C library without prctl
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_READING.root), 0, 0, 0)
