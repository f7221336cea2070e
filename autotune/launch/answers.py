"""What a trial's ranks have answered, or what it means that they have not: a Launch and its Exit in, one report out.

When a rank of a group fails, the others fail with it: their connections close, their collectives time out. The answers
of such ranks are collateral; here the rank that failed first is found and named. The memory limits are those that a
trial is judged by, and the ceiling of RAM at which it is ended. Of a single process:

    a report was written                             what it says, however the process ended afterwards
    a report of curves that are cut                  as if there were none, but for the curves
    ended at its deadline, for its RAM, cancelled    timeout, host_oom, pruned
    ended by SIGKILL while the kernel's killer ran   host_oom
    could not write its report                       crashed, for its folder
    any other end                                    crashed
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from pydantic import ValidationError

from autotune.analysis.group import merged_measurement
from autotune.analysis.scoring import LEAST_VIOLATION
from autotune.launch.launcher import Exit, Launch
from autotune.launch.local.hang_report import Frame, Whereabouts, read_stack, users_part, whereabouts
from autotune.protocol.disk import read_model
from autotune.protocol.reports import REPORT_UNWRITTEN, RankReport
from autotune.records.measurement import Measurement
from autotune.records.memory import MemoryLimits
from autotune.records.trial import OUT_OF_MEMORY, Failure, TrialResult

__all__ = ["one_report", "ram_ceiling_bytes", "read_answer"]

_FAR_ABOVE = 1.2  # our convention: a peak that is a little too high is measured and judged, not ended
_RAM_SHARE = 0.95  # our convention: ended before the kernel's out-of-memory killer chooses a process
_NOTHING = " before it had measured anything"
_UNWRITTEN = (
    "the trial's report could not be written into its folder, most likely since the disk is full or the trial has used "
    "up all that its processes may open; its log says what failed"
)
_SIGNALS = {"SIGSEGV": "a segmentation fault", "SIGABRT": "an abort", "SIGBUS": "a bus error"}
_SUSPICION: dict[Whereabouts, int] = {"elsewhere": 0, "unknown": 1, "ours": 2, "calling": 3, "waiting": 4}


def read_answer(launch: Launch, exit_: Exit, limits: MemoryLimits) -> RankReport:
    """The report of a trial that has ended; of a group, that of all ranks together."""
    codes = exit_.codes if len(exit_.codes) > 1 else (exit_.code,)
    answers = [_answer(launch.folder.report_of(rank), code) for rank, code in enumerate(codes)]
    over_memory = _over_memory(limits, exit_.memory_bytes or 0) if exit_.ended_for == "memory" else None
    if exit_.ended_for == "cancelled" and None in answers:
        return RankReport(result=TrialResult(outcome="pruned", reason="the trial was cancelled"))
    if len(answers) > 1:
        stacks = [_text_of(launch.folder.stack_of(rank)) for rank in range(launch.ranks)]
        return one_report(answers, exit_, stacks=stacks, deadline_s=launch.deadline_s, over_memory=over_memory)
    report = answers[0]
    if report is None:
        return RankReport(result=over_memory or _unanswered(exit_, launch.deadline_s))
    is_ended = exit_.ended_for not in {None, "done"} or exit_.code not in {None, 0}
    if is_ended and report.curves is not None and report.curves.is_cut:
        ended = over_memory or _unanswered(exit_, launch.deadline_s)
        return report.model_copy(update={"result": ended}).with_result(reason=ended.reason.removesuffix(_NOTHING))
    return report


def ram_ceiling_bytes(limits: MemoryLimits) -> int | None:
    """Return the RAM at which a trial is ended: far above the limit, yet before the kernel acts; None: unknown."""
    if limits.ram_bytes is None:
        return None
    most = int(limits.ram_bytes * _RAM_SHARE)
    if limits.limit_is_ram and limits.limit_bytes:
        return min(most, int(limits.limit_bytes * _FAR_ABOVE))
    return most


def _over_memory(limits: MemoryLimits, taken_bytes: int) -> TrialResult:
    """Return the result of a trial that was ended for its RAM."""
    limit = limits.limit_bytes if limits.limit_is_ram and limits.limit_bytes else limits.ram_bytes or taken_bytes
    reason = (
        f"the trial's processes must stay within {limit / 2**20:,.0f} MiB of RAM, but had taken "
        f"{taken_bytes / 2**20:,.0f} MiB, and were ended"
    )
    return TrialResult(outcome="host_oom", reason=reason, violation=max(LEAST_VIOLATION, taken_bytes / limit - 1))


def _unanswered(exit_: Exit, deadline_s: float) -> TrialResult:
    if exit_.ended_for == "deadline":
        return TrialResult(outcome="timeout", reason=_late(deadline_s))
    return _end_of(exit_.code or 0, exit_)


def _late(deadline_s: float) -> str:
    return f"the trial did not end within {deadline_s:.0f} s"


def _end_of(code: int, exit_: Exit) -> TrialResult:
    """The outcome of a process that ended by itself, or by a signal (negative) that was not autotune's."""
    if code == -signal.SIGKILL and exit_.was_oom_killed:
        return TrialResult(outcome="host_oom", reason="the kernel's out-of-memory killer ended the trial")
    if code == REPORT_UNWRITTEN:
        return TrialResult(outcome="crashed", reason=_UNWRITTEN)
    reason = f"the trial's process ended itself with exit code {code}{_NOTHING}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        reason = f"the trial's process was ended by {_SIGNALS.get(name, 'a signal')} ({name})"
    return TrialResult(outcome="crashed", reason=reason)


def _answer(report: Path, code: int | None) -> RankReport | None:
    """A rank's report; a report that was written counts, whatever became of the process afterwards."""
    try:
        return read_model(report, RankReport)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        if code == REPORT_UNWRITTEN:
            return None
        reason = f"the trial's report can't be read ({type(error).__name__}); its process ended with {code}"
        return RankReport(result=TrialResult(outcome="crashed", reason=reason))


def _text_of(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def one_report(
    reports: Sequence[RankReport | None],
    exit_: Exit,
    *,
    stacks: Sequence[str],
    deadline_s: float,
    over_memory: TrialResult | None = None,
) -> RankReport:
    """The report of the group.

    Without a measurement of every rank, it is the first of these that exists: a rank's failure of its own (memory
    before crashes before others), the end of a process that left no report, the group's end for its memory, its end for
    time, and last a collateral failure.

    Args:
        reports: Of each rank; None where it left none.
        exit_: How the ranks' processes ended, with a code for each.
        stacks: What faulthandler wrote of each rank, "" where nothing.
        deadline_s: The trial's.
        over_memory: The result of a group that was ended for its memory; None where it was not.
    """
    answers = {rank: report for rank, report in enumerate(reports) if report is not None}
    measured = {
        rank: report.result.measurement
        for rank, report in answers.items()
        if report.result.outcome == "ok" and report.result.measurement is not None
    }
    if len(measured) == len(reports):
        return _merged(list(measured.values()))
    failed = {rank: report for rank, report in answers.items() if rank not in measured}
    own = {rank: report for rank, report in failed.items() if not report.is_collateral}
    if own:
        return _worst(own)
    ended = {
        rank: RankReport(result=_end_of(code, exit_))
        for rank, code in enumerate(exit_.codes)
        if code is not None and rank not in answers
    }
    if ended:
        return _worst(ended, exit_.first)
    if over_memory is not None:
        return RankReport(result=over_memory)
    frames = [read_stack(text) for text in stacks]
    # A rank that has written its stack and then failed since others ended before it counts as one without an answer.
    silent = [rank for rank in range(len(reports)) if rank not in answers or (rank in failed and frames[rank])]
    if silent:
        return _time_out(silent, exit_, frames, deadline_s)
    rank = min(failed, key=lambda rank: (rank != exit_.first, rank))  # all were torn down: the first to end is reported
    return _named(rank, failed[rank])


def _merged(measurements: Sequence[Measurement]) -> RankReport:
    try:
        return RankReport(result=TrialResult(outcome="ok", measurement=merged_measurement(measurements)))
    except ValueError as error:  # what a rank writes is read from a file, which the user's code may reach
        return RankReport(result=TrialResult(outcome="crashed", reason=f"the ranks' reports don't match: {error}"))


def _worst(reports: Mapping[int, RankReport], first: int | None = None) -> RankReport:
    """Of several ranks' failures the gravest, then that of the rank that ended first, then that of the lowest rank."""

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        outcome = reports[rank].result.outcome
        return outcome not in OUT_OF_MEMORY, outcome != "crashed", rank != first, rank

    rank = min(reports, key=order)
    return _named(rank, reports[rank])


def _time_out(silent: Sequence[int], exit_: Exit, stacks: Sequence[tuple[Frame, ...]], deadline_s: float) -> RankReport:
    """Ranks that were ended before they answered; the rank that the others waited for is named."""
    stuck = _awaited(silent, stacks)
    what = {
        "deadline": _late(deadline_s),
        "straggling": f"the trial did not end after rank {exit_.first} had",
        "standstill": "no block ended within ten times the longest one's time (at least 30 s)",
    }.get(exit_.ended_for or "", "the ranks stopped answering")
    others = "" if stuck is None else ", the others waited for this rank"
    reason = f"{what}{others}; no answer came from {_say_ranks(silent)}"
    shown = [rank for rank in silent if stacks[rank]] if stuck is None else [stuck]
    failure = _failure_at(shown[0], stacks[shown[0]]) if shown else None
    report = RankReport(result=TrialResult(outcome="timeout", reason=reason, failure=failure))
    return report if stuck is None else _named(stuck, report)


def _awaited(silent: Sequence[int], stacks: Sequence[tuple[Frame, ...]]) -> int | None:
    """Of the ranks without an answer, the one that the others waited for; None where that is not known."""
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


def _named(rank: int, report: RankReport) -> RankReport:
    """The report with the rank's number in its reason."""
    named = report.with_result(reason=f"rank {rank}: {report.result.reason}")
    return named.model_copy(update={"rank": rank})


def _say_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *before, last = map(str, ranks)
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"
