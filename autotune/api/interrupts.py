"""Ctrl-C that is neither lost nor harmful: what Python would drop is sent again; while results are saved none is heard.

A KeyboardInterrupt that is raised inside a weakref's callback or a `__del__` is printed and ignored; a study's database
layer runs such callbacks all the time. Source: Python's documentation of sys.unraisablehook.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from typing import Any

__all__ = ["kept_interrupts", "without_interrupts"]

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


@contextmanager
def without_interrupts() -> Iterator[None]:
    """While entered, Ctrl-C and SIGTERM do nothing: what a search has found must be saved to the end."""
    if current_thread() is not main_thread():  # no other thread gets or handles signals
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
