"""Finding and ending all the processes that a trial has started, those that have left its session included."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

from autotune.launch.launcher import TOKEN_VARIABLE
from autotune.protocol.messages import free_shared_memory

__all__ = ["bytes_above", "kill_all", "oom_kills"]

_GONE_WITHIN_S = 5.0
_LOOK_S = 0.002


def kill_all(leaders: Collection[int], token: str, *, spare: int | None = None) -> None:
    """End a trial: its ranks' sessions and process groups, and whatever carries its token; wait until all are gone.

    `spare` is a server that carries the token too. A killed trial's loader workers would live on for seconds and load
    the machine under the next trial.
    """
    begun, pids = monotonic(), set(leaders)
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    while (doomed := _members(leaders, token, spare)) and monotonic() - begun < _GONE_WITHIN_S:
        for process in doomed:  # again, until none is left: one that forks may have been faster
            with suppress(psutil.Error):
                process.kill()
            pids.add(process.pid)
        sleep(_LOOK_S)
    for pid in pids:
        free_shared_memory(pid)


def bytes_above(leaders: Collection[int], ceiling_bytes: int) -> int | None:
    """What the process trees below `leaders` together have in memory where that is more than the ceiling, else None.

    Resident sizes, which are cheap, count shared pages once for each process; only where they pass the ceiling is the
    proportional share (PSS) asked for, which takes the process's memory lock.
    """
    processes = [process for leader in leaders for process in _tree(leader)]
    if sum(_resident_bytes(process.pid) for process in processes) <= ceiling_bytes:
        return None
    held = sum(_proportional_bytes(process) for process in processes)
    return held if held > ceiling_bytes else None


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck since boot; 0 where it does not tell."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _tree(leader: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(leader)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _members(leaders: Collection[int], token: str, spare: int | None) -> list[psutil.Process]:
    mine = {os.getpid(), spare}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in mine
        and (_session(process.pid) in leaders or _carries(process, token))
        and _is_running(process)
    ]


def _session(pid: int) -> int | None:
    with suppress(OSError):
        return os.getsid(pid)
    return None


def _is_running(process: psutil.Process) -> bool:
    """A zombie waits for its parent alone, which in a container may never ask."""
    with suppress(psutil.Error):
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    return False


def _carries(process: psutil.Process, token: str) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(TOKEN_VARIABLE) == token
    return False


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.uss))
    return 0
