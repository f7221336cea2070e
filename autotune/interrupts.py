"""Ctrl-C that is not lost: an interrupt that Python would drop is sent again.

A KeyboardInterrupt that is raised inside a weakref's callback or a `__del__` is printed and ignored; a study's database
layer runs such callbacks all the time. Source: Python's documentation of sys.unraisablehook.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

__all__ = ["kept_interrupts"]

_AGAIN_AFTER_S = 0.05  # out of the callback by then


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """While entered, interrupts that are dropped come again; other exceptions that are ignored go where they went."""
    before = sys.unraisablehook

    def send_again(unraisable: Any) -> None:
        if unraisable.exc_type is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        timer = Timer(_AGAIN_AFTER_S, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before
