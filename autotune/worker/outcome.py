"""Turn the end of a worker's job into a report: every exception becomes an outcome with a reason.

Comes in: the exception. Goes out: a `RankReport`; for a crash, one with the user's own traceback.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from autotune.protocol.messages import RankReport
from autotune.records.trial import Failure, Outcome, TrialResult
from autotune.worker.build import WorkloadFault
from autotune.worker.device import DeviceError
from autotune.worker.failures import (
    cause_of,
    is_kernel_failure,
    launches_block,
    printable,
    shortage_of,
)
from autotune.worker.group import is_collateral
from autotune.worker.window import Diverged

_OUR_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LONGEST_TRACEBACK = 32 * 1024
"""Most characters of a traceback, some hundred frames: a record is read often, and a message may
hold a whole tensor. Source: our own convention."""
_OUR_QUOTED_FRAME = re.compile(
    rf'^  File "{re.escape(_OUR_PACKAGE)}[^"]*", line .*\n(?:    .*\n)*', re.MULTILINE
)
"""A frame of this package, with its source line, in a loader worker's traceback quoted by a
message."""
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


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
        signature=f"{type(error).__name__} at {_place(whole)}",
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


def _place(text: str) -> str:
    """Return the innermost place in the user's code, also in a quoted traceback of a loader worker."""
    places = _PLACE.findall(text) or [("unknown", "0")]
    found = places[-1]
    for file, line in reversed(places):
        if "site-packages" not in file and not file.startswith(_OUR_PACKAGE):
            found = file, line
            break
    return f"{Path(found[0]).name}:{found[1]}"
