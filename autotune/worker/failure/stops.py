"""Whether this process or one that it has started was stopped (SIGSTOP) while it was measured.

A stop looks like slow training or a slow loader, and no figure tells it from that. The kernel tells: a process that
goes on gets SIGCONT, and its parent can ask which of its children were stopped or went on. Nothing is done in between.
Source: man 7 signal; man 2 waitid, WCONTINUED.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from autotune.note import Note, note

__all__ = ["StopProbe"]


class StopProbe:
    """Watches from `start` to `stop`, in the main thread alone: elsewhere, and not on Linux, nothing is seen."""

    def __init__(self) -> None:
        self._was_stopped, self._is_watching = False, False
        self._before: Any = None

    def start(self) -> None:
        """Watch from now on; what was before does not count."""
        with suppress(ValueError, AttributeError):  # not the main thread, or no such signal
            self._before = signal.signal(signal.SIGCONT, self._note)
            self._is_watching = True
        _children_stopped()
        self._was_stopped = False

    def stop(self) -> Iterator[Note]:
        """Watch no more; the remark on a window in which something was stopped."""
        if self._is_watching:
            not_pythons = self._before is None
            signal.signal(signal.SIGCONT, signal.SIG_DFL if not_pythons else self._before)
            self._is_watching = False
        if _children_stopped() or self._was_stopped:
            yield note("window_stopped")

    def _note(self, number: int, frame: Any) -> None:
        self._was_stopped = True
        if callable(self._before):  # the user's own
            self._before(number, frame)


def _children_stopped() -> bool:
    """Whether a child was stopped or went on since the last call."""
    was_stopped = False
    with suppress(ChildProcessError, AttributeError):  # there is none, or no such call
        while os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None:
            was_stopped = True
    return was_stopped
