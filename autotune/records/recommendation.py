"""What a search recommends, and the evidence: configurations measured again in turns, and their rates as ratios."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Literal

from pydantic import Field

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.records.measurement import Measurement
from autotune.records.stress_check import StressFigures
from autotune.settings.training_config import TrainingConfig
from autotune.space.learning_rate import LrAdvice

__all__ = ["Confirmation", "Ratio", "Recommendation"]


class Confirmation(FrozenModel):
    """A configuration measured again, once in each round; None where a round's run failed."""

    number: int
    """The trial's number in the study; 0 is the baseline."""
    config: TrainingConfig
    rounds: tuple[Measurement | None, ...] = Field(min_length=1)
    is_feasible: bool = True
    """Every run ended well and within the memory limit."""

    @property
    def runs(self) -> tuple[Measurement, ...]:
        """The runs that ended well."""
        return tuple(run for run in self.rounds if run is not None)

    @property
    def samples_per_s(self) -> float:
        """Geometric mean of the rounds' rates."""
        return geometric_mean(run.samples_per_s for run in self.runs)


class Ratio(FrozenModel):
    """A rate over another, measured side by side, with its 95 % interval."""

    value: float
    low: float
    high: float


class Recommendation(FrozenModel):
    """The configuration to use, and what speaks for it."""

    config: TrainingConfig
    """Ready to use: its learning rate is scaled to its global batch."""
    number: int
    """Trial that measured it."""
    verdict: Literal["faster", "already_best", "unconfirmed", "baseline_infeasible"]
    speedup: Ratio | None
    """Against the baseline, measured in turns with it; None where the baseline is no reference."""
    lr_advice: LrAdvice
    same_batch: TrainingConfig | None = None
    """The best configuration that keeps the baseline's global batch."""
    same_batch_number: int | None = None
    same_batch_speedup: Ratio | None = None
    reasons: tuple[Note, ...] = ()
    """Why this one."""
    confirmations: tuple[Confirmation, ...] = ()
    """Every finalist's runs, raw."""
    stress: StressFigures | None = None
    """The recommended configuration trained for longer on the largest samples; None where that was not run."""
    overloaded: tuple[int, ...] = ()
    """Trials that failed on the largest samples: since then only what was run on them may win, and the baseline."""
    is_outrun: bool = False
    """Something faster was measured that may not be used: refused, over the limit, or failed when it was run again."""
