"""Tracks a script's other loaders: an evaluation is no training, a second loader in step with the first one is.

Comes in: when such a loader is begun, gives a batch, or ends, when an optimizer steps, and when a batch of the training
loader is asked for. Goes out: seconds that belong to no block, and how many of them were training on such a loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from autotune.settings.workload import LoaderSite

__all__ = ["Beside"]

_IN_A_ROW = 2
"""Batches of such loaders without a training batch between them that make an evaluation, if a loader does not end by
itself: our convention. Loaders that are iterated in step (zip) give one at a time."""


@dataclass(slots=True)
class Beside:
    """The other loaders of a script whose training loader is known."""

    trained_s: float = 0.0
    """Seconds of training on other loaders, all of which are left out."""
    waited_s: float = 0.0
    """Seconds of them in which it waited for a batch."""
    site: LoaderSite | None = None
    """The last of these loaders, where its place is known."""
    steps: int = 0
    """Optimizer steps on its batches, with no batch of the training loader since."""
    _turn_since: float | None = None
    """When the first of these steps was made."""
    _seconds: float = 0.0
    _since: float | None = None
    """When one was begun, with no training batch since."""
    _until: float = 0.0
    _batches: int = 0
    _since_training: int = 0
    """Batches of other loaders since the last one of the training loader, whenever they were begun."""
    _trains: bool = False
    _waited_s: float = 0.0

    def begin(self) -> None:
        """A loader is about to be iterated."""
        if self._since is None:
            self._since, self._batches, self._trains, self._waited_s = perf_counter(), 0, False, 0.0

    @property
    def turn_s(self) -> float:
        """Seconds since the first of these steps."""
        return 0.0 if self._turn_since is None else perf_counter() - self._turn_since

    def on_batch(self, waited_s: float) -> None:
        """It has given a batch, after some seconds."""
        self._batches, self._since_training, self._until = self._batches + 1, self._since_training + 1, perf_counter()
        self._waited_s += waited_s

    def on_step(self) -> None:
        """An optimizer has stepped."""
        if self._since_training:
            self._trains, self.steps = True, self.steps + 1
            self._turn_since = self._turn_since or perf_counter()

    def end(self) -> None:
        """It has come to its end by itself."""
        self._leave_out(perf_counter())

    def on_training(self) -> None:
        """A batch of the training loader is asked for."""
        if self._batches >= _IN_A_ROW:
            self._leave_out(self._until)
        self._since = self._turn_since = None
        self.steps = self._since_training = 0

    def _leave_out(self, until: float) -> None:
        if self._since is not None:
            self._seconds += until - self._since
            if self._trains:
                self.trained_s, self.waited_s = self.trained_s + until - self._since, self.waited_s + self._waited_s
        self._since = None

    def add(self, seconds: float) -> None:
        """Leave out seconds in which nobody could tell what was trained on."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds that were no training, since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
