"""A search's recommendation and its evidence: the trials that were compared, and the ratios of their throughput."""

from __future__ import annotations

from typing import Literal

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.records.measurement import Interval
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.space.learning_rate import LrAdvice

__all__ = ["LargerBatch", "Recommendation", "Verdict"]

Verdict = Literal["faster", "already_best", "unconfirmed", "baseline_infeasible"]


class LargerBatch(FrozenModel):
    """The best at a larger global batch than the baseline's, against the fastest at the baseline's own."""

    config: TrainingConfig
    """Ready to use: its learning rate is scaled to its global batch."""
    number: int
    """Trial that measured it."""
    speedup: Interval | None
    """Its ratio to the baseline; None where the baseline is no reference."""
    over_same_batch: Interval | None
    """Its rate over that of the fastest at the baseline's global batch; None where none was feasible at that."""
    is_worth_it: bool
    """It beats the fastest at that batch beyond noise, and by what the objective asks for; or there is none."""
    break_even: Interval | None
    """The gradient noise scale in samples above which it trains sooner: 0 at any; an infinite upper end where it may be
    no faster. None where it is not faster, or none was feasible at the baseline's batch."""

    @property
    def is_faster(self) -> bool:
        """It has more samples/s than that one, beyond noise."""
        return self.over_same_batch is not None and self.over_same_batch.low > 1


class Recommendation(FrozenModel):
    """The configuration to use, and what speaks for it."""

    config: TrainingConfig
    """Ready to use: its learning rate is scaled to its global batch."""
    number: int
    """Trial that measured it."""
    verdict: Verdict
    """faster: it is proven to beat the baseline, at an error that is kept. already_best: nothing that was tried is
    likely to be worth a change. unconfirmed: it is not decided."""
    speedup: Interval | None
    """The claimed gain over the baseline, from all runs of the search: median and 95 % interval of what is believed,
    shrunk as far as luck goes. None where the baseline is no reference."""
    measured_speedup: Interval | None = None
    """The ratio as measured; None for the baseline itself."""
    gain_probability: float | None = None
    """How likely it is to be faster than the baseline at all; None where the baseline is no reference."""
    more_s: float | None = None
    """Seconds of further runs that should decide it; None where it is decided, or nothing says."""
    lr_advice: LrAdvice
    same_batch: TrainingConfig | None = None
    """The best configuration that keeps the baseline's global batch."""
    same_batch_number: int | None = None
    """Trial that measured it; None where there is none."""
    same_batch_speedup: Interval | None = None
    """Its ratio to the baseline; None where the baseline is no reference."""
    larger_batch: LargerBatch | None = None
    """The best that has a larger global batch, which need not be worth it; None where none was measured."""
    reasons: tuple[Note, ...] = ()
    """Why this one."""
    confirmations: tuple[TrialRecord, ...] = ()
    """The baseline and what is recommended, and others that ran more than once."""
    stress: StressFigures | None = None
    """The recommended configuration trained for longer on the largest samples; None where that was not run."""
    overloaded: tuple[int, ...] = ()
    """Trials that failed on the largest samples: since then only what was run on them may win, and the baseline."""
    is_outrun: bool = False
    """Something faster was measured that may not be used: refused, over the limit, or failed when it was run again."""
