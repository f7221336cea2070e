"""The time that a search has; the last part of it belongs to the confirmation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

__all__ = ["Clock"]

_CONFIRMATION_SHARE = 0.3


@dataclass(slots=True)
class Clock:
    """The time of a search."""

    timeout_s: float | None
    writing_s: float = field(default=0.0, kw_only=True)
    """Kept at the end to judge and to write what was found."""
    started: float = field(default_factory=monotonic)
    now: Callable[[], float] = monotonic

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self.now() - self.started

    @property
    def left_s(self) -> float | None:
        """Seconds until the last run is to have ended, just before the time-out; None where there is none."""
        return None if self.timeout_s is None else max(0.0, self.timeout_s - self.writing_s - self.elapsed_s)

    @property
    def left_for_trials_s(self) -> float | None:
        """Seconds until the confirmation must begin."""
        return None if self.timeout_s is None else max(0.0, (1 - _CONFIRMATION_SHARE) * self.timeout_s - self.elapsed_s)
