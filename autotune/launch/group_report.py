"""One report of a group of ranks: the group's measurement, or the one outcome that explains the others.

Receives what each rank has answered, how the processes ended, and where the ranks stood shortly before that.
When a rank fails, the others fail with it: their connections close, their collectives time out. What such ranks answer
is collateral; here the rank that began it is found and named. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from autotune.analysis.group import merged_measurement
from autotune.launch.launcher import Exit
from autotune.launch.local.exit_codes import end_of
from autotune.launch.local.hang_report import Frame, Whereabouts, read_stack, users_part, whereabouts
from autotune.protocol.messages import RankReport
from autotune.records.measurement import Measurement
from autotune.records.trial import Failure, TrialResult

__all__ = ["one_report"]

_GRAVITY = {"oom": 0, "host_oom": 0, "crashed": 1}
_LEAST_GRAVITY = 2
_SUSPICION: dict[Whereabouts, int] = {"elsewhere": 0, "unknown": 1, "ours": 2, "calling": 3, "waiting": 4}


def one_report(
    reports: Sequence[RankReport | None],
    exit_: Exit,
    *,
    stacks: Sequence[str],
    deadline_s: float,
    over_memory: TrialResult | None = None,
) -> RankReport:
    """What a group comes to.

    Without a measurement of every rank, the first that there is of: a rank's failure of its own (memory before crashes
    before others), the end of a process that left no report, the end that we made for memory, that for time, and at
    last a failure that its rank takes for another's.

    Args:
        reports: Of each rank; None where it left none.
        exit_: How the ranks' processes ended, with a code for each.
        stacks: What faulthandler wrote of each rank, "" where nothing.
        deadline_s: The trial's.
        over_memory: What it means that the group was ended for its memory, where it was.
    """
    measured = [one.result.measurement for one in reports if one is not None and one.result.outcome == "ok"]
    known = [measurement for measurement in measured if measurement is not None]
    if len(known) == len(reports):
        return _merged(known)
    return (
        _own_failure(reports)
        or _sudden_end(reports, exit_)
        or (None if over_memory is None else RankReport(result=over_memory))
        or _time_out(reports, exit_, [read_stack(text) for text in stacks], deadline_s)
        or _collateral(reports, exit_)
    )


def _merged(measurements: Sequence[Measurement]) -> RankReport:
    try:
        return RankReport(result=TrialResult(outcome="ok", measurement=merged_measurement(measurements)))
    except ValueError as error:  # what a rank writes is read from a file, which the user's code may reach
        return RankReport(result=TrialResult(outcome="crashed", reason=f"the ranks' reports don't match: {error}"))


def _own_failure(reports: Sequence[RankReport | None]) -> RankReport | None:
    failed = [(rank, one) for rank, one in _failures(reports) if not one.is_collateral]
    if not failed:
        return None
    return _named(*min(failed, key=lambda found: _gravity(found[1].result)))  # the lowest rank among equals


def _sudden_end(reports: Sequence[RankReport | None], exit_: Exit) -> RankReport | None:
    """That of a rank which died by itself and left no report: by the kernel's killer, else the one that died first."""
    ends = {
        rank: end_of(code, was_oom_killed=exit_.was_oom_killed)
        for rank, code in enumerate(exit_.codes)
        if code is not None and reports[rank] is None
    }
    if not ends:
        return None
    rank = min(ends, key=lambda one: (_gravity(ends[one]), one != exit_.first, one))
    return _named(rank, RankReport(result=ends[rank]))


def _time_out(
    reports: Sequence[RankReport | None], exit_: Exit, stacks: Sequence[tuple[Frame, ...]], deadline_s: float
) -> RankReport | None:
    """Ranks that we have ended before they answered; named is the one that the others waited for.

    One that has told where it stood, and then saw others end before it, has no answer of its own.
    """
    silent = [rank for rank, one in enumerate(reports) if one is None or (one.is_collateral and stacks[rank])]
    if not silent:
        return None
    stuck = _awaited(silent, stacks)
    what = "the ranks stopped answering"
    if exit_.ended_for == "deadline":
        what = f"the trial did not end within {deadline_s:.0f} s"
    if exit_.ended_for == "straggling":
        what = f"the trial did not end after rank {exit_.first} had"
    if exit_.ended_for == "standstill":
        what = "no block ended within ten times the longest one's time (at least 30 s)"
    held = "" if stuck is None else ", the others waited for this rank"
    reason = f"{what}{held}; no answer came from {_say_ranks(silent)}"
    seen = [rank for rank in silent if stacks[rank]] if stuck is None else [stuck]
    failure = _failure_at(seen[0], stacks[seen[0]]) if seen else None
    report = RankReport(result=TrialResult(outcome="timeout", reason=reason, failure=failure))
    return report if stuck is None else _named(stuck, report)


def _awaited(silent: Sequence[int], stacks: Sequence[tuple[Frame, ...]]) -> int | None:
    """Of the ranks without an answer, the one whose end the others waited for; None where nothing tells them apart."""
    if len(silent) == 1:
        return silent[0]
    suspicion = {rank: _SUSPICION[whereabouts(stacks[rank])] for rank in silent}
    if len(set(suspicion.values())) == 1:
        return None
    return min(silent, key=suspicion.__getitem__)


def _failure_at(rank: int, stack: tuple[Frame, ...]) -> Failure | None:
    if not stack:
        return None
    frames = users_part(stack)
    place = f"{PurePath(frames[-1].file).name}:{frames[-1].line}"
    lines = (f"Where rank {rank} stood shortly before its end (most recent call last):", *map(str, frames))
    return Failure(signature=f"time-out at {place}", traceback="\n".join(lines))


def _collateral(reports: Sequence[RankReport | None], exit_: Exit) -> RankReport:
    """Every rank blames another: the one that ended first speaks for them."""
    failed = dict(_failures(reports))
    rank = min(failed, key=lambda one: (one != exit_.first, one))
    return _named(rank, failed[rank])


def _failures(reports: Sequence[RankReport | None]) -> list[tuple[int, RankReport]]:
    """Ranks that have answered, but measured nothing."""
    answers = [(rank, one) for rank, one in enumerate(reports) if one is not None]
    return [(rank, one) for rank, one in answers if one.result.outcome != "ok" or one.result.measurement is None]


def _gravity(result: TrialResult) -> int:
    return _GRAVITY.get(result.outcome, _LEAST_GRAVITY)


def _named(rank: int, report: RankReport) -> RankReport:
    """The report with the rank's number in its reason."""
    result = report.result.model_copy(update={"reason": f"rank {rank}: {report.result.reason}"})
    return report.model_copy(update={"rank": rank, "result": result})


def _say_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *before, last = map(str, ranks)
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"
