"""Trials in Optuna's study: how they are written, read back and compared; distributions, constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.analysis.memory.lines import UNKNOWN_EXCESS_FRACTION
from autotune.analysis.rates import mean_rate
from autotune.frozen import compacted
from autotune.note import Note
from autotune.records.trial import OUT_OF_MEMORY, Score, TrialRecord, TrialResult, answered
from autotune.settings.search_space import Choices, Domain, IntRange
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.proposals import params_of

__all__ = [
    "CONFIG",
    "PROMISING",
    "answer_skipped",
    "as_begun",
    "begun_params",
    "carried",
    "distributions_of",
    "end_recorded",
    "end_trial",
    "is_promising",
    "lacks_baseline",
    "read_records",
    "write_answer",
    "write_figures",
    "write_record",
    "write_repeats",
]

CONFIG = "autotune_config"
"""User attribute: the configuration as it was handed out."""
PROMISING = {"role": "promising"}
"""User attribute: a model expected most of this trial."""
_RECORD = "autotune_record"
_PLACE = "autotune_place"  # of a record in the order in which trials ended
_MEMORY = "memory"
_REPEATS = "autotune_repeats_"  # and the trial's number
_ANSWER = "guard of "


def as_begun(space: ResolvedSpace, study: optuna.Study) -> ResolvedSpace:
    """The space with the default choices that the study's trials were drawn from.

    Each start probes anew, and some choices follow from times that the probe took: they may come out otherwise, but
    Optuna takes no other choices in the same study. Source: optuna.distributions.check_distribution_compatibility.
    """
    begun: dict[str, Domain] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, known in trial.distributions.items():
            if isinstance(known, CategoricalDistribution) and name in space.domains and name not in space.given:
                begun.setdefault(name, Choices(values=known.choices))
        fixed = trial.system_attrs.get("fixed_params", {})  # of one that waits, nothing else is there
        for name, value in fixed.items():
            domain = begun.get(name, space.domains.get(name))
            if isinstance(domain, Choices) and value not in domain and name not in space.given:
                begun[name] = Choices(values=(*domain.values, value))
    return replace(space, domains={**space.domains, **begun})


def distributions_of(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """Optuna's form of each searched setting, widened to the baseline's value, which `compose` refuses to others."""
    baseline = params_of(space.baseline, space)
    return {name: _distribution(domain, baseline, name) for name, domain in space.parameters.items()}


def _distribution(domain: Domain, baseline: Mapping[str, Any], name: str) -> BaseDistribution:
    own = baseline.get(name)
    if isinstance(domain, IntRange):
        ends = [domain.low, domain.high, *([own] if isinstance(own, int) else [])]
        return IntDistribution(min(ends), max(ends), log=domain.log and min(ends) >= 1)
    values = list(domain.values)
    return CategoricalDistribution(values if name not in baseline or own in domain else [*values, own])


def read_records(study: optuna.Study) -> list[TrialRecord]:
    """Return the records of a study's measured trials, in the order in which they ended."""
    trials = [
        trial for trial in study.get_trials(deepcopy=False) if _RECORD in trial.user_attrs and trial.state.is_finished()
    ]
    trials.sort(key=lambda trial: trial.user_attrs[_PLACE])
    records = [compacted(TrialRecord.model_validate_json(trial.user_attrs[_RECORD])) for trial in trials]
    attributes = study.user_attrs  # each look is a query
    return [_as_kept(record, attributes) for record in records]


def end_recorded(study: optuna.Study) -> None:
    """End the trials that a kill kept from ending once their records were written: they are not run again."""
    for known in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _RECORD in known.user_attrs:
            end_trial(study, known.number, TrialRecord.model_validate_json(known.user_attrs[_RECORD]))


def begun_params(trial: FrozenTrial) -> dict[str, Any]:
    """The values of an interrupted trial: those that it was handed out with, and those it was to have."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def lacks_baseline(study: optuna.Study) -> bool:
    """Whether the first trial, the baseline, was interrupted or failed: then nothing in the study can be used."""
    trials = study.get_trials(deepcopy=False)
    ended = (trial.user_attrs.get(_RECORD) for trial in trials[:1] if trial.state.is_finished())
    baseline = next((TrialRecord.model_validate_json(record) for record in ended if record is not None), None)
    return bool(trials) and (baseline is None or baseline.outcome in {"crashed", "invalid"})


def carried(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The user attributes that an interrupted trial passes on to the one that repeats it."""
    return {name: value for name, value in attributes.items() if name in {CONFIG, *PROMISING}}


def is_promising(attributes: Mapping[str, Any]) -> bool:
    """Whether a model expected most of the trial that has these user attributes."""
    return bool(attributes.get("role") == PROMISING["role"])


def write_figures(trial: optuna.Trial, record: TrialRecord, reference_rate: float | None) -> None:
    """Write what Optuna's samplers and pruners learn from besides the score: memory as a constraint, throughput.

    The throughput of a trial that was stopped early is reported over the reference's, in samples/s: on the scale of
    scores, but for the busy fraction.
    """
    score = _score_of(record)
    if score is not None:
        trial.set_constraint(_MEMORY, score.violation)
        return
    if record.outcome == "crashed":
        return
    blocks = record.result.blocks
    if blocks and reference_rate is not None:
        trial.report(mean_rate(blocks)[0] / reference_rate, step=len(blocks))
    if record.outcome in OUT_OF_MEMORY and record.measurement is None:  # a guard's is not the trial's
        known = record.result.violation
        trial.set_constraint(_MEMORY, UNKNOWN_EXCESS_FRACTION if known is None else known)


def write_record(trial: optuna.Trial, record: TrialRecord, place: int) -> None:
    """Write a record to its trial; `place` is its place in the order in which trials ended.

    The record is written last: where it is, all is, and `end_recorded` needs no more to end the trial.
    """
    trial.set_user_attr(_PLACE, place)
    trial.set_user_attr("outcome", record.outcome)
    trial.set_user_attr(_RECORD, record.model_dump_json())


def end_trial(study: optuna.Study, number: int, record: TrialRecord) -> None:
    """End a trial in Optuna: with its score, a crash as failed, anything else as pruned."""
    score = _score_of(record)
    if score is not None:
        study.tell(number, score.value)
    elif record.outcome == "crashed":
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, state=TrialState.PRUNED)


def write_repeats(study: optuna.Study, record: TrialRecord) -> None:
    """Keep the further runs of a trial with the study: Optuna takes no attribute of a trial that has ended."""
    study.set_user_attr(f"{_REPEATS}{record.number}", [run.model_dump_json() for run in record.repeats])


def write_answer(study: optuna.Study, record: TrialRecord) -> None:
    """Keep the precision guard's answer on a trial with the study, for the same reason."""
    answer = record.result.model_dump_json(include={"outcome", "reason", "guard"})
    study.set_user_attr(f"{_ANSWER}{record.number}", answer)


def _as_kept(record: TrialRecord, attributes: Mapping[str, Any]) -> TrialRecord:
    """A record with the further runs and the guard's answer that came after it."""
    answer = attributes.get(f"{_ANSWER}{record.number}")
    if answer is not None:
        record = answered(record, TrialResult.model_validate_json(answer))
    for run in attributes.get(f"{_REPEATS}{record.number}", []):
        record = record.with_run(compacted(TrialResult.model_validate_json(run)))
    return record


def _score_of(record: TrialRecord) -> Score | None:
    """Return the score of a trial that ended well, else None."""
    is_measured = record.measurement is not None and record.result.outcome == "ok"
    return record.score if is_measured else None


def answer_skipped(study: optuna.Study, trial: optuna.Trial, reason: Note | None) -> None:
    """Answer a sample that is not run: "would_tell_nothing" as failed, from which samplers learn nothing, else pruned.

    Without a reason to skip it, it breaks a rule of the space, or was left out.
    """
    code = "invalid" if reason is None else reason.code
    trial.set_user_attr("outcome", code)
    if reason is not None and reason.figures:
        trial.set_user_attr("figures", reason.figures)
    if code == "would_not_fit":
        trial.set_constraint(_MEMORY, UNKNOWN_EXCESS_FRACTION)
    study.tell(trial, state=TrialState.FAIL if code == "would_tell_nothing" else TrialState.PRUNED)
