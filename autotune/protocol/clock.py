"""The clock that a search and its launchers read, and the longest deadline: one seam, so that tests can move both.

What is measured inside a trial has a finer clock of its own (time.perf_counter). Neither follows the time of day: a
clock that is set forward or back, by hand or by NTP, changes no deadline and no figure.
"""

from __future__ import annotations

import os
import time

__all__ = ["LONGEST_DEADLINE", "deadline_within", "monotonic"]

LONGEST_DEADLINE = "AUTOTUNE_TEST_LONGEST_DEADLINE_S"
"""Environment variable, for tests alone: no deadline is longer than so many seconds, so that a hang costs seconds."""


def monotonic() -> float:
    """Seconds of a clock that never goes back and that nobody sets; it stands still while the machine sleeps."""
    return _read()


def deadline_within(seconds: float) -> float:
    """A deadline as it counts here: as it is, or the longest one that a test allows."""
    longest = os.environ.get(LONGEST_DEADLINE)
    return seconds if longest is None else min(seconds, float(longest))


def _read() -> float:
    return time.monotonic()
