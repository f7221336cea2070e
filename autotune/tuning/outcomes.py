"""Judge how trials ended: which failures repeat, and whether the host limits the best configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.config.environment import GRAPH_KINDS
from autotune.config.plan import Budget, Choices, Domain, SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.errors import RepeatedFailureError, WorkloadError
from autotune.messages.search import host_bound, setting_left_out
from autotune.messages.trials import trial_disturbed
from autotune.models.evidence import Evidence
from autotune.note import Note
from autotune.records.ceilings import CeilingBook
from autotune.records.measurement import Measurement, best_direct_reading
from autotune.records.result import Recommendation, RunSpread
from autotune.records.trial import StressFigures, TrialRecord, TrialResult, believed_score, best_of
from autotune.space.ranges import whole_numbers
from autotune.space.space import ResolvedSpace, setting_of
from autotune.tuning.proposals import Params, compose_allowed, explaining_setting, params_of
from autotune.tuning.study import Study

# What a search has measured and proven: values that later stages read, never the live objects that
# made them.


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """What a search has measured, to its end or up to an interruption."""

    space: ResolvedSpace
    records: tuple[TrialRecord, ...]
    """Every measured trial, in order; number 0 is the baseline."""
    ceilings: CeilingBook
    """What loader and device reach alone, as far as it was measured."""
    notes: tuple[Note, ...]
    ended_because: Note | None
    """Why no further trial ran; None where it was interrupted."""
    expected_s: float | None
    """What the search was expected to take before its first trial; None where it went on from an
    interruption."""
    spread: RunSpread
    """Between runs of the same settings, as far as it was learned."""
    evidence: Evidence
    """Every run that ended well."""
    believed: Mapping[int, float]
    """Of feasible trials, by number: the logarithm of the rate that is believed from all that was
    measured."""
    proven: Mapping[int, float] = field(default_factory=dict)
    """By trial, the logarithm of the gain over the baseline that is proven."""
    is_settled: bool = False
    """It is decided whether the leader beats the baseline, or the time for that was used up."""
    run_s: float = 0.0
    """What a further run usually takes, in seconds."""
    build_s: float = 0.0
    """As TrialRunner has it."""
    is_brief: bool = False
    """As TimeBudget has it."""
    stresses: Mapping[int, StressFigures] = field(default_factory=dict)
    """What stress runs that were passed have shown, by the trial's number."""
    overloaded: tuple[int, ...] = ()
    """Trials that a stress run refutes, in the order in which they were run."""
    is_complete: bool = False
    """The search, its stress run included, came to its end: nothing interrupted it."""

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline's record; None where it did not come that far."""
        return next((record for record in self.records if record.number == 0), None)

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score, as far as it is believed."""
        return best_of(self.records, self.believed_score)

    @property
    def settled(self) -> int | None:
        """The trial with the largest proven gain; None without a proof."""
        return max(self.proven, key=self.proven.__getitem__, default=None)

    def batch_ratio(self, config: TrainingConfig) -> float:
        """A configuration's global batch over the baseline's."""
        return config.global_batch_ratio(self.space.baseline)

    def believed_score(self, record: TrialRecord) -> float:
        """A feasible trial's score at the rate that is believed of it."""
        return believed_score(record, self.believed)


def disturbances(number: int, result: TrialResult) -> Iterator[Note]:
    """For the report: that somebody has killed or stopped a process of a trial, and what came of it."""
    for remark in () if result.measurement is None else result.measurement.remarks:
        if remark.code in {"rerun_after_signal", "window_stopped"}:
            yield trial_disturbed(number, remark)


# What failures mean: the user's own code is broken, or one value of a setting does not work with
# it.
#
# Comes in: the records of trials as they end. Goes out: notes of the values that the study leaves
# out from then on.


_OF_THE_STEP = ("micro_batch_size", "amp_dtype", "channels_last", "intra_op_threads", "num_workers")


@dataclass(slots=True)
class FailureAttribution:
    """The failures of a search so far."""

    failures: dict[str, list[TrialRecord]] = field(default_factory=dict)
    left_out: list[tuple[str, frozenset[SettingValue]]] = field(default_factory=list)
    """Settings with values that were left out for their failures."""

    def learn(self, record: TrialRecord, study: Study) -> list[Note]:
        """Stop at the user's own failure in the baseline, or leave out a value that fails again and again.

        Raises:
            WorkloadError: the user's code fails in the baseline.
            RepeatedFailureError: the same exception ended three configurations, and no one setting
                explains it.
        """
        failure = record.result.failure
        if record.number == 0 and record.outcome in {"crashed", "invalid"}:
            raise WorkloadError(
                f"the workload must train in your own configuration, but the baseline ended: "
                f"{record.reason} "
                f"(log: {record.result.log})",
                remote_traceback=failure.traceback if failure is not None else "",
            )
        if record.outcome != "invalid" and (failure is None or record.outcome == "timeout"):
            return []  # to hang is no exception of the user's
        if (
            failure is not None and failure.is_asynchronous
        ):  # its place means nothing, nor does that of another
            return []
        if any(setting_of(record.config, name) in values for name, values in self.left_out):
            return []  # it was under way when that was left out
        same = self.failures.setdefault(record.reason if failure is None else failure.signature, [])
        same.append(record)
        same_failures = study.space.policy.trials.same_failures
        if len(same) < same_failures:
            return []
        succeeded = [other.config for other in study.records if other.measurement is not None]
        explanation = explaining_setting([other.config for other in same], succeeded)
        if explanation is None and study.space.facts.script is not None:
            explanation = _shared_change([other.config for other in same], succeeded, study.space)
        if explanation is None:
            if (
                failure is None
            ):  # no exception: what this workload can't be measured with, in several settings
                return []
            raise RepeatedFailureError(
                f"the same exception at the same place ended {same_failures} configurations: "
                f"{record.reason} "
                f"(logs: {', '.join(str(other.result.log) for other in same)})\n\n{failure.traceback}"
            )
        setting, values = explanation
        study.leave_out({setting: values})
        self.left_out.append(explanation)
        same.clear()
        listed = sorted(map(str, values))
        return [
            setting_left_out(setting, values=listed, failures=same_failures, reason=record.reason)
        ]


def _shared_change(
    failed: Sequence[TrainingConfig], succeeded: Sequence[TrainingConfig], space: ResolvedSpace
) -> tuple[str, frozenset[SettingValue]] | None:
    """A setting in which all of some configurations differ from the baseline, with its values.

    A script that breaks under a setting loses that setting, not the search. Of several such
    settings one is blamed whose values no success has; then the one that reaches furthest into the
    training: what a model computes with, then how its batches come.
    """
    good = [space.baseline, *succeeded]
    changed = list[tuple[str, frozenset[SettingValue]]]()
    for name in dict.fromkeys((*_OF_THE_STEP, *sorted(space.parameters))):
        values = frozenset(setting_of(config, name) for config in failed)
        if setting_of(space.baseline, name) not in values:
            changed.append((name, values))
    alone = (
        one for one in changed if one[1].isdisjoint({setting_of(config, one[0]) for config in good})
    )
    return next(alone, changed[0] if changed else None)


# Cures for a loop that its host holds: configurations that may cure it, and a note for the report.
# Pure.
#
# A loop is held by its host where the device waits for launches, or for the training process to
# take batches that lie ready. Larger micro batches, fused optimizers, pinned memory and CUDA graphs
# ask less of the host for each sample.


_HOST_BOUND_FROM = 0.20
"""Share of the time in which the device waits for the host, from which it limits: for cures and for
the diagnosis."""


def is_host_bound(run: Measurement | None) -> bool:
    """Return True where the device waits a fifth of a run's time or more for its host."""
    return run is not None and (run.host_fraction or 0.0) >= _HOST_BOUND_FROM


def waits_most_for_host(run: Measurement | None) -> bool:
    """Return True where the device waits for its host by `is_host_bound`, and no longer for data than for that."""
    return (
        is_host_bound(run)
        and run is not None
        and (run.host_fraction or 0.0) >= (run.data_wait_fraction or 0.0)
    )


def busy_while_host_bound(run: Measurement) -> float | None:
    """Return the share of time in which the device is busy, of a run that waits most for its host; None for others."""
    reading = best_direct_reading(run.busy_readings) if waits_most_for_host(run) else None
    return None if reading is None else reading.fraction


def compilation_domains(
    run: Measurement, space: ResolvedSpace, budget: Budget
) -> Mapping[str, Domain]:
    """Return the values of torch.compile's settings that become worth searching; none where they are not.

    Not where the user has named values of them, where shapes vary (each would be recorded as a
    graph of its own), or where the training to come is too short to pay for compiling.

    Args:
        run: Of the best configuration, whose host holds it.
        space: What is searched so far.
        budget: Holds the hours of training that are still to come.
    """
    trials = space.policy.trials
    is_listed = {"compile", "compile_mode"} & {*space.given} or len(space.domains["compile"]) > 1
    saved_s = (run.host_fraction or 0.0) * budget.training_s
    has_graphs = space.environment.device_kind in GRAPH_KINDS and space.facts.has_fixed_shapes
    if is_listed or not has_graphs or saved_s < trials.worth_compiling * trials.compiling_s:
        return {}
    return {
        "compile": Choices(values=(False, True)),
        "compile_mode": Choices(values=("default", "reduce-overhead")),
    }


def list_cures(
    best: TrainingConfig, space: ResolvedSpace, *, fits: Callable[[TrainingConfig], bool]
) -> Iterator[Params]:
    """Yield the best configuration with less work for its host, each with pinned memory and a fused optimizer's step.

    First comes a larger micro batch, where possible at the same global batch; then CUDA graphs,
    where these are searched; then nothing else.

    Args:
        best: The best configuration.
        space: What is searched.
        fits: Whether a configuration is likely to fit into memory.
    """
    own = params_of(best, space)
    own |= {
        name: True
        for name in ("pin_memory", "fused")
        if name in own and True in space.domains[name]
    }
    setting = space.batch_setting
    steps = best.grad_accum_steps
    batch = own.get(setting)
    same = list[Params]()
    larger = list[Params]()
    if isinstance(batch, int):
        most = space.policy.trials.most_growth * batch
        sizes = [size for size in whole_numbers(space.domains[setting]) if batch < size <= most]
        larger = [{setting: size} for size in sorted(sizes, reverse=True)]
        if "grad_accum_steps" in own:
            same = [
                {**one, "grad_accum_steps": steps * batch // size}
                for one in larger
                if isinstance(size := one[setting], int) and steps * batch % size == 0
            ]
    graphs: list[Params] = (
        [{"compile": True, "compile_mode": "reduce-overhead"}] if "compile_mode" in own else []
    )
    alternatives: tuple[list[Params], ...] = ([*same, *larger], graphs, [{}])
    for options in alternatives:
        for wish in options:
            config = compose_allowed({**own, **wish}, space)
            if config is not None and fits(config):
                yield {**own, **wish}
                break


def host_notes(found: SearchOutcome, chosen: Recommendation | None) -> Iterator[Note]:
    """Yield a note where the host holds what is recommended, with what was measured of it."""
    if chosen is None:
        return
    runs = [
        run for record in found.records if record.number == chosen.number for run in record.runs
    ]
    known = [run for run in reversed(runs) if run.host_fraction is not None]
    run = next((one for one in known if one.breakdown is not None), known[0] if known else None)
    if run is None or run.host_fraction is None or not is_host_bound(run):
        return
    device = found.ceilings.ceiling_of("device", chosen.config)
    yield host_bound(
        host_fraction=run.host_fraction,
        batch_s=run.window.batch_s,
        launch_s=None if device is None else device.host_s,
        take_s=run.window.take_s,
        has_compiled=any(record.config.compile for record in found.records),
        is_pinned=chosen.config.pin_memory,
    )
