"""Who may be recommended: the confirmed configurations where they can decide, else what the trials alone say.

Takes a Tuning with what its trials, its confirmation and its stress runs have seen; changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.analysis.selection_rules import choose
from autotune.records.recommendation import Confirmation
from autotune.records.trial import TrialRecord, score_value
from autotune.tuning.loop import Tuning

__all__ = ["Race", "challengers", "feasible_baseline", "number_0", "scores_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Who may be recommended."""

    confirmed: list[Confirmation]
    """The confirmed ones, where they can decide; else none."""
    trials: list[Confirmation]
    """What trials alone say."""

    @classmethod
    def of(cls, tuning: Tuning) -> Race:
        """The race as it stands, less what the confirmation and the stress runs have refuted."""
        confirmations = tuning.confirmations
        refuted = {one.number for one in confirmations if not one.is_feasible} | tuning.overloaded.keys()
        contenders = (*feasible_baseline(tuning), *challengers(tuning))
        trials = [_as_confirmation(record) for record in contenders if record.number not in refuted]
        confirmed = [one for one in confirmations if one.is_feasible and one.runs]
        is_whole = tuning.is_confirmed or not tuning.is_interrupted
        return cls(confirmed=_comparable(confirmed, trials) if is_whole else [], trials=trials)

    @classmethod
    def proven(cls, tuning: Tuning) -> Race:
        """The race in which, once one failed on the largest samples, the baseline and those that passed there are left.

        Where none of them is feasible, it is the race as it stands.
        """
        race = cls.of(tuning)
        if not tuning.overloaded:
            return race
        left = race.only(lambda number: number == 0 or number in tuning.stresses)
        return left if left.trials else race

    def only(self, may_win: Callable[[int], bool]) -> Race:
        """The race among some, by their numbers."""
        trials = [one for one in self.trials if may_win(one.number)]
        return Race(
            confirmed=_comparable([one for one in self.confirmed if may_win(one.number)], trials), trials=trials
        )

    @property
    def candidates(self) -> list[Confirmation]:
        """The confirmed ones, or the trials."""
        return self.confirmed or self.trials

    def chosen(self, tuning: Tuning) -> Confirmation | None:
        """The one to recommend; None where nothing is feasible."""
        candidates = self.candidates
        return choose(candidates, scores_of(candidates, tuning), number_0(candidates)) if candidates else None

    def is_outrun(self, chosen: Confirmation, tuning: Tuning) -> bool:
        """Whether a faster trial may not be used: refused, over the limit, or refuted when it was run again."""
        records = tuning.study.records
        rates = {one.number: one.measurement.samples_per_s for one in records if one.measurement is not None}
        slow = {one.number for one in records if one.is_feasible} - {one.number for one in challengers(tuning)}
        usable = slow | {one.number for one in self.trials}
        return any(rate > rates[chosen.number] for number, rate in rates.items() if number not in usable)


def feasible_baseline(tuning: Tuning) -> list[TrialRecord]:
    """The baseline's trial where it is a reference, else none."""
    baseline = tuning.baseline
    return [baseline] if baseline is not None and baseline.is_feasible else []


def challengers(tuning: Tuning) -> list[TrialRecord]:
    """The trials that beat the baseline's own trial, the best first."""
    bar = max((score_value(record) for record in feasible_baseline(tuning)), default=0.0)
    feasible = [record for record in tuning.study.records if record.is_feasible and record.number != 0]
    return sorted((record for record in feasible if score_value(record) > bar), key=score_value, reverse=True)


def number_0(candidates: Sequence[Confirmation]) -> Confirmation | None:
    """The baseline among candidates."""
    return next((one for one in candidates if one.number == 0), None)


def scores_of(candidates: Sequence[Confirmation], tuning: Tuning) -> dict[int, float]:
    """The score of each candidate from its own runs, where all busy fractions have one source."""
    reference = number_0(candidates) or candidates[0]
    sources = {run.busy_source for one in candidates for run in one.runs}
    scores = {}
    for one in candidates:
        busy = [run.busy_fraction for run in one.runs if run.busy_fraction is not None]
        idle = 1 - fmean(busy) if busy and len(sources) == 1 else 0.0
        scores[one.number] = one.samples_per_s / reference.samples_per_s * (1 - tuning.objective.busy_weight * idle)
    return scores


def _comparable(confirmed: list[Confirmation], trials: Sequence[Confirmation]) -> list[Confirmation]:
    """The confirmed ones where they can decide: a challenger, and the baseline where it is a reference; else none."""
    has_challenger = any(one.number != 0 for one in confirmed)
    needs_baseline = number_0(trials) is not None
    return confirmed if has_challenger and (not needs_baseline or number_0(confirmed) is not None) else []


def _as_confirmation(record: TrialRecord) -> Confirmation:
    return Confirmation(number=record.number, config=record.config, rounds=(record.measurement,))
