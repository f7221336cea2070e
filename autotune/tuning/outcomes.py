"""What a search has measured and proven: values that later stages read, never the live objects that made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.analysis.decisions.evidence import Evidence
from autotune.messages.trials import trial_disturbed
from autotune.note import Note
from autotune.records.ceilings import CeilingBook
from autotune.records.run_spread import RunSpread
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialRecord, TrialResult, believed_score, best_of
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["SearchOutcome", "disturbances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """What a search has measured, to its end or up to an interruption."""

    space: ResolvedSpace
    records: tuple[TrialRecord, ...]
    """Every measured trial, in order; number 0 is the baseline."""
    ceilings: CeilingBook
    """What loader and device reach alone, as far as it was measured."""
    notes: tuple[Note, ...]
    ended_because: Note | None
    """Why no further trial ran; None where it was interrupted."""
    expected_s: float | None
    """What the search was expected to take before its first trial; None where it went on from an interruption."""
    spread: RunSpread
    """Between runs of the same settings, as far as it was learned."""
    evidence: Evidence
    """Every run that ended well."""
    believed: Mapping[int, float]
    """Of feasible trials, by number: the logarithm of the rate that is believed from all that was measured."""
    proven: Mapping[int, float] = field(default_factory=dict)
    """By trial, the logarithm of the gain over the baseline that is proven."""
    is_settled: bool = False
    """It is decided whether the leader beats the baseline, or the time for that was used up."""
    run_s: float = 0.0
    """What a further run usually takes, in seconds."""
    build_s: float = 0.0
    """As TrialRunner has it."""
    is_brief: bool = False
    """As TimeBudget has it."""
    stresses: Mapping[int, StressFigures] = field(default_factory=dict)
    """What stress runs that were passed have shown, by the trial's number."""
    overloaded: tuple[int, ...] = ()
    """Trials that a stress run refutes, in the order in which they were run."""
    is_complete: bool = False
    """The search, its stress run included, came to its end: nothing interrupted it."""

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline's record; None where it did not come that far."""
        return next((record for record in self.records if record.number == 0), None)

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score, as far as it is believed."""
        return best_of(self.records, self.believed_score)

    @property
    def settled(self) -> int | None:
        """The trial with the largest proven gain; None without a proof."""
        return max(self.proven, key=self.proven.__getitem__, default=None)

    def batch_ratio(self, config: TrainingConfig) -> float:
        """A configuration's global batch over the baseline's."""
        return config.global_batch_ratio(self.space.baseline)

    def believed_score(self, record: TrialRecord) -> float:
        """A feasible trial's score at the rate that is believed of it."""
        return believed_score(record, self.believed)


def disturbances(number: int, result: TrialResult) -> Iterator[Note]:
    """For the report: that somebody has killed or stopped a process of a trial, and what came of it."""
    for remark in () if result.measurement is None else result.measurement.remarks:
        if remark.code in {"rerun_after_signal", "window_stopped"}:
            yield trial_disturbed(number, remark)
