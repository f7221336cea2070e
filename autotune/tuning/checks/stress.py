"""The last check of a recommendation: the winner trained for some seconds on the largest samples, under the limit.

Comes in: what the search has measured, the trial to check, the time left. Goes out: the figures of the run, whether it
refutes the trial, and notes.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.analysis.time_estimate import overhead_s
from autotune.launch.runner import TrialRunner
from autotune.messages.recommendation import (
    stress_failed,
    stress_near_limit,
    stress_no_time,
    stress_out_of_memory,
    stress_over_limit,
    stress_remark,
    stress_thrashing,
)
from autotune.note import Note
from autotune.protocol.reports import RankReport
from autotune.records.stress_check import StressFigures, load_of, sample_scan_s
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord
from autotune.space.constraints import ranks_on_host
from autotune.space.resolved_space import ResolvedSpace
from autotune.tuning.outcomes import SearchOutcome
from autotune.tuning.time_budget import repeat_deadline_s

__all__ = ["StressCheck", "check_under_stress", "may_overload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StressCheck:
    """How a stress run ended."""

    figures: StressFigures | None = None
    """Of a run that was passed; None where it refutes the trial, or could not be made."""
    is_refuted: bool = False
    notes: tuple[Note, ...] = ()


def may_overload(record: TrialRecord, space: ResolvedSpace) -> bool:
    """Return True where a batch of the largest samples might pass the limit, so that the run is worth its seconds."""
    peak = max((run.peak_memory_bytes for run in record.runs), default=0)
    sharing = ranks_on_host(record.config.process_count, space.environment) if space.environment.has_only_ram else 1
    return space.policy.trials.sure_room * peak * sharing > space.limit_bytes


def check_under_stress(
    record: TrialRecord, found: SearchOutcome, runner: TrialRunner, left_s: float | None
) -> StressCheck:
    """Run a trial's configuration on the largest samples; `left_s` is None where there is no time-out."""
    times = found.space.policy.time
    start_s = overhead_s(record, found.build_s)
    longest_s = times.brief_stress_s if found.is_brief else times.stress_s
    window_s = longest_s if left_s is None else min(longest_s, left_s - start_s - sample_scan_s(left_s))
    if window_s < times.shortest_stress_s:
        return StressCheck(notes=(stress_no_time(record.number),))
    deadline_s = repeat_deadline_s(record, found.build_s, times) + window_s
    report = runner.stress(
        record.config,
        name=f"stress-{record.number:03d}",
        deadline_s=deadline_s if left_s is None else min(deadline_s, left_s),
        train_s=window_s,
    )
    return _judged(record, found, report)


def _judged(record: TrialRecord, found: SearchOutcome, report: RankReport) -> StressCheck:
    """What the run says. That it took too long, or could not be made, refutes nothing.

    Nor does a crash: a model may well assert what a batch of the largest samples alone breaks.
    """
    figures, trial, reason = report.stress, record.number, report.result.reason
    if report.result.outcome in OUT_OF_MEMORY:
        return StressCheck(is_refuted=True, notes=(stress_out_of_memory(trial, reason),))
    if figures is None:
        return StressCheck(notes=(stress_failed(trial, reason),))
    load = load_of(figures, record.config, found.space.environment, found.space.facts)
    limit_bytes = found.space.limit_bytes
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
    if figures.remark is not None:
        notes.append(stress_remark(trial, figures.remark))
    if figures.memory.is_thrashing:
        notes.append(stress_thrashing(trial, figures.memory.alloc_retries, later_steps=figures.steps - 1))
    if load.peak_bytes > limit_bytes:
        notes.append(stress_near_limit(trial, load.ranks, load.peak_bytes, limit_bytes))
    return StressCheck(figures=figures, notes=tuple(notes))
