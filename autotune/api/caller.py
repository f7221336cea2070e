"""The caller's process: its random generators are as before, and Ctrl-C is neither lost nor harmful.

Even an import may draw from the generators. An interrupt that Python drops is sent again, and none cuts off saving
results. A KeyboardInterrupt that is raised inside a weakref's callback or a `__del__` is printed and ignored; a study's
database layer runs such callbacks all the time. Source: Python's documentation of sys.unraisablehook.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from typing import Any

__all__ = ["kept_interrupts", "kept_random_state", "without_interrupts"]


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """While entered, interrupts that Python drops are sent again; other ignored exceptions are handled as before."""
    before = sys.unraisablehook

    def send_again(unraisable: Any) -> None:
        if unraisable.exc_type is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        timer = Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))  # by then the callback that dropped it has returned
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore Python's and NumPy's global generators, and torch's for the CPU where torch is loaded already."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP while entered: the results of a search must be saved completely."""
    if current_thread() is not main_thread():  # no other thread gets or handles signals
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
