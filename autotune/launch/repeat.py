"""Jobs that are run again: to find the place of a failure, or to go on where a process has ended.

Takes a job and the function that runs it; hands on one report for all runs, which share the job's deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autotune.protocol.jobs import NO_EXTRAS, CurvesJob, ProbeJob, ProcessSetup, TrialJob
from autotune.protocol.reports import RankReport
from autotune.records.trial import TrialResult

__all__ = ["find_place", "go_on"]

_PROCESSES = 3
"""The most processes that curves are measured in. Our convention: two settings may be fatal."""

_Placed = TypeVar("_Placed", TrialJob, ProbeJob)


def find_place(job: _Placed, run: Callable[[_Placed, str], RankReport]) -> RankReport:
    """A job's report; a failure in it has its true place where that can be found.

    A device's failure is noticed some time after it happened. The job is then run once more, with launches that wait
    for their kernels, in what is left of the deadline, if that is no less than the first run took. Where it fails the
    same way, that is the failure; otherwise the first failure stays, with a reason that says so. The second run
    measures nothing after the window: what fails there is no failure of the trial.

    Args:
        job: What to run.
        run: Runs a job; the text is added to the log's name.
    """
    first = run(job, "")
    failure, took_s = first.result.failure, first.result.wall_s
    if failure is None or not failure.is_asynchronous:
        return first
    left_s = job.process.deadline_s - took_s
    if left_s < took_s:
        return _with_reason(first, "no time was left to look for the place where the device failed")
    changes: dict[str, object] = {"process": _with_deadline(job.process, left_s, blocks_launches=True)}
    if isinstance(job, TrialJob):
        changes |= {"extras": NO_EXTRAS, "streams_blocks": False}
    second = run(job.model_copy(update=changes), "-blocking")
    took_s += second.result.wall_s
    again = second.result.failure
    if second.result.outcome == "crashed" and again is not None and not again.is_asynchronous:
        return _changed(second, wall_s=took_s)
    end = "it did not fail"
    if second.result.outcome != "ok":
        end = f"it ended otherwise: {second.result.reason or second.result.outcome}"
    report = _with_reason(first, f"run once more, with launches that wait for their kernels, {end}")
    return _changed(report, wall_s=took_s)


def go_on(job: CurvesJob, run: Callable[[CurvesJob, str], RankReport]) -> RankReport:
    """The report of curves; where a process ended before it had measured all, another one measures the rest.

    The point at which a process ended keeps its reason and is not tried again. A process that has added nothing is the
    last one.

    Args:
        job: What to measure.
        run: Runs a job; the text is added to the log's name.
    """
    report = run(job, "")
    took_s = report.result.wall_s
    for number in range(2, _PROCESSES + 1):
        known, left_s = report.curves, job.process.deadline_s - took_s
        if known is None or not known.is_cut or left_s <= 0:
            break
        rest = job.model_copy(update={"process": _with_deadline(job.process, left_s), "known": known})
        further = run(rest, f"-{number}")
        took_s += further.result.wall_s
        if further.curves in (None, known):  # it has measured nothing more, and neither would the next process
            break
        report = further
    return _changed(report, wall_s=took_s)


def _with_deadline(process: ProcessSetup, deadline_s: float, *, blocks_launches: bool = False) -> ProcessSetup:
    return process.model_copy(update={"deadline_s": deadline_s, "blocks_launches": blocks_launches})


def _with_reason(report: RankReport, addition: str) -> RankReport:
    return _changed(report, reason=f"{report.result.reason} ({addition})")


def _changed(report: RankReport, **changes: object) -> RankReport:
    result: TrialResult = report.result.model_copy(update=changes)
    return report.model_copy(update={"result": result})
