"""A rank's place among a trial's processes, and what it reports and sends to the parent from there.

Every exception of a job becomes a report: an outcome with a reason; for a crash, with the user's own
traceback.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import RunFolderError
from autotune.protocol.channel import Channel, connect
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.messages import REPORT_UNWRITTEN, RankReport
from autotune.records.trial import Failure, Outcome, TrialResult
from autotune.worker.build import WorkloadFault
from autotune.worker.conditions import Others
from autotune.worker.device import DeviceError
from autotune.worker.failures import (
    cause_of,
    is_kernel_failure,
    launches_block,
    printable,
    shortage_of,
)
from autotune.worker.group import ALONE, Group, is_collateral
from autotune.worker.jobs.precision import References
from autotune.worker.window import Diverged


def is_written(place: Place, report: RankReport, spare: int) -> bool:
    """Write the report; where that fails, with a descriptor more, since the user's code may have used up all others.

    Meanwhile the end of a loader worker raises nothing, as torch's handler would.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return _is_written(place, report, spare)
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _is_written(place: Place, report: RankReport, spare: int) -> bool:
    with suppress(RunFolderError):
        place.write(report)
        return True
    with suppress(OSError):  # the user's code has closed it
        os.close(spare)
    try:
        place.write(report)
    except RunFolderError as error:
        with suppress(OSError, ValueError):  # the user's code may have closed it
            print(f"autotune: {error}", file=sys.stderr, flush=True)  # noqa: T201 - into the trial's log
        return False
    return True


DEADLINE_SHARE = 0.85  # our convention: of the deadline; a window that is late is ended, not lost


@dataclass(slots=True)
class Place:
    """A rank's place among the trial's processes, which every job of the worker gets besides its workload."""

    folder: TrialFolder
    rank: int
    local_rank: int
    """Its number among the ranks on this host: that of its device."""
    host: int = 0
    group: Group = ALONE
    is_shared: bool = False  # other trials follow in this process
    earlier_trials: int = 0  # were measured in it before
    references: References | None = None
    """Of precision checks that the process has made; None if no other follows."""
    channel: Channel | None = None

    @property
    def report(self) -> Path:
        """Return the file of this rank's report."""
        return self.folder.report_of(self.rank)

    def write(self, report: RankReport) -> None:
        """Write what this rank reports, in place of what it has reported before."""
        write_model(self.report, report)

    def connect(self) -> None:
        """Connect to the parent, if it can be reached, so that no later message takes time for it."""
        self.channel = connect(self.folder.sockets)

    def send(self, message: Mapping[str, object]) -> None:
        """Send the parent a message without waiting; if it takes none, nothing is sent any more."""
        if self.channel is not None:
            try:
                self.channel.send(message, within_s=0.0)
            except OSError:
                self.channel.close()
                self.channel = None

    def end_trial(self) -> None:
        """Have all of the trial ended, once a script is measured: by the parent, else by whoever runs the command."""
        if self.channel is None:
            self.connect()
        self.send({"measured": True})
        if self.channel is None:
            with suppress(OSError):
                self.folder.measured.touch(mode=0o600)

    def end_process(self, report: RankReport) -> None:
        """Write the report and end the process at once, without cleanup of the script's own."""
        code = REPORT_UNWRITTEN
        try:
            with suppress(
                Exception
            ):  # a full disk, or whatever the script has put in place of `os`
                self.write(report)
                code = 0
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            if code == 0:
                self.end_trial()  # last: the parent ends this process at once
        finally:
            os._exit(code)

    def receive(self, within_s: float | None) -> Mapping[str, Any]:
        """Return what the parent has sent; nothing if that does not come in time, or it is gone."""
        try:
            return (self.channel and self.channel.receive(within_s)) or {}
        except (EOFError, OSError):  # the parent is gone, or the user's code has closed the socket
            self.channel = None
            return {}

    def keep(self, report: RankReport) -> None:
        """Write what is known so far."""
        with suppress(RunFolderError):  # a full disk: there may be room for the last report
            self.write(report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What was opened and noted before a workload is built; times by perf_counter."""

    started: float
    """When the process began."""
    built_from: float
    """When the workload began to be read."""
    ends_at: float
    """When measuring is to end, before the deadline."""
    before: Mapping[str, Others]
    """Others' use of the devices before this process opened them."""


# The report of a job that an exception ended.

_OUR_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LONGEST_TRACEBACK = 32 * 1024
"""Most characters of a traceback, some hundred frames: a record is read often, and a message may
hold a whole tensor. Source: our own convention."""
_OUR_QUOTED_FRAME = re.compile(
    rf'^  File "{re.escape(_OUR_PACKAGE)}[^"]*", line .*\n(?:    .*\n)*', re.MULTILINE
)
"""A frame of this package, with its source line, in a loader worker's traceback quoted by a
message."""
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def failure_report(error: BaseException) -> RankReport:
    """Return the report of a job that an exception ended: its outcome, with a reason."""
    try:
        if isinstance(error, WorkloadFault | DeviceError):
            result = TrialResult(outcome="invalid", reason=printable(str(error)))
            return RankReport(result=result, is_workload_fault=True)
        if isinstance(error, Diverged):
            return RankReport(result=TrialResult(outcome="diverged", reason=printable(str(error))))
        return _crash(error)
    except Exception as later:  # noqa: BLE001 - torch's handler of SIGCHLD raises wherever a worker's end finds it
        return _crash(later)


def _crash(error: BaseException) -> RankReport:
    """Print the user's traceback into the trial's log; return a report of the exception's kind."""
    whole = _users_traceback(error)
    text = _bounded(printable(whole))
    with suppress(OSError, ValueError):  # the user's code may have closed it
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - into the trial's log
    shortage = shortage_of(error)
    if shortage is not None:
        outcome: Outcome = "oom" if shortage.memory == "device" else "host_oom"
        return RankReport(result=TrialResult(outcome=outcome, reason=shortage.reason))
    failure = Failure(
        signature=f"{type(error).__name__} at {_innermost_line(whole)}",
        traceback=text,
        is_asynchronous=is_kernel_failure(error) and not launches_block(),
    )
    result = TrialResult(outcome="crashed", reason=cause_of(error), failure=failure)
    return RankReport(result=result, is_collateral=is_collateral(error))


def _users_traceback(error: BaseException) -> str:
    """Return the traceback without frames of this package; each exception of a cycle appears once."""
    formatted = traceback.TracebackException.from_exception(error)
    current: traceback.TracebackException | None = formatted
    while current is not None:
        own = [frame for frame in current.stack if not frame.filename.startswith(_OUR_PACKAGE)]
        current.stack = traceback.StackSummary.from_list(own or list(current.stack))
        current = current.__cause__ or current.__context__
    return _OUR_QUOTED_FRAME.sub("", "".join(formatted.format())).rstrip()


def _bounded(text: str) -> str:
    """Return a text, shortened to its beginning and end if it is too long."""
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _innermost_line(text: str) -> str:
    """Return the innermost place in the user's code, also in a quoted traceback of a loader worker."""
    places = _LINE.findall(text) or [("unknown", "0")]
    found = places[-1]
    for file, line in reversed(places):
        if "site-packages" not in file and not file.startswith(_OUR_PACKAGE):
            found = file, line
            break
    return f"{Path(found[0]).name}:{found[1]}"
