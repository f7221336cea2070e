"""From what was found and confirmed to what is recommended. Pure: values in, a Recommendation out.

The confirmed configurations may be recommended where they can decide, else those that trials alone have measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.analysis.selection_rules import choose, gains_of, ratio_of
from autotune.note import Note, note
from autotune.records.recommendation import Confirmation, Ratio, Recommendation
from autotune.records.run_summary import changed_settings
from autotune.records.trial import TrialRecord, score_value
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
    def proven(cls, found: SearchOutcome, sure: ConfirmationOutcome) -> Contenders:
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
        scores = _scores_of(candidates, self.found.space.objective.busy_weight)
        return choose(candidates, scores, baseline_of(candidates))


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


def _scores_of(candidates: Sequence[Confirmation], busy_weight: float) -> dict[int, float]:
    """The score of each candidate from its own runs; busy fractions count where all have one source."""
    reference = baseline_of(candidates) or candidates[0]
    sources = {run.busy_source for candidate in candidates for run in candidate.runs}
    scores = {}
    for candidate in candidates:
        busy = [run.busy_fraction for run in candidate.runs if run.busy_fraction is not None]
        idle = 1 - fmean(busy) if busy and len(sources) == 1 else 0.0
        scores[candidate.number] = candidate.samples_per_s / reference.samples_per_s * (1 - busy_weight * idle)
    return scores


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
    contenders = Contenders.proven(found, sure)
    chosen, reference = contenders.chosen, contenders.baseline
    if chosen is None:
        return None
    is_confirmed, is_outrun = bool(contenders.confirmed), _is_outrun(chosen, contenders)
    same, same_speedup = _same_batch(contenders)
    advice = _lr_advice(chosen.config, found)
    return Recommendation(
        config=chosen.config.model_copy(update={"lr": advice.lr}),
        number=chosen.number,
        verdict=_verdict(chosen, reference, is_confirmed=sure.is_confirmed if chosen.number == 0 else is_confirmed),
        speedup=_speedup(chosen, reference, is_confirmed=is_confirmed),
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
    wanted = contenders.found.space.baseline.global_batch_size
    for candidates, is_confirmed in ((contenders.confirmed, True), (contenders.trials, False)):
        same = [candidate for candidate in candidates if candidate.config.global_batch_size == wanted]
        if any(candidate.number != 0 for candidate in same):
            best = contenders.choice_of(same)
            return best, _speedup(best, baseline_of(same), is_confirmed=is_confirmed)
    reference = baseline_of(contenders.trials)
    return reference, _speedup(reference, reference, is_confirmed=True)


def _verdict(chosen: Confirmation, reference: Confirmation | None, *, is_confirmed: bool) -> str:
    if reference is None:
        return "baseline_infeasible"
    proven = "already_best" if chosen.number == 0 else "faster"
    return proven if is_confirmed else "unconfirmed"


def _speedup(candidate: Confirmation | None, reference: Confirmation | None, *, is_confirmed: bool) -> Ratio | None:
    """The confirmed ratio; exactly 1 for the baseline itself."""
    if candidate is None or reference is None or not (is_confirmed or candidate.number == 0):
        return None
    return ratio_of(candidate, reference)


def _lr_advice(config: TrainingConfig, found: SearchOutcome) -> LrAdvice:
    baseline = found.space.baseline
    ratio = config.global_batch_size / baseline.global_batch_size
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
        return note("nothing_beats_baseline", configurations=measured, is_outrun=is_outrun)
    fastest = _fastest(gains_of(candidates, contenders.baseline)) or chosen
    if chosen.number != fastest.number:
        share = chosen.samples_per_s / fastest.samples_per_s
        return note("simplest_of_the_fastest", fastest_trial=fastest.number, rate_fraction=share)
    fastest_of_all = _fastest(candidates) or chosen
    if fastest_of_all.number != chosen.number:
        return note("fastest_beyond_noise", other_trial=fastest_of_all.number)
    return note("fastest", configurations=measured, is_outrun=is_outrun)


def _fastest(candidates: Sequence[Confirmation]) -> Confirmation | None:
    return max(candidates, key=lambda candidate: candidate.samples_per_s, default=None)
