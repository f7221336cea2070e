"""The configurations that may be recommended, and how they compare: confirmed ones, or those that trials have measured.

Comes in: what was found, and what the confirmation has shown. Goes out: the one to choose among some, gains, claims.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import fmean

from autotune.analysis.decisions.rounds import fit_rounds
from autotune.analysis.decisions.run_spread import ratio_of_runs
from autotune.analysis.decisions.selection_rules import (
    Claim,
    believed_gains,
    choose,
    claim_of,
    ratio_of,
    worth_its_batch,
)
from autotune.records.recommendation import Confirmation, Ratio
from autotune.tuning.outcomes import ConfirmationOutcome, SearchOutcome

__all__ = ["Contenders", "baseline_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """Configurations that may be recommended."""

    found: SearchOutcome
    sure: ConfirmationOutcome
    confirmed: list[Confirmation]
    """Those that were measured in turns, where they can decide; else none."""
    trials: list[Confirmation]
    """All of them, as their trials alone measured them."""

    @classmethod
    def of(
        cls, found: SearchOutcome, sure: ConfirmationOutcome, may_win: Callable[[int], bool] = lambda _: True
    ) -> Contenders:
        """What was measured, of these numbers, less what the confirmation and the stress runs have refuted."""
        refuted = {*sure.overloaded, *(entrant.number for entrant in sure.confirmations if not entrant.is_feasible)}
        records = (*found.feasible_baseline, *found.challengers)
        own = [record for record in records if may_win(record.number) and record.number not in refuted]
        trials = [
            Confirmation(number=record.number, config=record.config, rounds=(record.measurement,)) for record in own
        ]
        sound = [entrant for entrant in sure.confirmations if entrant.is_feasible and entrant.runs]
        confirmed = [entrant for entrant in sound if sure.is_confirmed and may_win(entrant.number)]
        return cls(found=found, sure=sure, confirmed=_comparable(confirmed, trials), trials=trials)

    @classmethod
    def sound(cls, found: SearchOutcome, sure: ConfirmationOutcome) -> Contenders:
        """Once one failed on the largest samples: the baseline, and those that passed there; else all.

        Where none of them is feasible, it is all as well.
        """
        left = cls.of(found, sure, lambda number: number == 0 or number in sure.stresses)
        return left if sure.overloaded and left.trials else cls.of(found, sure)

    @property
    def candidates(self) -> list[Confirmation]:
        """The confirmed ones, or the trials."""
        return self.confirmed or self.trials

    @property
    def chosen(self) -> Confirmation | None:
        """The one to recommend; None where nothing is feasible."""
        return self.choice_of(self.candidates) if self.candidates else None

    @property
    def baseline(self) -> Confirmation | None:
        """The baseline among the candidates."""
        return baseline_of(self.candidates)

    def choice_of(self, candidates: Sequence[Confirmation]) -> Confirmation:
        """The one to recommend among some, at least one."""
        return self._choice(self.worth_their_batch(candidates))

    def worth_their_batch(self, candidates: Sequence[Confirmation]) -> Sequence[Confirmation]:
        """Less those of a larger global batch than the baseline's that are not worth it: all where none keeps that."""
        best = self.fastest_at_own_batch(candidates)
        if best is None:
            return candidates
        return [one for one in candidates if self.batch_ratio(one) <= 1 or self.is_worth_it(one, best)]

    def fastest_at_own_batch(self, candidates: Sequence[Confirmation]) -> Confirmation | None:
        """The one among some that is believed to be the fastest at the baseline's global batch; None without any."""
        own = [candidate for candidate in candidates if self.batch_ratio(candidate) == 1]
        gains = self.gains_of(own) if own else {}
        return max(own, key=lambda one: gains.get(one.number, -inf), default=None)

    def batch_ratio(self, candidate: Confirmation) -> float:
        """Its global batch over the baseline's."""
        return self.found.batch_ratio(candidate.config)

    def over(self, candidate: Confirmation, other: Confirmation) -> Ratio:
        """Return the throughput of one over another's; its interval is wider where they were not measured in turn."""
        in_turns = None
        if {candidate.number, other.number} <= {entrant.number for entrant in self.confirmed}:
            in_turns = ratio_of(candidate, other, self.found.spread, self.sure.one_sided_error)
        return in_turns or ratio_of_runs(candidate.runs, other.runs, self.found.spread)

    def _choice(self, candidates: Sequence[Confirmation]) -> Confirmation:
        return choose(candidates, self.gains_of(candidates), self._idle_costs(candidates))

    def is_worth_it(self, larger: Confirmation, own: Confirmation) -> bool:
        """Whether a larger batch beats the fastest at the baseline's own, beyond noise and by enough."""
        least = 1 + self.found.space.objective.larger_batch_gain
        return bool(worth_its_batch(self.over(larger, own), least))

    def gains_of(self, candidates: Sequence[Confirmation]) -> dict[int, float]:
        """By number, the logarithm of what each is believed to win; of trials alone, by all that the search knows."""
        if {candidate.number for candidate in self.confirmed} >= {candidate.number for candidate in candidates}:
            return believed_gains(candidates, self.found.spread)
        rates = {candidate.number: log(candidate.samples_per_s) for candidate in candidates}
        believed = {number: rate for number, rate in self.found.believed.items() if number in rates}
        known = rates | believed
        reference = known.get(0, known[candidates[0].number])
        return {number: log_rate - reference for number, log_rate in known.items()}

    def claim_of(self, number: int) -> Claim | None:
        """Return what may be claimed of one over the baseline, where both were measured in turn."""
        is_confirmed = any(entrant.number == number for entrant in self.confirmed)
        if number == 0 or not is_confirmed or self.baseline is None:
            return None
        fit = fit_rounds(self.confirmed, self.found.spread, self.found.prior_spread)
        return claim_of(number, fit, self.sure.one_sided_error)

    def _idle_costs(self, candidates: Sequence[Confirmation]) -> dict[int, float]:
        """What an idle device costs of each one's score; busy fractions count where all have one source."""
        if len({run.busy_source for candidate in candidates for run in candidate.runs}) != 1:
            return {}
        weight = self.found.space.objective.busy_weight
        return {
            candidate.number: weight * (1 - fmean(busy))
            for candidate in candidates
            if (busy := [run.busy_fraction for run in candidate.runs if run.busy_fraction is not None])
        }


def baseline_of(candidates: Sequence[Confirmation]) -> Confirmation | None:
    """The baseline among candidates."""
    return next((candidate for candidate in candidates if candidate.number == 0), None)


def _comparable(confirmed: list[Confirmation], trials: Sequence[Confirmation]) -> list[Confirmation]:
    """The confirmed ones where they can decide: a challenger, and the baseline where it is a reference; else none."""
    has_challenger = any(candidate.number != 0 for candidate in confirmed)
    needs_baseline = baseline_of(trials) is not None
    return confirmed if has_challenger and (not needs_baseline or baseline_of(confirmed) is not None) else []
