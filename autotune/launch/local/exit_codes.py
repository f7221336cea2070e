"""What the end of a process means that has left no report: an exit code in, an outcome with its reason out."""

from __future__ import annotations

import signal

from autotune.records.trial import TrialResult

__all__ = ["end_of"]

_MEANINGS = {"SIGSEGV": "a segmentation fault", "SIGABRT": "an abort", "SIGBUS": "a bus error"}


def end_of(code: int, *, was_oom_killed: bool) -> TrialResult:
    """The outcome of a process that ended by itself, or by a signal that autotune did not send.

    Args:
        code: Its exit code; negative: the signal.
        was_oom_killed: The kernel's out-of-memory killer struck meanwhile.
    """
    if code == -signal.SIGKILL and was_oom_killed:
        return TrialResult(outcome="host_oom", reason="the kernel's out-of-memory killer ended the trial")
    return TrialResult(outcome="crashed", reason=_crash_reason(code))


def _crash_reason(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"the trial's process was ended by {_MEANINGS.get(name, 'a signal')} ({name})"
    return f"the trial's process ended itself with exit code {code} before it had measured anything"
