"""From what was found and confirmed to what is recommended. Pure: values in, a Recommendation out.

The confirmed configurations may be recommended where they can decide, else those that trials alone have measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from autotune.analysis.decisions.rounds import fit_rounds
from autotune.analysis.decisions.selection_rules import Claim, believed_gains, choose, claim_of
from autotune.note import Note, note
from autotune.records.recommendation import Confirmation, Ratio, Recommendation, Verdict
from autotune.records.run_summary import changed_settings
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.space.learning_rate import LrAdvice, scale_lr
from autotune.tuning.outcomes import ConfirmationOutcome, SearchOutcome

__all__ = ["Contenders", "baseline_of", "challengers", "feasible_baseline", "select"]


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
        records = (*feasible_baseline(found), *challengers(found))
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
        return choose(candidates, self.gains_of(candidates), self._idle_costs(candidates))

    def gains_of(self, candidates: Sequence[Confirmation]) -> dict[int, float]:
        """By number, the logarithm of what each is believed to win; of trials alone, by all that the search knows."""
        if {candidate.number for candidate in self.confirmed} >= {candidate.number for candidate in candidates}:
            return believed_gains(candidates, self.found.spread)
        rates = {candidate.number: log(candidate.samples_per_s) for candidate in candidates}
        known = {number: self.found.believed.get(number, rate) for number, rate in rates.items()}
        reference = known.get(0, known[candidates[0].number])
        return {number: log_rate - reference for number, log_rate in known.items()}

    def claim_of(self, number: int) -> Claim | None:
        """What may be said of one over the baseline, as far as both were measured in turns."""
        if number == 0 or not self.confirmed or self.baseline is None:
            return None
        return claim_of(number, fit_rounds(self.confirmed, self.found.spread), self.sure.one_sided_error)

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


def feasible_baseline(found: SearchOutcome) -> list[TrialRecord]:
    """The baseline's trial where it is a reference, else none."""
    return [found.baseline] if found.baseline is not None and found.baseline.is_feasible else []


def challengers(found: SearchOutcome) -> list[TrialRecord]:
    """The trials that may beat the baseline by what is believed of both, the best first.

    That a trial's score is believed to be a little lower than the baseline's refutes nothing: rates differ from run to
    run by the spread.
    """
    own = max((found.believed_score(record) for record in feasible_baseline(found)), default=0.0)
    feasible = [record for record in found.records if record.is_feasible and record.number != 0]
    may_win = [record for record in feasible if found.believed_score(record) > exp(-found.spread.sd) * own]
    return sorted(may_win, key=found.believed_score, reverse=True)


def baseline_of(candidates: Sequence[Confirmation]) -> Confirmation | None:
    """The baseline among candidates."""
    return next((candidate for candidate in candidates if candidate.number == 0), None)


def _comparable(confirmed: list[Confirmation], trials: Sequence[Confirmation]) -> list[Confirmation]:
    """The confirmed ones where they can decide: a challenger, and the baseline where it is a reference; else none."""
    has_challenger = any(candidate.number != 0 for candidate in confirmed)
    needs_baseline = baseline_of(trials) is not None
    return confirmed if has_challenger and (not needs_baseline or baseline_of(confirmed) is not None) else []


def select(found: SearchOutcome, sure: ConfirmationOutcome) -> Recommendation | None:
    """The recommendation from what is known; None where nothing is feasible.

    Without confirmations that can decide, or after an interruption, the trials' own measurements do, less what the
    confirmation has refuted; the verdict says so. Once a stress run has refuted one, no other wins without such a run.
    """
    contenders = Contenders.sound(found, sure)
    chosen, reference = contenders.chosen, contenders.baseline
    if chosen is None:
        return None
    claim, is_outrun = contenders.claim_of(chosen.number), _is_outrun(chosen, contenders)
    same, same_speedup = _same_batch(contenders)
    advice = _lr_advice(chosen.config, found)
    is_confirmed = sure.is_confirmed if chosen.number == 0 else bool(contenders.confirmed)
    return Recommendation(
        config=chosen.config.model_copy(update={"lr": advice.lr}),
        number=chosen.number,
        verdict=_verdict(chosen, reference, claim, is_confirmed=is_confirmed),
        speedup=_speedup(chosen, reference, claim),
        measured_speedup=None if claim is None else claim.measured,
        gain_probability=None if claim is None else claim.gain_probability,
        lr_advice=advice,
        same_batch=None if same is None else same.config,
        same_batch_number=None if same is None else same.number,
        same_batch_speedup=same_speedup,
        reasons=tuple(_reasons(chosen, contenders, is_outrun=is_outrun)),
        confirmations=sure.confirmations,
        stress=sure.stresses.get(chosen.number),
        overloaded=sure.overloaded,
        is_outrun=is_outrun,
    )


def _is_outrun(chosen: Confirmation, contenders: Contenders) -> bool:
    """Whether a faster trial may not be used: refused, over the limit, or refuted when it was run again."""
    found = contenders.found
    rates = {record.number: record.measurement.samples_per_s for record in found.records if record.measurement}
    feasible = {record.number for record in found.records if record.is_feasible}
    slow = feasible - {record.number for record in challengers(found)}
    usable = slow | {candidate.number for candidate in contenders.trials}
    return any(rate > rates[chosen.number] for number, rate in rates.items() if number not in usable)


def _same_batch(contenders: Contenders) -> tuple[Confirmation | None, Ratio | None]:
    """The best at the baseline's global batch, and its confirmed speed-up.

    Where none was confirmed but the baseline, the trials decide, and no speed-up is claimed.
    """
    own = contenders.found.space.baseline
    for candidates in (contenders.confirmed, contenders.trials):
        same = [candidate for candidate in candidates if candidate.config.global_batch_ratio(own) == 1]
        if any(candidate.number != 0 for candidate in same):
            best = contenders.choice_of(same)
            claim = contenders.claim_of(best.number) if candidates is contenders.confirmed else None
            return best, _speedup(best, baseline_of(same), claim)
    reference = baseline_of(contenders.trials)
    return reference, _speedup(reference, reference, None)


def _verdict(
    chosen: Confirmation, reference: Confirmation | None, claim: Claim | None, *, is_confirmed: bool
) -> Verdict:
    if reference is None:
        return "baseline_infeasible"
    if chosen.number == 0:
        return "already_best" if is_confirmed else "unconfirmed"
    return "faster" if claim is not None and claim.is_proven else "unconfirmed"


def _speedup(candidate: Confirmation | None, reference: Confirmation | None, claim: Claim | None) -> Ratio | None:
    """The claim; exactly 1 for the baseline itself."""
    if candidate is None or reference is None:
        return None
    if candidate.number == 0:
        return Ratio(value=1.0, low=1.0, high=1.0)
    return None if claim is None else claim.speedup


def _lr_advice(config: TrainingConfig, found: SearchOutcome) -> LrAdvice:
    baseline = found.space.baseline
    ratio = config.global_batch_ratio(baseline)
    return scale_lr(baseline.lr, ratio, found.space.objective.lr_rule, found.space.facts.optimizer)


def _reasons(chosen: Confirmation, contenders: Contenders, *, is_outrun: bool) -> Iterator[Note]:
    """What the recommendation rests on."""
    candidates, reference = contenders.candidates, contenders.baseline
    if reference is None:
        yield note("baseline_is_no_reference")
    yield _why_this(chosen, contenders, is_outrun=is_outrun)
    if contenders.confirmed:
        rounds = max(len(candidate.rounds) for candidate in candidates)
        yield note("confirmed", rounds=rounds, configurations=len(candidates))
        claim = contenders.claim_of(chosen.number)
        if claim is not None and not claim.is_proven:
            yield note("not_proven", gain_fraction=claim.gain_probability)
    elif chosen.number != 0:
        yield note("not_confirmed")
    if reference is not None and chosen.number != 0:
        yield note("changed_settings", settings=list(changed_settings(chosen.config, reference.config)))


def _why_this(chosen: Confirmation, contenders: Contenders, *, is_outrun: bool) -> Note:
    measured, candidates = len(contenders.found.records), contenders.candidates
    if chosen.number == 0 and contenders.sure.overloaded:
        would = Contenders.of(contenders.found, contenders.sure).chosen
        return note("faster_ones_overloaded", has_untried=would is not None and would.number != 0)
    if chosen.number == 0:
        claims = (contenders.claim_of(entrant.number) for entrant in contenders.confirmed)
        most = max((claim.measured.high - 1 for claim in claims if claim is not None), default=None)
        return note("nothing_beats_baseline", configurations=measured, is_outrun=is_outrun, most_fraction=most)
    gains = contenders.gains_of(candidates)
    best = max(gains, key=gains.__getitem__)
    if best != chosen.number:
        return note("simplest_of_the_best", best_trial=best, rate_fraction=exp(gains[chosen.number] - gains[best]))
    return note("best_believed", configurations=measured, is_outrun=is_outrun)
