"""What a worker's end means: every exception becomes an outcome with a reason, and the user's own traceback."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from autotune.core.phrasing import first_line
from autotune.core.trial import Failure, TrialResult
from autotune.protocol import RankReport
from autotune.worker.build import WorkloadFault
from autotune.worker.causes import cause_of
from autotune.worker.device import DeviceError
from autotune.worker.group import is_collateral
from autotune.worker.loop import Diverged

__all__ = ["outcome_of"]

_OUR_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_DEVICE_OOM = re.compile(r"(CUDA|Cuda|HIP|XPU|MPS).*out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
_RESOURCES = (
    (r"can't allocate memory|Cannot allocate memory|not enough memory", "the machine ran out of memory"),
    (
        r"Bus error|No space left on device.*shm|unable to (write|resize|mmap|open shared memory)",
        "the shared memory of loader workers (/dev/shm) is full",
    ),
    (r"Too many open files|received 0 items of ancdata", "the limit of open files (ulimit -n) was reached"),
    (r"DataLoader worker .* is killed by signal: Killed", "a loader worker was killed, most likely for its memory"),
)


def outcome_of(work: Callable[[], RankReport]) -> RankReport:
    """Run the work; every exception becomes an outcome with a reason."""
    try:
        return work()
    except (WorkloadFault, DeviceError) as fault:
        return _report("invalid", str(fault), is_workload_fault=True)
    except Diverged as divergence:
        return _report("diverged", str(divergence))
    except MemoryError:
        return _report("host_oom", "the machine ran out of memory (MemoryError)")
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit among it
        return _crash(error)


def _crash(error: BaseException) -> RankReport:
    text = _users_traceback(error)
    with suppress(OSError, ValueError):  # the user's code may have closed it
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - into the trial's log
    if _is_device_oom(error):
        return _report("oom", f"the device ran out of memory: {first_line(error)}")
    message = str(error)
    for pattern, explanation in _RESOURCES:
        if re.search(pattern, message):
            return _report("host_oom", f"{explanation}: {first_line(error)}")
    failure = Failure(signature=f"{type(error).__name__} at {_place(text)}", traceback=text)
    report = _report("crashed", cause_of(error), failure=failure)
    return report.model_copy(update={"is_collateral": is_collateral(error)})


def _is_device_oom(error: BaseException | None) -> bool:
    """Whether an exception, or one that it stems from, says that the device's memory is used up.

    torch raises OutOfMemoryError for its allocator alone; contexts, pinned memory and cuBLAS say it in words.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError) or _DEVICE_OOM.search(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _users_traceback(error: BaseException) -> str:
    """The traceback without our own frames."""
    formatted = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    current: traceback.TracebackException | None = formatted
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        own = [frame for frame in current.stack if not frame.filename.startswith(_OUR_PACKAGE)]
        current.stack = traceback.StackSummary.from_list(own or list(current.stack))
        current = current.__cause__ or current.__context__
    return "".join(formatted.format()).rstrip()


def _place(text: str) -> str:
    """The innermost place in the user's code, also where a loader worker's traceback is quoted in the message."""
    places = [(match["file"], match["line"]) for match in _PLACE.finditer(text)]
    own = [place for place in places if "site-packages" not in place[0] and not place[0].startswith(_OUR_PACKAGE)]
    file, line = (own or places or [("unknown", "0")])[-1]
    return f"{Path(file).name}:{line}"


def _report(outcome: str, reason: str, *, is_workload_fault: bool = False, **result: object) -> RankReport:
    fields = {"outcome": outcome, "reason": reason, **result}
    return RankReport(result=TrialResult.model_validate(fields), is_workload_fault=is_workload_fault)
