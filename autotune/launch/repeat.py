"""Jobs that are run again: to find the place of a failure, or to go on where a process has ended.

Takes a function that runs the job; hands on one report for all runs, which share one deadline.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.protocol.messages import RankReport
from autotune.records.diagnosis import Curves

__all__ = ["find_place", "go_on"]

_PROCESSES = 3
"""That curves are measured in at the most, where each ends early. Our own convention: two settings may be fatal."""


def find_place(first: RankReport, deadline_s: float, run_again: Callable[[float], RankReport]) -> RankReport:
    """A job's report, whose failure has a true place where it can be found.

    A device's failure is noticed some time after it happened. The job is then run once more, with launches that wait
    for their kernels, in what is left of the deadline: no less than the first run took. Where it fails so again that is
    the failure, and else the first one stays, with a reason that says so.
    """
    failure, wall_s = first.result.failure, first.result.wall_s
    if failure is None or not failure.is_asynchronous:
        return first
    if deadline_s - wall_s < wall_s:
        return _with_reason(first, "no time was left to look for the place where the device failed")
    second = run_again(deadline_s - wall_s)
    wall_s += second.result.wall_s
    again = second.result.failure
    if second.result.outcome == "crashed" and again is not None and not again.is_asynchronous:
        return _with_wall_s(second, wall_s)
    ended = "it did not fail"
    if second.result.outcome != "ok":
        ended = f"it ended otherwise: {second.result.reason or second.result.outcome}"
    told = _with_reason(first, f"run once more, with launches that wait for their kernels, {ended}")
    return _with_wall_s(told, wall_s)


def go_on(run: Callable[[str, float, Curves | None], RankReport], name: str, deadline_s: float) -> RankReport:
    """The report of curves; where a process ended before it had measured all, another goes on with the rest.

    What a process ended at is left with its reason and not tried again; one that has added nothing is the last. `run`
    is given a name for the log, the seconds that are left, and the points so far.
    """
    report = run(name, deadline_s, None)
    wall_s = report.result.wall_s
    for number in range(2, _PROCESSES + 1):
        known = report.curves
        if known is None or not known.is_cut or wall_s >= deadline_s:
            break
        further = run(f"{name}-{number}", deadline_s - wall_s, known)
        wall_s += further.result.wall_s
        if further.curves in (None, known):  # it did not come to measuring, or no further: so would the next
            break
        report = further
    return _with_wall_s(report, wall_s)


def _with_reason(report: RankReport, addition: str) -> RankReport:
    reason = f"{report.result.reason} ({addition})"
    return report.model_copy(update={"result": report.result.model_copy(update={"reason": reason})})


def _with_wall_s(report: RankReport, wall_s: float) -> RankReport:
    return report.model_copy(update={"result": report.result.model_copy(update={"wall_s": wall_s})})
