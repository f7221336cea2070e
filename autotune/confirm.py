"""The end of a search: finalists and baseline measured again in turns, and the Recommendation made of it.

Takes a Tuning whose search is over (or was interrupted). Composition, like api, from which alone it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from autotune.core.lr_scaling import LrAdvice, scale_lr
from autotune.core.objective import evaluate
from autotune.core.recommendation import Confirmation, Ratio, Recommendation, choose, ratio_of
from autotune.core.result import Progress, changed_settings
from autotune.core.training_config import TrainingConfig
from autotune.core.trial import TrialRecord
from autotune.protocol import WindowRules
from autotune.tune import Tuning, score_value

__all__ = ["confirm", "recommend"]

_FINALISTS = 3
_FINALIST_SHARE = 0.93
_ROUNDS = 3
_MOST_ROUNDS = 6
_WINDOW_S = 20.0
_SHORTEST_WINDOW_S = 1.0
_PRECISION = 0.015
_MIN_DEADLINE_S = 30.0
_DEADLINE_FACTOR = 10.0
_GRACE_S = 5.0  # past the time-out, so that the last run is not lost for a moment


@dataclass(slots=True)
class _Entrant:
    """A configuration in the confirmation, with its runs so far."""

    record: TrialRecord
    runs: list[TrialRecord] = field(default_factory=list)


def confirm(tuning: Tuning) -> None:
    """Measure finalists and baseline again in turns, in alternating order, into `tuning.confirmations`.

    Nothing is measured where nobody challenges the baseline. Rounds and windows shrink to the time that is left, down
    to one round of the best and the baseline. Where three rounds do not tell the fastest from the baseline, further
    ones follow as long as there is time.
    """
    challengers = _finalists(tuning)
    if not challengers:
        return
    entrants = [_Entrant(record) for record in (*_feasible_baseline(tuning), *challengers)]
    rounds, entrants, window_s = _schedule(entrants, tuning.clock.left_s)
    for number in range(_MOST_ROUNDS):
        if number >= rounds and not (
            rounds == _ROUNDS and _is_open(entrants) and _has_time(tuning, entrants, window_s)
        ):
            return
        for entrant in entrants if number % 2 == 0 else entrants[::-1]:
            if number > 0 and tuning.clock.left_s == 0:
                return
            entrant.runs.append(_run_again(tuning, entrant.record, number, window_s))
            tuning.confirmations[:] = [_confirmation(one) for one in entrants if one.runs]
            _show(tuning, entrant, sum(len(one.runs) for one in entrants), max(rounds, number + 1) * len(entrants))


def recommend(tuning: Tuning) -> Recommendation | None:
    """The recommendation from what is known now; None where nothing is feasible.

    Without confirmations that can decide, or after an interruption, the trials' own measurements do, less what the
    confirmation has refuted; the verdict says so.
    """
    confirmations = tuning.confirmations
    refuted = {one.number for one in confirmations if not one.is_feasible}
    contenders = (*_feasible_baseline(tuning), *_challengers(tuning))
    trials = [_as_confirmation(record) for record in contenders if record.number not in refuted]
    confirmed = _comparable([one for one in confirmations if one.is_feasible and one.runs], trials)
    if tuning.is_interrupted:
        confirmed = []
    candidates = confirmed or trials
    if not candidates:
        return None
    reference = _number_0(candidates)
    chosen = choose(candidates, _scores(candidates, tuning), reference)
    same, same_speedup = _same_batch(confirmed, trials, tuning)
    advice = _advice(chosen.config, tuning)
    return Recommendation(
        config=chosen.config.model_copy(update={"lr": advice.lr}),
        number=chosen.number,
        verdict=_verdict(chosen, reference, is_confirmed=bool(confirmed), is_open=tuning.is_interrupted),
        speedup=_speedup(chosen, reference, is_confirmed=bool(confirmed)),
        lr_advice=advice,
        same_batch=None if same is None else same.config,
        same_batch_number=None if same is None else same.number,
        same_batch_speedup=same_speedup,
        reasons=_reasons(chosen, candidates, tuning, is_confirmed=bool(confirmed)),
        confirmations=tuple(confirmations),
    )


def _comparable(confirmed: list[Confirmation], trials: Sequence[Confirmation]) -> list[Confirmation]:
    """The confirmed ones where they can decide: a challenger, and the baseline where it is a reference; else none."""
    has_challenger = any(one.number != 0 for one in confirmed)
    needs_baseline = _number_0(trials) is not None
    return confirmed if has_challenger and (not needs_baseline or _number_0(confirmed) is not None) else []


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
            reference = _number_0(same)
            best = choose(same, _scores(same, tuning), reference)
            return best, _speedup(best, reference, is_confirmed=candidates is confirmed)
    reference = _number_0(trials)
    return reference, _speedup(reference, reference, is_confirmed=True)


def _number_0(candidates: Sequence[Confirmation]) -> Confirmation | None:
    return next((one for one in candidates if one.number == 0), None)


def _is_open(entrants: Sequence[_Entrant]) -> bool:
    """Whether the interval of the fastest against the baseline still holds 1."""
    confirmations = [_confirmation(entrant) for entrant in entrants]
    alive = [one for one in confirmations if one.is_feasible and one.runs]
    reference = _number_0(alive)
    if reference is None or len(alive) < 2:
        return False
    fastest = max((one for one in alive if one.number != 0), key=lambda one: one.samples_per_s)
    ratio = ratio_of(fastest, reference)
    return ratio is not None and ratio.value > 1 and ratio.low <= 1


def _has_time(tuning: Tuning, entrants: Sequence[_Entrant], window_s: float) -> bool:
    left = tuning.clock.left_s
    return left is None or left > sum(window_s + _overhead_s(entrant.record) for entrant in entrants)


def _feasible_baseline(tuning: Tuning) -> list[TrialRecord]:
    baseline = tuning.baseline
    return [baseline] if baseline is not None and baseline.is_feasible else []


def _challengers(tuning: Tuning) -> list[TrialRecord]:
    """The trials that beat the baseline's own trial, the best first."""
    bar = max((score_value(record) for record in _feasible_baseline(tuning)), default=0.0)
    feasible = [record for record in tuning.study.records if record.is_feasible and record.number != 0]
    return sorted((record for record in feasible if score_value(record) > bar), key=score_value, reverse=True)


def _finalists(tuning: Tuning) -> list[TrialRecord]:
    """The best challenger, the best that keeps the baseline's global batch, then others close to the best."""
    better = _challengers(tuning)
    wanted = tuning.space.baseline.global_batch_size
    same_batch = [record for record in better if record.config.global_batch_size == wanted]
    near = [record for record in better if score_value(record) >= _FINALIST_SHARE * score_value(better[0])]
    finalists = better[:1]
    for record in [*same_batch[:1], *near[1:]]:
        if record not in finalists and len(finalists) < _FINALISTS:
            finalists.append(record)
    return finalists


def _schedule(entrants: list[_Entrant], left_s: float | None) -> tuple[int, list[_Entrant], float]:
    """Rounds, entrants and window length that fit into the time left."""
    if left_s is None:
        return _ROUNDS, entrants, _WINDOW_S
    fewest = 2 if entrants[0].record.number == 0 else 1
    for rounds in (_ROUNDS, 2, 1):
        for count in range(len(entrants), fewest - 1, -1):
            overhead = sum(_overhead_s(entrant.record) for entrant in entrants[:count])
            window_s = (left_s / rounds - overhead) / count
            if window_s >= 2 * _SHORTEST_WINDOW_S:
                return rounds, entrants[:count], min(window_s, _WINDOW_S)
    return (1, entrants[:fewest], _SHORTEST_WINDOW_S) if left_s > 0 else (0, entrants, 0.0)


def _overhead_s(record: TrialRecord) -> float:
    """What a run of this configuration takes beyond its window."""
    assert record.measurement is not None  # noqa: S101 - only feasible records come here
    window = sum(block.seconds for block in record.measurement.blocks)
    return max(0.0, record.result.wall_s - window)


def _run_again(tuning: Tuning, record: TrialRecord, number: int, window_s: float) -> TrialRecord:
    left = tuning.clock.left_s
    deadline = max(_DEADLINE_FACTOR * record.result.wall_s, _MIN_DEADLINE_S) + 2 * window_s
    result = tuning.runner.run(
        record.config,
        name=f"confirmation-{record.number:03d}-{number + 1}",
        deadline_s=deadline if left is None else min(deadline, left + _GRACE_S),
        window=WindowRules(max_s=window_s, precision=_PRECISION),
    )
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
        is_feasible=all(run.is_feasible or run.outcome == "timeout" for run in entrant.runs),
    )


def _as_confirmation(record: TrialRecord) -> Confirmation:
    return Confirmation(number=record.number, config=record.config, rounds=(record.measurement,))


def _scores(candidates: Sequence[Confirmation], tuning: Tuning) -> dict[int, float]:
    """The score of each candidate from its own runs, where all busy fractions have one source."""
    reference = _number_0(candidates) or candidates[0]
    sources = {run.busy_source for one in candidates for run in one.runs}
    scores = {}
    for one in candidates:
        busy = [run.busy_fraction for run in one.runs if run.busy_fraction is not None]
        idle = 1 - fmean(busy) if busy and len(sources) == 1 else 0.0
        scores[one.number] = one.samples_per_s / reference.samples_per_s * (1 - tuning.objective.busy_weight * idle)
    return scores


def _verdict(chosen: Confirmation, reference: Confirmation | None, *, is_confirmed: bool, is_open: bool) -> str:
    if reference is None:
        return "baseline_infeasible"
    if chosen.number == 0:
        return "unconfirmed" if is_open else "already_best"
    return "faster" if is_confirmed else "unconfirmed"


def _speedup(one: Confirmation | None, reference: Confirmation | None, *, is_confirmed: bool) -> Ratio | None:
    """The confirmed ratio; exactly 1 for the baseline itself."""
    if one is None or reference is None or not (is_confirmed or one.number == 0):
        return None
    return ratio_of(one, reference)


def _advice(config: TrainingConfig, tuning: Tuning) -> LrAdvice:
    ratio = config.global_batch_size / tuning.space.baseline.global_batch_size
    return scale_lr(tuning.space.baseline.lr, ratio, tuning.objective.lr_rule, tuning.space.facts.optimizer)


def _reasons(
    chosen: Confirmation,
    candidates: Sequence[Confirmation],
    tuning: Tuning,
    *,
    is_confirmed: bool,
) -> tuple[str, ...]:
    measured, reference = len(tuning.study.records), _number_0(candidates)
    fastest = max(candidates, key=lambda one: one.samples_per_s)
    reasons = []
    if reference is None:
        reasons.append("The baseline is no reference: it does not run within the limits. The first feasible trial is.")
    if chosen.number == 0:
        reasons.append(f"None of the {measured} configurations measured beats yours beyond the noise.")
    elif chosen.number != fastest.number:
        share = chosen.samples_per_s / fastest.samples_per_s
        reasons.append(f"Simplest of those as fast as the fastest (trial {fastest.number}; {share:.1%} of its rate).")
    else:
        reasons.append(f"Fastest of the {measured} configurations measured.")
    if is_confirmed:
        rounds = max(len(one.rounds) for one in candidates)
        names = f"{len(candidates)} configurations" if len(candidates) > 1 else "one configuration"
        reasons.append(f"Confirmed in {rounds} round{'s'[: rounds > 1]} of {names} measured in turns.")
    elif chosen.number != 0:
        reasons.append("Not confirmed: it was not measured again in turns with the baseline.")
    waits = [run.data_wait_fraction for run in chosen.runs]
    if reference is not None and chosen.number != 0:
        before = fmean(run.data_wait_fraction for run in reference.runs)
        reasons.append(f"The loop waits for data {fmean(waits):.0%} of the time, instead of {before:.0%}.")
        changed = ", ".join(changed_settings(chosen.config, reference.config))
        reasons.append(f"Changed: {changed}.")
    return tuple(reasons)


def _show(tuning: Tuning, entrant: _Entrant, done: int, total: int) -> None:
    tuning.show(
        Progress(
            phase="confirm",
            done=done,
            total=total,
            elapsed_s=tuning.clock.elapsed_s,
            remaining_s=tuning.clock.left_s,
            baseline=tuning.baseline,
            best=tuning.best,
            last=entrant.runs[-1],
        )
    )
