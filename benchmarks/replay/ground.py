"""What a way of searching is tried on: a recorded surface, or a simulated machine, as methods.py sees either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autotune import TrainingConfig
from autotune.records.trial import TrialResult
from benchmarks.replay.product import Timed
from benchmarks.replay.truth import Truth

__all__ = ["Ground", "Server"]


class Server(Timed, Protocol):
    """A launcher that serves a ground, and counts."""

    trials: int
    """Trials so far, those of the confirmation included."""
    out_of_memory: int
    """Of those, how many ran out of memory or passed the limit."""
    spent_s: defaultdict[str, float]
    """Seconds of the device by the kind of the job."""
    strays: float
    """What the logarithm of each rate strays by beside what was recorded, or simulated."""


class Ground(Protocol):
    """A grid of settings, and what answers trials of them."""

    @property
    def name(self) -> str:
        """Such as "photos"."""
        ...

    @property
    def is_held_out(self) -> bool:
        """Whether no constant may be chosen on it."""
        ...

    @property
    def baseline(self) -> TrainingConfig:
        """What is run today."""
        ...

    @property
    def domains(self) -> Mapping[str, Sequence[Any]]:
        """Values of each setting."""
        ...

    @property
    def limit_bytes(self) -> int:
        """The memory limit."""
        ...

    @property
    def configs(self) -> list[TrainingConfig]:
        """Every point."""
        ...

    def visits_of(self, config: TrainingConfig) -> int:
        """How often a point was measured; 0 where its rate is known."""
        ...

    @property
    def truth(self) -> Truth:
        """The rates of the points that may be used."""
        ...

    def launcher(self, seed: int) -> Server:
        """What serves the product's search."""
        ...

    def trials_of(self, seed: int) -> Callable[[TrainingConfig], TrialResult]:
        """What runs whole trials with windows of one length, one after the other, for anybody else."""
        ...
