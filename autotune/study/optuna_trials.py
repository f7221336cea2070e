"""Trials in Optuna's study: how they are written, read back and compared; distributions, constraints."""

from __future__ import annotations

import warnings
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
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord, TrialResult, answered
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
    "is_promising",
    "lacks_baseline",
    "read_records",
    "tell_kept",
    "tell_record",
    "write_answer",
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
    """The records of a study's measured trials, in the order in which they ended.

    Records of an earlier version, which do not say when they ended, come first, by their numbers.
    """
    trials = [
        trial for trial in study.get_trials(deepcopy=False) if _RECORD in trial.user_attrs and trial.state.is_finished()
    ]
    trials.sort(key=lambda trial: trial.user_attrs.get(_PLACE, -1))
    records = [compacted(TrialRecord.model_validate_json(trial.user_attrs[_RECORD])) for trial in trials]
    attributes = study.user_attrs  # each look is a query
    return [_as_kept(record, attributes) for record in records]


def tell_kept(study: optuna.Study) -> None:
    """End the trials whose records are kept, and which a kill kept from being told: they are not run again."""
    for known in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _RECORD in known.user_attrs:
            measured = (one.measurement.samples_per_s for one in read_records(study) if one.measurement is not None)
            record = TrialRecord.model_validate_json(known.user_attrs[_RECORD])
            trial = optuna.Trial(study, known._trial_id)  # noqa: SLF001 - the storage's own key
            with warnings.catch_warnings():  # that what was told before the kill is kept
                warnings.simplefilter("ignore", UserWarning)
                tell_record(study, trial, record, next(measured, None))


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


def write_record(trial: optuna.Trial, record: TrialRecord, place: int) -> None:
    """Keep a record with its trial; `place` is its place in the order in which trials ended.

    The record comes last: where it is, all is.
    """
    trial.set_user_attr(_PLACE, place)
    trial.set_user_attr("outcome", record.outcome)
    trial.set_user_attr(_RECORD, record.model_dump_json())


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


def tell_record(study: optuna.Study, trial: optuna.Trial, record: TrialRecord, reference_rate: float | None) -> None:
    """Tell Optuna how a trial ended: limits as a violated constraint, time-outs as pruned, crashes as failed.

    The rate of a trial that was stopped early is reported over the reference's, in samples per second: on the scale of
    scores, but for the busy fraction.
    """
    if record.score is not None and record.measurement is not None and record.result.outcome == "ok":
        trial.set_constraint(_MEMORY, record.score.violation)
        study.tell(trial, record.score.value)
    elif record.outcome == "crashed":
        study.tell(trial, state=TrialState.FAIL)
    else:
        blocks = record.result.blocks
        if blocks and reference_rate is not None:
            trial.report(mean_rate(blocks)[0] / reference_rate, step=len(blocks))
        if record.outcome in OUT_OF_MEMORY and record.measurement is None:  # a guard's is not the trial's
            known = record.result.violation
            trial.set_constraint(_MEMORY, UNKNOWN_EXCESS_FRACTION if known is None else known)
        study.tell(trial, state=TrialState.PRUNED)


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
