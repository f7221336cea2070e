"""Check what would be recommended: its precision against float32, its memory on the largest samples.

Comes in: a leading trial. Goes out: the figures of the check, or why the trial may not win.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.config.training_config import TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.messages.search import (
    precision_not_compared,
    precision_refused,
    stress_failed,
    stress_near_limit,
    stress_no_time,
    stress_note,
    stress_out_of_memory,
    stress_over_limit,
    stress_thrashing,
)
from autotune.models.time_estimate import overhead_s
from autotune.note import Note
from autotune.protocol.messages import RankReport
from autotune.records.trial import (
    OUT_OF_MEMORY,
    Outcome,
    StressFigures,
    TrialRecord,
    TrialResult,
    guard_key,
    load_of,
    needs_guard,
    objection,
    sample_scan_s,
    shortfall,
)
from autotune.settings_table import BATCH_SETTINGS
from autotune.space.constraints import ranks_on_host
from autotune.space.space import ResolvedSpace
from autotune.tuning.time_budget import TimeBudget

# The precision guard: one comparison to float32 for each cheaper precision, before a trial of it
# may win. Only a precision that leads is compared.


@dataclass(slots=True)
class PrecisionGuard:
    """The guard's answers so far, one for each precision and mode of compilation."""

    runner: TrialRunner
    baseline: TrainingConfig
    answers: dict[tuple[str, str], TrialResult] = field(default_factory=dict)
    """Figures of each precision that was compared, with outcome and reason if it may not win."""

    def recall(self, record: TrialRecord) -> None:
        """Restore the answer from a finished trial, unless the comparison could not run."""
        was_compared = (
            record.outcome == "diverged" if record.is_refused else record.result.guard is not None
        )
        if was_compared:
            self.answers.setdefault(guard_key(record.config), record.result)

    def known(self, config: TrainingConfig) -> TrialResult | None:
        """Return the answer for a configuration's precision, "ok" if it needs none; None: it must be compared."""
        if not needs_guard(config, self.baseline):
            return TrialResult(outcome="ok")
        return self.answers.get(guard_key(config))

    def compare(self, config: TrainingConfig, deadline_s: float) -> TrialResult:
        """Compare a configuration's precision with float32, at the baseline's micro batch, without workers.

        Args:
            config: The configuration.
            deadline_s: Seconds that the comparison may take.

        Returns:
            The answer: "ok" with the figures, or another outcome with the reason.
        """
        batch = {name: getattr(self.baseline, name) for name in BATCH_SETTINGS}
        compared = config.without_workers().model_copy(update={**batch, "grad_accum_steps": 1})
        dtype, mode = guard_key(config)
        name = f"guard-{dtype}"
        if mode:
            name += "-compile"
        if mode not in {"", "default"}:
            name += f"-{mode}"
        report = self.runner.guard(compared, name=name, deadline_s=deadline_s)
        figures = report.guard
        result = report.result
        outcome: Outcome = "ok"
        reason: Note | None = None
        if result.outcome != "ok" or figures is None:
            outcome = "crashed" if result.outcome == "ok" else result.outcome
            reason = precision_not_compared(result.reason, result.log)
            figures = None
        elif (too_few := shortfall(figures)) is not None:
            outcome = "timeout"
            reason = precision_not_compared(too_few, log=None)
        elif (against := objection(figures)) is not None:
            outcome = "diverged"
            reason = precision_refused(against)
        answer = TrialResult(outcome=outcome, reason=str(reason or ""), guard=figures)
        self.answers[guard_key(config)] = answer
        return answer


# The stress run: the winner trained for some seconds on the largest samples, under the memory limit.


@dataclass(frozen=True, slots=True, kw_only=True)
class StressCheck:
    """The result of a stress run."""

    figures: StressFigures | None = None
    """Figures of a run that passed; None if it failed, or could not be made."""
    is_refuted: bool = False
    """True if the trial does not fit on the largest samples."""
    notes: tuple[Note, ...] = ()


def may_overload(record: TrialRecord, space: ResolvedSpace) -> bool:
    """Return True if a batch of the largest samples might exceed the limit, so that a stress run is worthwhile."""
    peak = max((run.peak_memory_bytes for run in record.runs), default=0)
    sharing = 1  # ranks that share the memory
    if space.environment.has_only_ram:
        sharing = ranks_on_host(record.config.process_count, space.environment)
    return space.policy.trials.sure_room * peak * sharing > space.limit_bytes


def check_under_stress(record: TrialRecord, time: TimeBudget, runner: TrialRunner) -> StressCheck:
    """Run a trial's configuration on the largest samples.

    Args:
        record: The trial.
        time: The time left, and the study.
        runner: Runs the check.
    """
    limits = time.limits
    left_s = time.clock.left_s
    window_s = limits.short_search_stress_s if time.is_short_search else limits.stress_s
    if left_s is not None:
        start_s = overhead_s(record, time.build_s)
        window_s = min(window_s, left_s - start_s - sample_scan_s(left_s))
    if window_s < limits.shortest_stress_s:
        return StressCheck(notes=(stress_no_time(record.number),))
    deadline_s = time.repeat_deadline_s(record) + window_s
    if left_s is not None:
        deadline_s = min(deadline_s, left_s)
    report = runner.stress(
        record.config,
        name=f"stress-{record.number:03d}",
        deadline_s=deadline_s,
        train_s=window_s,
    )
    return _judged(record, time.study.space, report)


def _judged(record: TrialRecord, space: ResolvedSpace, report: RankReport) -> StressCheck:
    """Judge a stress run: only memory refutes the trial.

    A timeout refutes nothing, nor does a crash: a model may assert something that only a batch of
    the largest samples breaks.
    """
    figures = report.stress
    trial = record.number
    reason = report.result.reason
    if report.result.outcome in OUT_OF_MEMORY:
        return StressCheck(is_refuted=True, notes=(stress_out_of_memory(trial, reason),))
    if figures is None:
        return StressCheck(notes=(stress_failed(trial, reason),))
    load = load_of(figures, record.config, space.environment, space.facts)
    limit_bytes = space.limit_bytes
    if load.least_bytes > limit_bytes:
        over = stress_over_limit(
            trial,
            limit_bytes=limit_bytes,
            own_bytes=load.own_bytes,
            peak_bytes=load.peak_bytes,
            bucket_bytes=load.bucket_bytes,
            ranks=load.ranks,
            where=load.where,
            steps=figures.steps,
            largest_item_bytes=figures.largest_item_bytes,
            median_item_bytes=figures.median_item_bytes,
            items_seen=figures.items_seen,
        )
        return StressCheck(is_refuted=True, notes=(over,))
    notes = []
    if figures.note is not None:
        notes.append(stress_note(trial, figures.note))
    if figures.memory.is_thrashing:
        notes.append(
            stress_thrashing(trial, figures.memory.alloc_retries, later_steps=figures.steps - 1)
        )
    if load.peak_bytes > limit_bytes:
        notes.append(stress_near_limit(trial, load.ranks, load.peak_bytes, limit_bytes))
    return StressCheck(figures=figures, notes=tuple(notes))
