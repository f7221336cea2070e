"""Whether somebody else has killed or stopped a trial's processes, by how they ended and what they report.

What was disturbed says nothing of the configuration: the runner tries it anew, once, in what is left of the deadline.
"""

from __future__ import annotations

import re
import signal

from autotune.launch.launcher import Exit
from autotune.messages.trials import rerun_after_signal
from autotune.note import Note
from autotune.protocol.reports import RankReport
from autotune.records.trial import Failure, TrialResult

__all__ = ["disturbance_of", "with_remark"]

_LOST_WORKER = "is killed by signal: Killed"
"""Source: torch/csrc/DataLoader.cpp (_error_if_any_worker_fails)."""
_UNSEEN_END = re.compile(r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly$")
"""Of a worker that its loader finds gone before the signal SIGCHLD has told how it ended.

Source: torch/utils/data/dataloader.py (_try_get_data).
"""
_KNOWN_END = "exited unexpectedly with exit code"
_LOST_CONNECTION = re.compile(r"(Connection\w+Error|EOFError|BrokenPipeError|FileNotFoundError) at ")
_BATCH_RECEIVED = "torch/multiprocessing/reductions.py"
"""A batch's descriptors come through a socket, whose sender may be gone before the system tells it: a failure's
signature, and what its traceback goes through."""


def disturbance_of(report: RankReport, exit_: Exit) -> Note | None:
    """What has disturbed a trial; None where nothing has, as far as can be seen.

    A SIGKILL that neither autotune (a rank that it ends has no code) nor the kernel's out-of-memory killer has sent is
    somebody else's, or the code's own: that shows when it happens again.
    """
    result = report.result
    codes = exit_.codes or (exit_.code,)
    is_killed = result.outcome == "crashed" and -signal.SIGKILL in codes
    has_lost_worker = result.outcome == "host_oom" and _LOST_WORKER in (result.reason or "")
    is_lost = is_killed or has_lost_worker or _has_lost_sender(result.failure) or _has_unseen_end(result)
    if is_lost and not exit_.was_oom_killed:
        return rerun_after_signal(why="killed")
    remarks = () if result.measurement is None else result.measurement.remarks
    return rerun_after_signal(why="stopped") if any(one.code == "window_stopped" for one in remarks) else None


def _has_lost_sender(failure: Failure | None) -> bool:
    if failure is None or _LOST_CONNECTION.match(failure.signature) is None:
        return False
    return _BATCH_RECEIVED in failure.traceback.replace("\\", "/")


def _has_unseen_end(result: TrialResult) -> bool:
    """Whether a loader worker's end is told without its signal or its exit code, and by no cause either."""
    if result.failure is None or _UNSEEN_END.search(result.reason or "") is None:
        return False
    return _KNOWN_END not in result.failure.traceback


def with_remark(report: RankReport, remark: Note) -> RankReport:
    """The report with a further remark on its measurement; as it is where there is none."""
    measured = report.result.measurement
    if measured is None:
        return report
    return report.with_result(measurement=measured.model_copy(update={"remarks": (*measured.remarks, remark)}))
