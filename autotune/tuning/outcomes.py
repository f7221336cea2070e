"""What the stages of a search hand on: values that later stages read, never the live objects that made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp

from autotune.analysis.decisions.confirmation_plan import FEWEST_ROUNDS
from autotune.analysis.decisions.run_spread import spread_of_repeats
from autotune.analysis.decisions.selection_rules import ONE_SIDED_ERROR
from autotune.note import Note, note
from autotune.records.ceilings import CeilingBook
from autotune.records.measurement import Measurement
from autotune.records.recommendation import Confirmation
from autotune.records.run_spread import RunSpread
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialRecord, TrialResult, believed_score, best_of
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["LEAST_GAIN", "ConfirmationOutcome", "SearchOutcome", "disturbances", "has_few_rounds"]

LEAST_GAIN = 0.01
"""A smaller gain, as a share of the rate, is worth neither another trial nor another round: our own convention, since
runs of the same settings differ by about as much."""


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
    prior_spread: RunSpread
    """What was known of it when the search began."""
    believed: Mapping[int, float]
    """Of feasible trials, by number: the logarithm of the rate that is believed from all that was measured."""
    build_s: float = 0.0
    """As TrialRunner has it."""
    is_brief: bool = False
    """As TimeBudget has it."""

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline's record; None where it did not come that far."""
        return next((record for record in self.records if record.number == 0), None)

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score, as far as it is believed."""
        return best_of(self.records, self.believed_score)

    @property
    def feasible_baseline(self) -> tuple[TrialRecord, ...]:
        """The baseline's trial where it is a reference, else none."""
        return () if self.baseline is None or not self.baseline.is_feasible else (self.baseline,)

    @property
    def challengers(self) -> list[TrialRecord]:
        """The trials that may beat the baseline by what is believed of both, the best first.

        That a trial's score is believed to be a little lower than the baseline's refutes nothing: rates differ from run
        to run by the spread.
        """
        own = max(map(self.believed_score, self.feasible_baseline), default=0.0)

        def may_win(record: TrialRecord) -> bool:
            runs = [run for known in (record, *self.feasible_baseline) for run in known.runs]
            between = self.spread.of(run.window.is_held_by_device for run in runs)
            return self.believed_score(record) > exp(-between.sd) * own

        feasible = [record for record in self.records if record.is_feasible and record.number != 0]
        return sorted(filter(may_win, feasible), key=self.believed_score, reverse=True)

    def batch_ratio(self, config: TrainingConfig) -> float:
        """A configuration's global batch over the baseline's."""
        return config.global_batch_ratio(self.space.baseline)

    def taught_by(self, confirmations: Sequence[Confirmation]) -> SearchOutcome:
        """Return it with what trials and the first runs that confirm them teach of the spread.

        Taken are a finalist's trial and its first run in a process of its own: where trials shared one, by how much
        that differs; where rounds are too few to tell a spread, since these are two runs of the same settings.
        """
        trials = {record.number: record.measurement for record in self.records}
        pairs = list[list[Measurement]]()
        for entrant in confirmations:
            trial, run = trials.get(entrant.number), next(iter(entrant.runs), None)
            if trial is None or run is None or run is trial or run.earlier_trials > 0:
                continue
            if has_few_rounds(entrant) or trial.earlier_trials > 0:
                pairs.append([trial, run])
        return replace(self, spread=spread_of_repeats(self.spread, pairs)) if pairs else self

    def was_run_apart(self, record: TrialRecord) -> bool:
        """Whether the baseline's trial of a brief search, the first of its process, is a run of the first round.

        Not that of another call, which may have been a day ago.
        """
        measured, is_of_this_call = record.measurement, self.expected_s is not None
        is_first = record.number == 0 and measured is not None and measured.earlier_trials == 0
        return self.is_brief and is_of_this_call and is_first

    def believed_score(self, record: TrialRecord) -> float:
        """A feasible trial's score at the rate that is believed of it."""
        return believed_score(record, self.believed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationOutcome:
    """What measuring the finalists again has shown, to its end or up to an interruption; as made: nothing yet."""

    confirmations: tuple[Confirmation, ...] = ()
    """Every configuration's runs, round by round."""
    stresses: Mapping[int, StressFigures] = field(default_factory=dict)
    """What stress runs that were passed have shown, by the trial's number."""
    overloaded: tuple[int, ...] = ()
    """Trials that a stress run refutes, in the order in which they were run."""
    notes: tuple[Note, ...] = ()
    is_confirmed: bool = False
    """The figures of some rounds were looked at, or nobody challenged the baseline."""
    one_sided_error: float = ONE_SIDED_ERROR
    """By which an entrant's interval, at its last look, may lie above or below the truth."""
    is_complete: bool = False
    """The confirmation, its stress runs included, came to its end: nothing interrupted it."""


def has_few_rounds(entrant: Confirmation) -> bool:
    """Return whether rounds are too few to tell a spread: its trial teaches that in their place."""
    return len(entrant.runs) < FEWEST_ROUNDS


def disturbances(number: int, result: TrialResult) -> Iterator[Note]:
    """For the report: that somebody has killed or stopped a process of a trial, and what came of it."""
    for remark in () if result.measurement is None else result.measurement.remarks:
        if remark.code in {"measured_anew", "window_stopped"}:
            yield note("trial_disturbed", number=number, remark=remark)
