"""What a script does with loaders that do not train: an evaluation is no training, a second loader in step with it is.

Comes in: when such a loader is begun, gives a batch, or ends, and when a training batch is asked for. Goes out: seconds
that are no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

__all__ = ["Beside"]

_IN_A_ROW = 2
"""Batches of such loaders without a training batch between them that make an evaluation, if a loader does not end by
itself: our convention. Loaders that are iterated in step (zip) give one at a time."""


@dataclass(slots=True)
class Beside:
    """Loaders that do not train, in a script whose training loader is known."""

    _seconds: float = 0.0
    _since: float | None = None
    """When one was begun, with no training batch since."""
    _until: float = 0.0
    _batches: int = 0

    def begin(self) -> None:
        """A loader is about to be iterated."""
        if self._since is None:
            self._since, self._batches = perf_counter(), 0

    def on_batch(self) -> None:
        """It has given a batch."""
        self._batches, self._until = self._batches + 1, perf_counter()

    def end(self) -> None:
        """It has come to its end by itself."""
        if self._since is not None:
            self._seconds += perf_counter() - self._since
        self._since = None

    def on_training(self) -> None:
        """A training batch is asked for."""
        if self._since is not None and self._batches >= _IN_A_ROW:
            self._seconds += self._until - self._since
        self._since = None

    def add(self, seconds: float) -> None:
        """Leave out seconds in which nobody could tell what was trained on."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds that were no training, since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
