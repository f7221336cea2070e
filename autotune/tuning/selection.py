"""From what was found and confirmed to what is recommended. Pure: values in, a Recommendation out.

The confirmed configurations may be recommended where they can decide, else those that trials alone have measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, inf

from autotune.analysis.decisions.selection_rules import WIDEST_SPREAD, Claim, break_even_noise_scale
from autotune.note import Note, note
from autotune.records.recommendation import BreakEven, Confirmation, LargerBatch, Ratio, Recommendation, Verdict
from autotune.records.run_summary import changed_settings
from autotune.settings.training_config import TrainingConfig
from autotune.space.learning_rate import LrAdvice, scale_lr
from autotune.tuning.contenders import Contenders, baseline_of
from autotune.tuning.outcomes import ConfirmationOutcome, SearchOutcome

__all__ = ["select"]


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
    is_unchallenged = chosen.number == 0 and sure.is_confirmed and len(contenders.trials) == 1
    return Recommendation(
        config=chosen.config.model_copy(update={"lr": advice.lr}),
        number=chosen.number,
        verdict=_verdict(chosen, reference, claim, is_confirmed=bool(contenders.confirmed) or is_unchallenged),
        speedup=_speedup(chosen, reference, claim),
        measured_speedup=None if claim is None else claim.measured,
        gain_probability=None if claim is None else claim.gain_probability,
        lr_advice=advice,
        same_batch=None if same is None else same.config,
        same_batch_number=None if same is None else same.number,
        same_batch_speedup=same_speedup,
        larger_batch=_larger_batch(chosen, same, contenders),
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
    slow = feasible - {record.number for record in found.challengers}
    usable = slow | {candidate.number for candidate in contenders.trials}
    return any(rate > rates[chosen.number] for number, rate in rates.items() if number not in usable)


def _same_batch(contenders: Contenders) -> tuple[Confirmation | None, Ratio | None]:
    """The best at the baseline's global batch, and its confirmed speed-up.

    Where none was confirmed but the baseline, the trials decide, and no speed-up is claimed.
    """
    for candidates in (contenders.confirmed, contenders.trials):
        same = [candidate for candidate in candidates if contenders.batch_ratio(candidate) == 1]
        if any(candidate.number != 0 for candidate in same):
            best = contenders.choice_of(same)
            claim = contenders.claim_of(best.number) if candidates is contenders.confirmed else None
            return best, _speedup(best, baseline_of(same), claim)
    reference = baseline_of(contenders.trials)
    return reference, _speedup(reference, reference, None)


def _larger_batch(chosen: Confirmation, same: Confirmation | None, contenders: Contenders) -> LargerBatch | None:
    """The best at a larger global batch, worth it or not, against the fastest at the baseline's own.

    Of the confirmed ones where there are some; where a larger batch was chosen, it is that. `same` is what is shown as
    the best at the baseline's own, of which a trial alone may be known.
    """
    for group in (contenders.confirmed, contenders.trials):
        larger = [candidate for candidate in group if contenders.batch_ratio(candidate) > 1]
        if not larger:
            continue
        best = chosen if contenders.batch_ratio(chosen) > 1 else contenders.choice_of(larger)
        own = contenders.fastest_at_own_batch(group)
        rivals = [rival for rival in (own, same) if rival is not None]
        over = min((contenders.over(best, rival) for rival in rivals), key=lambda ratio: ratio.value, default=None)
        return LargerBatch(
            config=best.config.model_copy(update={"lr": _lr_advice(best.config, contenders.found).lr}),
            number=best.number,
            speedup=_speedup(best, contenders.baseline, contenders.claim_of(best.number)),
            over_same_batch=over,
            is_worth_it=own is None or contenders.is_worth_it(best, own),
            break_even=None if over is None else _break_even(best, over, contenders),
        )
    return None


def _break_even(larger: Confirmation, over: Ratio, contenders: Contenders) -> BreakEven | None:
    """Return the noise scale above which the larger batch pays, by its throughput over that of the baseline's batch."""
    samples = contenders.found.space.baseline.global_batch_size
    # Not the configuration's own count: with a token budget that is rounded for each micro batch.
    larger_samples = samples * contenders.batch_ratio(larger)
    of_value = break_even_noise_scale(samples, larger_samples, over.value)
    of_low = break_even_noise_scale(samples, larger_samples, over.low)
    of_high = break_even_noise_scale(samples, larger_samples, over.high)
    if of_value is None or of_high is None:
        return None
    return BreakEven(samples=of_value, low=of_high, high=inf if of_low is None else of_low)


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
        elif claim is not None and claim.is_by_far:
            yield note("proven_by_far", sd_fraction=WIDEST_SPREAD)
    elif chosen.number != 0:
        yield note("not_confirmed")
    if reference is not None and chosen.number != 0:
        yield note("changed_settings", settings=list(changed_settings(chosen.config, reference.config)))


def _why_this(chosen: Confirmation, contenders: Contenders, *, is_outrun: bool) -> Note:
    candidates = contenders.worth_their_batch(contenders.candidates)
    leaves_out_larger = len(candidates) < len(contenders.candidates)
    counts = {
        "configurations": sum(
            contenders.found.batch_ratio(record.config) <= 1 or not leaves_out_larger
            for record in contenders.found.records
        ),
        "is_outrun": is_outrun,
        "leaves_out_larger": leaves_out_larger,
    }
    if chosen.number == 0 and contenders.sure.overloaded:
        would = Contenders.of(contenders.found, contenders.sure).chosen
        return note("faster_ones_overloaded", has_untried=would is not None and would.number != 0)
    if chosen.number == 0:
        confirmed = (entrant.number for entrant in candidates if entrant in contenders.confirmed)
        claims = filter(None, map(contenders.claim_of, confirmed))
        most = max((claim.measured.high - 1 for claim in claims), default=None)
        return note("nothing_beats_baseline", **counts, most_fraction=most)
    gains = contenders.gains_of(candidates)
    best = max(gains, key=gains.__getitem__)
    if best != chosen.number:
        return note("simplest_of_the_best", best_trial=best, rate_fraction=exp(gains[chosen.number] - gains[best]))
    return note("best_believed", **counts)
