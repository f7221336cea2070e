"""Judge how trials ended: the outcome of a search, failures that repeat, and host-bound configurations.

Comes in: the records of trials as they end. Goes out: the SearchOutcome that later stages read,
values to leave out, variants with less work for the host, and notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.config.environment import GRAPH_KINDS
from autotune.config.plan import Budget, Choices, Domain
from autotune.config.training_config import TrainingConfig
from autotune.errors import RepeatedFailureError, WorkloadError
from autotune.messages.search import host_bound, setting_left_out
from autotune.models.evidence import Evidence
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.ceilings import CeilingBook
from autotune.records.measurement import Measurement, best_direct_reading
from autotune.records.result import Recommendation
from autotune.records.trial import (
    StressFigures,
    TrialRecord,
    believed_score,
    best_of,
    runs_of,
)
from autotune.settings_table import SETTINGS
from autotune.space.ranges import whole_numbers
from autotune.space.space import ResolvedSpace, setting_of
from autotune.tuning.proposals import (
    Explanation,
    Params,
    compose_allowed,
    explaining_setting,
    params_of,
)
from autotune.tuning.study import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Everything a search has measured and proven, to its end or up to an interruption."""

    space: ResolvedSpace
    records: tuple[TrialRecord, ...]
    """Every measured trial, in order; number 0 is the baseline."""
    ended_because: Note | None
    """The reason why no further trial ran; None after an interruption."""
    evidence: Evidence
    """Every run that ended well."""
    believed: Mapping[int, float]
    """Logarithm of the believed throughput of each feasible trial, by number."""
    proven: Mapping[int, float] = field(default_factory=dict)
    """Logarithm of the proven gain over the baseline, by number."""
    is_settled: bool = False
    """True once it is decided whether the leader beats the baseline, or the time for that is up."""
    run_s: float = 0.0
    """Seconds that a further run usually takes."""
    stresses: Mapping[int, StressFigures] = field(default_factory=dict)
    """Figures of the stress runs that passed, by the trial's number."""
    overloaded: tuple[int, ...] = ()
    """Trials that failed their stress run, in the order in which they were run."""

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline's record; None before it has run."""
        return next((record for record in self.records if record.number == 0), None)

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best believed score."""
        return best_of(self.records, self.believed_score)

    @property
    def most_proven(self) -> int | None:
        """The trial with the largest proven gain; None without a proof."""
        return max(self.proven, key=self.proven.__getitem__, default=None)

    def batch_ratio(self, config: TrainingConfig) -> float:
        """Return a configuration's global batch over the baseline's."""
        return config.global_batch_ratio(self.space.baseline)

    def believed_score(self, record: TrialRecord) -> float:
        """Return a feasible trial's score at its believed throughput."""
        return believed_score(record, self.believed)


# Causes of failures: the user's own code is broken, or one value of a setting does not work with it.


_OF_THE_STEP = ("micro_batch_size", "amp_dtype", "channels_last", "intra_op_threads", "num_workers")


@dataclass(slots=True)
class FailureAttribution:
    """The failures of a search so far."""

    failures: dict[str, list[TrialRecord]] = field(default_factory=dict)
    left_out: list[Explanation] = field(default_factory=list)
    """Settings with the values that were left out for their failures."""

    def learn(self, record: TrialRecord, study: Study) -> list[Note]:
        """Learn from a trial that ended: leave out a value that fails again and again.

        Args:
            record: The trial.
            study: The study, which leaves the value out from then on.

        Returns:
            A note for each value that is left out.

        Raises:
            WorkloadError: the user's code fails in the baseline.
            RepeatedFailureError: the same exception ended three configurations, and no one setting
                explains it.
        """
        failure = record.result.failure
        if record.number == 0 and record.outcome in {"crashed", "invalid"}:
            raise WorkloadError(
                f"the workload must train in your own configuration, but the baseline ended: "
                f"{record.reason} (log: {record.result.log})",
                remote_traceback="" if failure is None else failure.traceback,
            )
        if failure is None and record.outcome != "invalid":
            return []
        # a hang is no exception of the user's; the place of an asynchronous one means nothing
        if failure is not None and (record.outcome == "timeout" or failure.is_asynchronous):
            return []
        if any(setting_of(record.config, name) in values for name, values in self.left_out):
            return []  # it was under way when that value was left out
        # count failures of a kind until there are enough to look for a cause
        same = self.failures.setdefault(record.reason if failure is None else failure.signature, [])
        same.append(record)
        same_failures = study.space.policy.trials.same_failures
        if len(same) < same_failures:
            return []
        failed = [other.config for other in same]
        succeeded = [other.config for other in study.records if other.measurement is not None]
        explanation = explaining_setting(failed, succeeded)
        if explanation is None and study.space.facts.script is not None:
            explanation = _shared_change(failed, succeeded, study.space)
        if explanation is None:
            if failure is None:
                return []  # no exception: this workload can't be measured with several settings
            logs = ", ".join(str(other.result.log) for other in same)
            raise RepeatedFailureError(
                f"the same exception at the same place ended {same_failures} configurations: "
                f"{record.reason} (logs: {logs})\n\n{failure.traceback}"
            )
        # leave out the value that explains them
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
) -> Explanation | None:
    """Return a setting that all failures have changed from the baseline, with its values; None without one.

    So a script that breaks under a setting loses that setting, not the search. Of several settings,
    one whose values occur in no success comes first, then the one that changes training the most:
    the model's computation before its input.
    """
    good = [space.baseline, *succeeded]
    first: Explanation | None = None
    for name in dict.fromkeys((*_OF_THE_STEP, *sorted(space.parameters))):
        values = frozenset(setting_of(config, name) for config in failed)
        if setting_of(space.baseline, name) in values:
            continue
        if values.isdisjoint({setting_of(config, name) for config in good}):
            return name, values
        first = first or (name, values)
    return first


# Host-bound training: configurations with less work for the host, and a note for the report. Pure.
#
# Training is host-bound if the device waits for launches, or for the training process to take
# batches that are ready. Larger micro batches, fused optimizers, pinned memory and CUDA graphs need
# less of the host for each sample.


def is_host_bound(run: Measurement | None, least: float = POLICY.trials.host_bound) -> bool:
    """Return True if the device waits for its host for at least a fraction `least` of a run's time."""
    return run is not None and (run.host_fraction or 0.0) >= least


def busy_while_host_bound(run: Measurement) -> float | None:
    """Return the busy fraction of the device if a run waits for its host at least as long as for data; else None."""
    if not is_host_bound(run) or (run.host_fraction or 0.0) < (run.data_wait_fraction or 0.0):
        return None
    reading = best_direct_reading(run.busy_readings)
    return None if reading is None else reading.fraction


def compilation_domains(
    run: Measurement, space: ResolvedSpace, budget: Budget
) -> Mapping[str, Domain]:
    """Return the values of torch.compile's settings that become worth searching; empty if none are.

    None are if the user has named values, if shapes vary (each would be recorded as a graph of its
    own), or if the training to come is too short to pay for compiling.

    Args:
        run: A run of the best configuration, which is host-bound.
        space: The space searched so far.
        budget: The user's budget, with the hours of training to come.
    """
    trials = space.policy.trials
    if {"compile", "compile_mode"} & {*space.given} or len(space.domains["compile"]) > 1:
        return {}
    if space.environment.device_kind not in GRAPH_KINDS or not space.facts.has_fixed_shapes:
        return {}
    saved_s = (run.host_fraction or 0.0) * budget.training_s
    if saved_s < trials.worth_compiling * trials.compiling_s:
        return {}
    return {
        "compile": Choices(values=(False, True)),
        "compile_mode": Choices(values=("default", "reduce-overhead")),
    }


def list_cures(
    best: TrainingConfig, space: ResolvedSpace, *, fits: Callable[[TrainingConfig], bool]
) -> Iterator[Params]:
    """Yield variants of the best configuration with less work for its host.

    All have pinned memory and a fused optimizer. The first has a larger micro batch, if possible at
    the same global batch; the second has CUDA graphs, if these are searched; the last has nothing
    else.

    Args:
        best: The best configuration.
        space: The space that is searched.
        fits: Returns True for a configuration that is likely to fit into memory.
    """
    own = params_of(best, space)
    for setting in SETTINGS:
        if setting.spares_host and setting.name in own and True in space.domains[setting.name]:
            own[setting.name] = True

    # larger micro batches, the largest first; before them those at the same global batch
    size_setting = space.batch_setting
    batch = own.get(size_setting)
    same = list[Params]()
    larger = list[Params]()
    if isinstance(batch, int):
        samples = best.grad_accum_steps * batch
        most = space.policy.trials.most_growth * batch
        sizes = [
            size for size in whole_numbers(space.domains[size_setting]) if batch < size <= most
        ]
        for size in sorted(sizes, reverse=True):
            larger.append({size_setting: size})
            if "grad_accum_steps" in own and samples % size == 0:
                same.append({size_setting: size, "grad_accum_steps": samples // size})

    graphs = list[Params]()
    if "compile_mode" in own:
        graphs.append({"compile": True, "compile_mode": "reduce-overhead"})
    alternatives: tuple[list[Params], ...] = ([*same, *larger], graphs, [{}])
    for options in alternatives:
        for changes in options:
            config = compose_allowed({**own, **changes}, space)
            if config is not None and fits(config):
                yield {**own, **changes}
                break


def host_notes(
    records: Sequence[TrialRecord], ceilings: CeilingBook, winner: Recommendation | None
) -> Iterator[Note]:
    """Yield a note with the figures of a run if the recommended configuration is host-bound.

    They are those of its latest run with a time breakdown, else of its latest one.
    """
    if winner is None:
        return
    runs = [run for run in runs_of(records, winner.number) if run.host_fraction is not None]
    if not runs:
        return
    run = next((one for one in reversed(runs) if one.breakdown is not None), runs[-1])
    if run.host_fraction is None or not is_host_bound(run):
        return
    device = ceilings.ceiling_of("device", winner.config)
    yield host_bound(
        host_fraction=run.host_fraction,
        batch_s=run.window.batch_s,
        launch_s=None if device is None else device.host_s,
        take_s=run.window.take_s,
        has_compiled=any(record.config.compile for record in records),
        is_pinned=winner.config.pin_memory,
    )
