"""Which configurations may be recommended: the confirmed ones where they can decide, else what trials alone show. Pure.

Comes in: what the search and, so far, the confirmation have measured. Goes out: candidates to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.analysis.selection_rules import choose
from autotune.records.recommendation import Confirmation
from autotune.records.trial import TrialRecord, score_value
from autotune.tuning.outcomes import ConfirmationOutcome, SearchOutcome

__all__ = ["Contenders", "baseline_of", "challengers", "feasible_baseline", "scores_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """Configurations that may be recommended."""

    confirmed: list[Confirmation]
    """Those that were measured in turns, where they can decide; else none."""
    trials: list[Confirmation]
    """All of them, as their trials alone measured them."""
    busy_weight: float
    """How much an idle device lowers a score."""

    @classmethod
    def of(cls, found: SearchOutcome, sure: ConfirmationOutcome) -> Contenders:
        """Everything measured, less what the confirmation and the stress runs have refuted."""
        refuted = {*sure.overloaded, *(entrant.number for entrant in sure.confirmations if not entrant.is_feasible)}
        records = (*feasible_baseline(found), *challengers(found))
        trials = [_as_confirmation(record) for record in records if record.number not in refuted]
        sound = [entrant for entrant in sure.confirmations if entrant.is_feasible and entrant.runs]
        confirmed = sound if sure.is_confirmed else []
        weight = found.space.objective.busy_weight
        return cls(confirmed=_comparable(confirmed, trials), trials=trials, busy_weight=weight)

    @classmethod
    def proven(cls, found: SearchOutcome, sure: ConfirmationOutcome) -> Contenders:
        """Once one failed on the largest samples: the baseline, and those that passed there; else all.

        Where none of them is feasible, it is all as well.
        """
        contenders = cls.of(found, sure)
        if not sure.overloaded:
            return contenders
        left = contenders.only(lambda number: number == 0 or number in sure.stresses)
        return left if left.trials else contenders

    def only(self, may_win: Callable[[int], bool]) -> Contenders:
        """Some of them, by their numbers."""
        trials = [trial for trial in self.trials if may_win(trial.number)]
        confirmed = _comparable([candidate for candidate in self.confirmed if may_win(candidate.number)], trials)
        return Contenders(confirmed=confirmed, trials=trials, busy_weight=self.busy_weight)

    @property
    def candidates(self) -> list[Confirmation]:
        """The confirmed ones, or the trials."""
        return self.confirmed or self.trials

    @property
    def chosen(self) -> Confirmation | None:
        """The one to recommend; None where nothing is feasible."""
        candidates = self.candidates
        scores = scores_of(candidates, self.busy_weight)
        return choose(candidates, scores, baseline_of(candidates)) if candidates else None


def feasible_baseline(found: SearchOutcome) -> list[TrialRecord]:
    """The baseline's trial where it is a reference, else none."""
    return [found.baseline] if found.baseline is not None and found.baseline.is_feasible else []


def challengers(found: SearchOutcome) -> list[TrialRecord]:
    """The trials that beat the baseline's own trial, the best first."""
    own = max((score_value(record) for record in feasible_baseline(found)), default=0.0)
    feasible = [record for record in found.records if record.is_feasible and record.number != 0]
    return sorted((record for record in feasible if score_value(record) > own), key=score_value, reverse=True)


def baseline_of(candidates: Sequence[Confirmation]) -> Confirmation | None:
    """The baseline among candidates."""
    return next((candidate for candidate in candidates if candidate.number == 0), None)


def scores_of(candidates: Sequence[Confirmation], busy_weight: float) -> dict[int, float]:
    """The score of each candidate from its own runs; busy fractions count where all have one source."""
    reference = baseline_of(candidates) or next(iter(candidates), None)
    sources = {run.busy_source for candidate in candidates for run in candidate.runs}
    scores = {}
    for candidate in candidates:
        busy = [run.busy_fraction for run in candidate.runs if run.busy_fraction is not None]
        idle = 1 - fmean(busy) if busy and len(sources) == 1 else 0.0
        ratio = 1.0 if reference is None else candidate.samples_per_s / reference.samples_per_s
        scores[candidate.number] = ratio * (1 - busy_weight * idle)
    return scores


def _comparable(confirmed: list[Confirmation], trials: Sequence[Confirmation]) -> list[Confirmation]:
    """The confirmed ones where they can decide: a challenger, and the baseline where it is a reference; else none."""
    has_challenger = any(candidate.number != 0 for candidate in confirmed)
    needs_baseline = baseline_of(trials) is not None
    return confirmed if has_challenger and (not needs_baseline or baseline_of(confirmed) is not None) else []


def _as_confirmation(record: TrialRecord) -> Confirmation:
    return Confirmation(number=record.number, config=record.config, rounds=(record.measurement,))
