"""Whether this process or one that it has started was stopped (SIGSTOP) while it was measured.

A stop looks like slow training or a slow loader, and no figure tells it from that. The kernel tells: a process that
goes on gets SIGCONT, and its parent SIGCHLD, and can ask which of its children were stopped or went on. It has to ask
at once: of a loader worker that ends with its epoch nothing is known any more. Nothing is done in between.
Source: man 7 signal; man 2 waitid, WCONTINUED; man 2 sigaction, SA_NOCLDSTOP.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from autotune.messages.trials import window_stopped
from autotune.note import Note

__all__ = ["StopProbe"]


class StopProbe:
    """Watches from `start` to `stop`, in the main thread alone: elsewhere, and not on Linux, nothing is seen."""

    def __init__(self) -> None:
        self._was_stopped = False
        self._before = dict[int, Any]()
        """Handlers that were there, by their signals; those of the user and of torch's loader are called as well."""

    def start(self) -> None:
        """Watch from now on; what was before does not count."""
        with suppress(ValueError, AttributeError):  # not the main thread, or no such signal
            for number in (signal.SIGCONT, signal.SIGCHLD):
                self._before[number] = signal.signal(number, self._note)
        _children_stopped()
        self._was_stopped = False

    def stop(self) -> Iterator[Note]:
        """Watch no more; the remark on a window in which something was stopped."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:  # else whoever came later calls it, and no one is lost
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if _children_stopped() or self._was_stopped:
            yield window_stopped()

    def _note(self, number: int, frame: Any) -> None:
        self._was_stopped |= number == signal.SIGCONT or _children_stopped()
        if callable(before := self._before.get(number)):
            before(number, frame)


def _children_stopped() -> bool:
    """Whether a child was stopped or went on since the last call."""
    was_stopped = False
    with suppress(ChildProcessError, AttributeError):  # there is none, or no such call
        while os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None:
            was_stopped = True
    return was_stopped
