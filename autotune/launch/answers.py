"""Classify how a trial ended: its ranks' reports and last stacks, exit codes, memory kills, disturbances."""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from pydantic import ValidationError

from autotune.launch.launcher import Exit, Launch
from autotune.messages.trials import rerun_after_signal
from autotune.models.group import merged_measurement
from autotune.note import Note
from autotune.policy import POLICY
from autotune.protocol.disk import read_model
from autotune.protocol.messages import REPORT_UNWRITTEN, RankReport
from autotune.records.measurement import (
    MemoryLimits,
)
from autotune.records.trial import OUT_OF_MEMORY, Failure, TrialResult

# The stack of a rank shortly before it was ended, as faulthandler has written it.
#
# Source: Python/traceback.c of CPython (_Py_DumpTracebackThreads): threads come from the newest to the
# oldest, the main thread last, and frames from the innermost to the outermost.


BlockedIn = Literal["user_code", "unknown", "autotune", "user_collective", "collective"]
"""Position of a rank: user_code: in that or what it calls; user_collective: waiting for other ranks as
the user's code asked for; collective: in a wait that all ranks come to."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_OUR_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_COLLECTIVES = "/torch/distributed/"
_WAITS_IN = (_COLLECTIVES, "/torch/nn/parallel/distributed.py")
_LIBRARIES = ("/site-packages/torch/", "/dist-packages/torch/", _OUR_PACKAGE)
# Torch/autograd/graph.py; DDP's all-reduce is awaited in it, without a frame.
_BACKWARD = "_engine_run_backward"
_DEVICE_WAITS_IN = (
    "/torch/cuda/",
    "/torch/accelerator/",
)  # by synchronize: for kernels, those of NCCL among them
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line that was being run."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.name}'

    def is_in(self, *parts: str) -> bool:
        """Return whether its file's path has one of these parts."""
        return any(part in self.file for part in parts)


def read_stack(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames, the innermost last; () if faulthandler wrote none."""
    parsed = [
        Frame(file=frame["file"], line=int(frame["line"]), name=frame["name"])
        for frame in _FRAME.finditer(_THREAD.split(text)[-1])
    ]
    return tuple(reversed(parsed))


def blocked_in(stack: tuple[Frame, ...]) -> BlockedIn:
    """Return where a rank was, by its innermost frame."""
    if not stack:
        return "unknown"
    innermost = stack[-1]
    waits_for_device = innermost.name == "synchronize" and innermost.is_in(*_DEVICE_WAITS_IN)
    if innermost.name == _BACKWARD or waits_for_device:
        return "collective"
    if innermost.is_in(*_WAITS_IN):
        callers = (frame for frame in reversed(stack) if not frame.is_in(_COLLECTIVES))
        is_librarys = next(callers, innermost).is_in(*_LIBRARIES)
        return "collective" if is_librarys else "user_collective"
    return "autotune" if innermost.file.startswith(_OUR_PACKAGE) else "user_code"


def users_part(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of the user's own code; if there are none, those that are not ours, else all."""
    foreign = tuple(frame for frame in stack if not frame.file.startswith(_OUR_PACKAGE))
    not_own = (sysconfig.get_path("stdlib") + "/", "<frozen")
    own = tuple(
        frame
        for frame in foreign
        if not frame.file.startswith(not_own) and not frame.is_in(*_NOT_THE_USERS)
    )
    return own or foreign or stack


# Somebody else may have killed or stopped a trial's processes, by how they ended and what they
# report. What was disturbed says nothing of the configuration: the runner tries it again, once, in what is
# left of the deadline.


_LOST_WORKER = "is killed by signal: Killed"
"""Source: torch/csrc/DataLoader.cpp (_error_if_any_worker_fails)."""
_UNSEEN_END = re.compile(r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly$")
"""Of a worker that its loader finds gone before the signal SIGCHLD has told how it ended.

Source: torch/utils/data/dataloader.py (_try_get_data).
"""
_KNOWN_END = "exited unexpectedly with exit code"
_LOST_CONNECTION = re.compile(
    r"(Connection\w+Error|EOFError|BrokenPipeError|FileNotFoundError) at "
)
_BATCH_RECEIVED = "torch/multiprocessing/reductions.py"
"""A batch's descriptors come through a socket, whose sender may be gone before the system tells it:
a failure's signature, and what its traceback goes through."""


def disturbance_of(report: RankReport, exit_: Exit) -> Note | None:
    """Return what has disturbed a trial; None if nothing has, as far as can be seen.

    A SIGKILL that neither autotune (a rank that it ends has no code) nor the kernel's out-of-memory
    killer has sent is somebody else's, or the code's own: that shows when it happens again.
    """
    result = report.result
    is_lost = False
    if result.outcome == "crashed":
        is_lost = -signal.SIGKILL in (exit_.codes or (exit_.code,))
    elif result.outcome == "host_oom":
        is_lost = _LOST_WORKER in result.reason
    if result.failure is not None:
        traceback = result.failure.traceback
        # what a loader worker's sender was is gone
        is_lost |= bool(_LOST_CONNECTION.match(result.failure.signature)) and (
            _BATCH_RECEIVED in traceback.replace("\\", "/")
        )
        # the end of a worker, without its signal or its exit code, and by no cause either
        is_lost |= bool(_UNSEEN_END.search(result.reason)) and _KNOWN_END not in traceback
    if is_lost and not exit_.was_oom_killed:
        return rerun_after_signal(why="killed")
    notes = () if result.measurement is None else result.measurement.notes
    is_stopped = any(one.code == "window_stopped" for one in notes)
    return rerun_after_signal(why="stopped") if is_stopped else None


def with_note(report: RankReport, note: Note) -> RankReport:
    """Return the report with a further note on its measurement; as it is if there is none."""
    measured = report.result.measurement
    if measured is None:
        return report
    return report.with_result(
        measurement=measured.model_copy(update={"notes": (*measured.notes, note)})
    )


# What a trial's ranks have answered, or what it means that they have not: a Launch and its Exit in,
# one report out.
#
# When a rank of a group fails, the others fail with it: their connections close, their collectives
# time out. The answers of such ranks are collateral; here the rank that failed first is found and
# named. The memory limits are those that a trial is judged by, and the ceiling of RAM at which it
# is ended. Of a single process:
#
# a report was written                             what it says, however the process ended afterwards
# a report of curves that are cut                  as if there were none, but for the curves
# ended at its deadline, for its RAM, cancelled    timeout, host_oom, pruned
# ended by SIGKILL while the kernel's killer ran   host_oom
# could not write its report                       crashed, for its folder
# any other end                                    crashed


_FAR_ABOVE = (
    1.2  # our convention: a peak that is a little too high is measured and judged, not ended
)
_RAM_SHARE = (
    0.95  # our convention: ended before the kernel's out-of-memory killer chooses a process
)
_NOTHING = " before it had measured anything"
_UNWRITTEN = (
    "the trial's report could not be written into its folder, most likely since the disk is full "
    "or the trial has used "
    "up all that its processes may open; its log says what failed"
)
_SIGNALS = {"SIGSEGV": "a segmentation fault", "SIGABRT": "an abort", "SIGBUS": "a bus error"}
_SUSPICION: tuple[BlockedIn, ...] = (
    "user_code",
    "unknown",
    "autotune",
    "user_collective",
    "collective",
)
"""A rank that is blocked in the first of these most likely holds up the others."""


def read_answer(launch: Launch, exit_: Exit, limits: MemoryLimits) -> RankReport:
    """Return the report of a trial that has ended; of a group, that of all ranks together."""
    codes = exit_.codes if len(exit_.codes) > 1 else (exit_.code,)
    answers = [_answer(launch.folder.report_of(rank), code) for rank, code in enumerate(codes)]
    if exit_.ended_for == "cancelled" and None in answers:
        return RankReport(result=TrialResult(outcome="pruned", reason="the trial was cancelled"))
    over_memory = (
        _over_memory(limits, exit_.memory_bytes or 0) if exit_.ended_for == "memory" else None
    )
    if len(answers) > 1:
        stacks = []
        for rank in range(launch.ranks):
            text = ""
            with suppress(OSError):
                text = launch.folder.stack_of(rank).read_text("utf-8", errors="replace")
            stacks.append(text)
        return one_report(
            answers, exit_, stacks=stacks, deadline_s=launch.deadline_s, over_memory=over_memory
        )
    ended = over_memory or _end_of(exit_.code or 0, exit_)
    if exit_.ended_for == "deadline":
        ended = TrialResult(outcome="timeout", reason=_late(launch.deadline_s))
    report = answers[0] or RankReport(result=ended)
    is_ended = exit_.ended_for not in {None, "done"} or exit_.code not in {None, 0}
    if is_ended and report.curves is not None and report.curves.is_cut:
        reason = ended.reason.removesuffix(_NOTHING)
        return report.model_copy(update={"result": ended}).with_result(reason=reason)
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
    limit = (
        limits.limit_bytes
        if limits.limit_is_ram and limits.limit_bytes
        else limits.ram_bytes or taken_bytes
    )
    reason = (
        f"the trial's processes must stay within {limit / 2**20:,.0f} MiB of RAM, but had taken "
        f"{taken_bytes / 2**20:,.0f} MiB, and were ended"
    )
    return TrialResult(
        outcome="host_oom",
        reason=reason,
        violation=max(POLICY.memory.least_excess, taken_bytes / limit - 1),
    )


def _late(deadline_s: float) -> str:
    return f"the trial did not end within {deadline_s:.0f} s"


def _end_of(code: int, exit_: Exit) -> TrialResult:
    """Return the outcome of a process that ended by itself, or by a signal (negative) that was not autotune's."""
    if code == -signal.SIGKILL and exit_.was_oom_killed:
        return TrialResult(
            outcome="host_oom", reason="the kernel's out-of-memory killer ended the trial"
        )
    if code == REPORT_UNWRITTEN:
        return TrialResult(outcome="crashed", reason=_UNWRITTEN)
    reason = f"the trial's process ended itself with exit code {code}{_NOTHING}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        reason = f"the trial's process was ended by {_SIGNALS.get(name, 'a signal')} ({name})"
    return TrialResult(outcome="crashed", reason=reason)


def _answer(report: Path, code: int | None) -> RankReport | None:
    """Return a rank's report; one that was written counts, whatever became of the process afterwards."""
    try:
        return read_model(report, RankReport)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        if code == REPORT_UNWRITTEN:
            return None
        reason = f"the trial's report can't be read ({type(error).__name__}); its process ended with {code}"
        return RankReport(result=TrialResult(outcome="crashed", reason=reason))


def one_report(
    reports: Sequence[RankReport | None],
    exit_: Exit,
    *,
    stacks: Sequence[str],
    deadline_s: float,
    over_memory: TrialResult | None = None,
) -> RankReport:
    """Return the report of the group.

    Without a measurement of every rank, it is the first of these that exists: a rank's failure of
    its own (memory before crashes before others), the end of a process that left no report, the
    group's end for its memory, its end for time, and last a collateral failure.

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
        try:
            merged = merged_measurement([*measured.values()])
        except ValueError as error:  # the user's code may reach the files of the reports
            reason = f"the ranks' reports don't match: {error}"
            return RankReport(result=TrialResult(outcome="crashed", reason=reason))
        return RankReport(result=TrialResult(outcome="ok", measurement=merged))
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
    # A rank that has written its stack and then failed since others ended before it counts as one
    # without an answer.
    silent = [
        rank
        for rank in range(len(reports))
        if rank not in answers or (rank in failed and frames[rank])
    ]
    if silent:
        return _time_out(silent, exit_, frames, deadline_s)
    rank = min(
        failed, key=lambda rank: (rank != exit_.first, rank)
    )  # all were torn down: the first to end is reported
    return _named(rank, failed[rank])


def _worst(reports: Mapping[int, RankReport], first: int | None = None) -> RankReport:
    """Return of several ranks' failures the gravest, then that of the rank that ended first, or the lowest."""

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        outcome = reports[rank].result.outcome
        return outcome not in OUT_OF_MEMORY, outcome != "crashed", rank != first, rank

    rank = min(reports, key=order)
    return _named(rank, reports[rank])


def _time_out(
    silent: Sequence[int], exit_: Exit, stacks: Sequence[tuple[Frame, ...]], deadline_s: float
) -> RankReport:
    """Return the report of ranks that were ended before they answered; name the one that the others waited for."""
    suspicion = {rank: _SUSPICION.index(blocked_in(stacks[rank])) for rank in silent}
    is_known = len(silent) == 1 or len({*suspicion.values()}) > 1
    stuck = min(silent, key=suspicion.__getitem__) if is_known else None
    what = {
        "deadline": _late(deadline_s),
        "straggling": f"the trial did not end after rank {exit_.first} had",
        "standstill": "no block ended within ten times the longest one's time (at least 30 s)",
    }.get(exit_.ended_for or "", "the ranks stopped answering")
    others = "" if stuck is None else ", the others waited for this rank"
    *before, last = map(str, silent)
    ranks = f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"
    reason = f"{what}{others}; no answer came from {ranks}"
    shown = [rank for rank in (silent if stuck is None else [stuck]) if stacks[rank]]
    failure = None
    if shown:
        frames = users_part(stacks[shown[0]])
        head = f"Where rank {shown[0]} stood shortly before its end (most recent call last):"
        failure = Failure(
            signature=f"time-out at {PurePath(frames[-1].file).name}:{frames[-1].line}",
            traceback="\n".join([head, *map(str, frames)]),
        )
    report = RankReport(result=TrialResult(outcome="timeout", reason=reason, failure=failure))
    return report if stuck is None else _named(stuck, report)


def _named(rank: int, report: RankReport) -> RankReport:
    """Return the report with the rank's number in its reason."""
    return report.with_result(reason=f"rank {rank}: {report.result.reason}")
