"""The end of a search: finalists and baseline measured again in turns, and the Recommendation made of it.

Takes a Tuning whose search is over (or was interrupted). Composition, like api, from which alone it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.analysis.confirmation_plan import ROUNDS, ConfirmationPlan, plan_confirmation
from autotune.analysis.durations import overhead_s
from autotune.analysis.memory_line import say_largest
from autotune.analysis.scoring import evaluate
from autotune.analysis.selection_rules import choose, gains_of, ratio_of
from autotune.protocol.messages import NO_EXTRAS, WindowRules
from autotune.records.recommendation import Confirmation, Ratio, Recommendation
from autotune.records.run_summary import Progress, changed_settings
from autotune.records.trial import TrialRecord, score_value
from autotune.settings.training_config import TrainingConfig
from autotune.space.domains import whole_numbers
from autotune.space.learning_rate import LrAdvice, scale_lr
from autotune.tuning.extra_measurements import everything, with_ceilings
from autotune.tuning.loop import Tuning
from autotune.tuning.selection import Race, challengers, feasible_baseline, number_0, scores_of
from autotune.tuning.stress_check import MOST_STRESSED, reserve_s, stress

__all__ = ["confirm", "recommend"]

_FINALISTS = 3
_FINALIST_SHARE = 0.93
_MOST_ROUNDS = 6
_PRECISION = 0.015
_WORTH = 1.01  # a gain that is looked into further
_MIN_DEADLINE_S = 30.0
_DEADLINE_FACTOR = 10.0
_GRACE_S = 5.0  # past what is left, so that the last run is not lost for a moment


@dataclass(slots=True)
class _Entrant:
    """A configuration in the confirmation, with its runs so far."""

    record: TrialRecord
    runs: list[TrialRecord] = field(default_factory=list)

    @property
    def overhead_s(self) -> float:
        """Seconds that a run of it takes outside its window: the most that one took here, else as its trial did."""
        measured = (run for run in self.runs if run.measurement is not None)
        return max((overhead_s(run) for run in measured), default=overhead_s(self.record))

    @property
    def is_feasible(self) -> bool:
        """Whether it still may win; one that ran into a deadline may."""
        return all(run.is_feasible or run.outcome == "timeout" for run in self.runs)


def confirm(tuning: Tuning) -> None:
    """Measure finalists and baseline again in turns, in alternating order, into `tuning.confirmations`.

    Nothing is measured where nobody challenges the baseline. Without a time-out three rounds are planned to take 80 s,
    starts included; where starts are slow fewer finalists run, and where two configurations need more they get it. With
    one, rounds and windows shrink to the time that is left, down to one round of the best and the baseline. Where three
    rounds leave open whether 1 % or more is won, up to three further ones follow as long as there is time. In the end
    the winner is run on the largest samples, and the biggest micro batch that stays within the limit is noted.
    """
    finalists = _finalists(tuning)
    if finalists:
        _measure_in_turns(tuning, finalists)
        tuning.is_confirmed = True
        _stress_winner(tuning)
    _note_memory(tuning)


def _measure_in_turns(tuning: Tuning, finalists: Sequence[TrialRecord]) -> None:
    """Run the rounds; once those that were planned are done all is confirmed, and further ones count as a whole.

    What has failed is not run again, nor is what then has nothing left to be compared with. Where runs take longer than
    planned, later windows are shorter: the stress run keeps its time.
    """
    wanted = [_Entrant(record) for record in (*feasible_baseline(tuning), *finalists)]
    has_baseline = wanted[0].record.number == 0
    reserved_s = reserve_s(finalists[0], tuning.timing.clock.left_s or 0.0)
    plan = plan_confirmation([one.overhead_s for one in wanted], _left_s(tuning, reserved_s), has_baseline=has_baseline)
    entrants, rounds = wanted[: plan.entrants], plan.rounds
    tuning.notes.extend(_say_left_out(wanted[plan.entrants :]))
    for number in range(_MOST_ROUNDS):
        if number >= rounds and not (rounds == ROUNDS and _is_open(entrants)):
            return
        alive = [one for one in entrants if one.is_feasible]
        if len(alive) < min(2, len(entrants)):
            return
        if number > 0:
            is_further, overheads_s = number >= rounds, [one.overhead_s for one in alive]
            in_time = plan.for_round(overheads_s, _left_s(tuning, reserved_s), 1 if is_further else rounds - number)
            if in_time is None or (is_further and in_time != plan):
                return
            plan = in_time
        for entrant in alive if number % 2 == 0 else alive[::-1]:
            left_s = _left_s(tuning, reserved_s)
            if number > 0 and left_s is not None and left_s < entrant.overhead_s:
                return
            entrant.runs.append(_run_again(tuning, entrant.record, number, plan))
            if number < rounds:
                tuning.confirmations[:] = [_confirmation(one) for one in entrants if one.runs]
            done = sum(len(one.runs) for one in entrants)
            left = sum(max(rounds, number + 1) - len(one.runs) for one in entrants if one.is_feasible)
            _show(tuning, entrant, done, done + left)
        tuning.confirmations[:] = [_confirmation(one) for one in entrants if one.runs]
        tuning.is_confirmed = number + 1 >= rounds


def _say_left_out(entrants: Sequence[_Entrant]) -> list[str]:
    """Which finalists there is no time for."""
    return [f"Trial {one.record.number} was not measured again: that would have taken too long." for one in entrants]


def _stress_winner(tuning: Tuning) -> None:
    """Run the winner on the largest samples; where that refutes it, the next one, a few times.

    Once one was refuted, a run that could not be made is no pass: the next one is tried as well.
    """
    tried: set[int] = set()
    for _ in range(MOST_STRESSED):
        chosen = Race.of(tuning).only(lambda number: number not in tried).chosen(tuning)
        if chosen is None or chosen.number == 0:
            break
        stress(tuning, _record(tuning, chosen.number))
        if chosen.number in tuning.stresses or not tuning.overloaded:
            return
        tried.add(chosen.number)
        tuning.confirmations[:] = [_unless_overloaded(one, tuning) for one in tuning.confirmations]
    _note_unproven(tuning)


def _note_unproven(tuning: Tuning) -> None:
    """Say of the one that would win that it was not run on the largest samples, where others failed."""
    would, does = Race.of(tuning).chosen(tuning), Race.proven(tuning).chosen(tuning)
    if would is None or does is None or would.number == 0 or would.number in tuning.stresses:
        return
    name, failed = f"Trial {would.number}", "was not run on the largest samples: others failed there before it."
    tuning.notes.append(f"{name} {'' if does.number == would.number else 'is not recommended, since it '}{failed}")


def _note_memory(tuning: Tuning) -> None:
    chosen = Race.proven(tuning).chosen(tuning)
    if chosen is None:
        return
    note = say_largest(
        tuning.study.records,
        chosen.config,
        tuning.limit_bytes,
        batches=whole_numbers(tuning.space.domains["micro_batch_size"]),
        counts_workers=tuning.space.environment.has_only_ram,
        overloaded=tuning.overloaded,
    )
    if note is not None:
        tuning.notes.append(note)


def _record(tuning: Tuning, number: int) -> TrialRecord:
    return next(record for record in tuning.study.records if record.number == number)


def _unless_overloaded(one: Confirmation, tuning: Tuning) -> Confirmation:
    return one.model_copy(update={"is_feasible": one.is_feasible and one.number not in tuning.overloaded})


def recommend(tuning: Tuning) -> Recommendation | None:
    """The recommendation from what is known now; None where nothing is feasible.

    Without confirmations that can decide, or after an interruption, the trials' own measurements do, less what the
    confirmation has refuted; the verdict says so. Once a stress run has refuted one, no other wins without such a run.
    """
    race = Race.proven(tuning)
    chosen, reference, confirmed = race.chosen(tuning), number_0(race.candidates), race.confirmed
    if chosen is None:
        return None
    same, same_speedup = _same_batch(confirmed, race.trials, tuning)
    advice = _advice(chosen.config, tuning)
    return Recommendation(
        config=chosen.config.model_copy(update={"lr": advice.lr}),
        number=chosen.number,
        verdict=_verdict(chosen, reference, tuning, is_confirmed=bool(confirmed)),
        speedup=_speedup(chosen, reference, is_confirmed=bool(confirmed)),
        lr_advice=advice,
        same_batch=None if same is None else same.config,
        same_batch_number=None if same is None else same.number,
        same_batch_speedup=same_speedup,
        reasons=_reasons(chosen, race, tuning),
        confirmations=tuple(tuning.confirmations),
        stress=tuning.stresses.get(chosen.number),
        overloaded=tuple(tuning.overloaded),
        is_outrun=race.is_outrun(chosen, tuning),
    )


def _same_batch(
    confirmed: Sequence[Confirmation], trials: Sequence[Confirmation], tuning: Tuning
) -> tuple[Confirmation | None, Ratio | None]:
    """The best at the baseline's global batch, and its confirmed speed-up.

    Where none was confirmed but the baseline, the trials decide, and no speed-up is claimed.
    """
    wanted = tuning.space.baseline.global_batch_size
    for candidates in (confirmed, trials):
        same = [one for one in candidates if one.config.global_batch_size == wanted]
        if any(one.number != 0 for one in same):
            reference = number_0(same)
            best = choose(same, scores_of(same, tuning), reference)
            return best, _speedup(best, reference, is_confirmed=candidates is confirmed)
    reference = number_0(trials)
    return reference, _speedup(reference, reference, is_confirmed=True)


def _is_open(entrants: Sequence[_Entrant]) -> bool:
    """Whether the fastest seems to win 1 % or more over the baseline, but noise may be all there is."""
    confirmations = [_confirmation(entrant) for entrant in entrants]
    alive = [one for one in confirmations if one.is_feasible and one.runs]
    reference = number_0(alive)
    if reference is None or len(alive) < 2:
        return False
    fastest = max((one for one in alive if one.number != 0), key=lambda one: one.samples_per_s)
    ratio = ratio_of(fastest, reference)
    return ratio is not None and ratio.value >= _WORTH and ratio.low <= 1


def _left_s(tuning: Tuning, reserved_s: float) -> float | None:
    """Seconds until the stress run must begin; None where there is no time-out."""
    left = tuning.timing.clock.left_s
    return None if left is None else left - reserved_s


def _finalists(tuning: Tuning) -> list[TrialRecord]:
    """The best challenger, the best that keeps the baseline's global batch, then others that may be as good."""
    better = challengers(tuning)
    wanted = tuning.space.baseline.global_batch_size
    same_batch = [record for record in better if record.config.global_batch_size == wanted]
    near = [record for record in better if _is_near(record, better[0])]
    finalists = better[:1]
    for record in [*same_batch[:1], *near[1:]]:
        if record not in finalists and len(finalists) < _FINALISTS:
            finalists.append(record)
    return finalists


def _is_near(record: TrialRecord, best: TrialRecord) -> bool:
    """Whether a trial is close to the best one, or may be as far as its interval tells."""
    if record.measurement is None or best.measurement is None:
        return False
    high, low = record.measurement.samples_per_s_ci[1], best.measurement.samples_per_s_ci[0]
    return high >= low or score_value(record) >= _FINALIST_SHARE * score_value(best)


def _run_again(tuning: Tuning, record: TrialRecord, number: int, plan: ConfirmationPlan) -> TrialRecord:
    left = tuning.timing.clock.left_s
    deadline = max(_DEADLINE_FACTOR * record.result.wall_s, _MIN_DEADLINE_S) + 2 * plan.window_s
    window = WindowRules(max_s=plan.window_s, precision=_PRECISION)
    extras = everything(window) if number == 0 and plan.has_extras else NO_EXTRAS
    result = tuning.runner.run(
        record.config,
        name=f"confirmation-{record.number:03d}-{number + 1}",
        deadline_s=deadline if left is None else min(deadline, left + _GRACE_S),
        window=window,
        extras=extras,
    )
    result = with_ceilings(result, record.config, tuning.ceilings, asked=extras)
    again = TrialRecord(number=record.number, config=record.config, result=result)
    if again.measurement is None:
        return again
    score = evaluate(again.measurement, again.measurement, tuning.objective, tuning.limit_bytes)
    return again.model_copy(update={"score": score})


def _confirmation(entrant: _Entrant) -> Confirmation:
    return Confirmation(
        number=entrant.record.number,
        config=entrant.record.config,
        rounds=tuple(run.measurement for run in entrant.runs),
        is_feasible=entrant.is_feasible,
    )


def _verdict(chosen: Confirmation, reference: Confirmation | None, tuning: Tuning, *, is_confirmed: bool) -> str:
    if reference is None:
        return "baseline_infeasible"
    if chosen.number == 0:
        return "unconfirmed" if tuning.is_interrupted and not tuning.is_confirmed else "already_best"
    return "faster" if is_confirmed else "unconfirmed"


def _speedup(one: Confirmation | None, reference: Confirmation | None, *, is_confirmed: bool) -> Ratio | None:
    """The confirmed ratio; exactly 1 for the baseline itself."""
    if one is None or reference is None or not (is_confirmed or one.number == 0):
        return None
    return ratio_of(one, reference)


def _advice(config: TrainingConfig, tuning: Tuning) -> LrAdvice:
    ratio = config.global_batch_size / tuning.space.baseline.global_batch_size
    return scale_lr(tuning.space.baseline.lr, ratio, tuning.objective.lr_rule, tuning.space.facts.optimizer)


def _reasons(chosen: Confirmation, race: Race, tuning: Tuning) -> tuple[str, ...]:
    candidates, reference = race.candidates, number_0(race.candidates)
    reasons = []
    if reference is None:
        reasons.append("The baseline is no reference: it does not run within the limits. The first feasible trial is.")
    reasons.append(_why_this(chosen, race, tuning))
    if race.confirmed:
        rounds = max(len(one.rounds) for one in candidates)
        names = f"{len(candidates)} configurations" if len(candidates) > 1 else "one configuration"
        reasons.append(f"Confirmed in {rounds} round{'s'[: rounds > 1]} of {names} measured in turns.")
    elif chosen.number != 0:
        reasons.append("Not confirmed: it was not measured again in turns with the baseline.")
    if reference is not None and chosen.number != 0:
        changed = ", ".join(changed_settings(chosen.config, reference.config))
        reasons.append(f"Changed: {changed}.")
    return tuple(reasons)


def _why_this(chosen: Confirmation, race: Race, tuning: Tuning) -> str:
    measured, is_outrun = len(tuning.study.records), race.is_outrun(chosen, tuning)
    gains = gains_of(race.candidates, number_0(race.candidates))
    fastest = max(gains, key=lambda one: one.samples_per_s, default=chosen)
    if chosen.number == 0 and tuning.overloaded:
        would = Race.of(tuning).chosen(tuning)
        others = "" if would is None or would.number == 0 else ", or was not run on them"
        return f"What is faster failed on the largest samples{others}."
    if chosen.number == 0:
        which = "those that may be used" if is_outrun else f"the {measured} configurations measured"
        return f"None of {which} beats yours beyond the noise."
    if chosen.number != fastest.number:
        share = chosen.samples_per_s / fastest.samples_per_s
        return f"Simplest of those as fast as the fastest (trial {fastest.number}; {share:.1%} of its rate)."
    fastest_of_all = max(race.candidates, key=lambda one: one.samples_per_s)
    if fastest_of_all.number != chosen.number:
        return f"Fastest of those that beat yours beyond the noise; trial {fastest_of_all.number} may be faster still."
    return f"Fastest of {'those that may be used, of ' if is_outrun else ''}the {measured} configurations measured."


def _show(tuning: Tuning, entrant: _Entrant, done: int, total: int) -> None:
    tuning.show(
        Progress(
            phase="confirm",
            done=done,
            total=total,
            elapsed_s=tuning.timing.clock.elapsed_s,
            remaining_s=tuning.timing.clock.left_s,
            baseline=tuning.baseline,
            best=tuning.best,
            last=entrant.runs[-1],
        )
    )
