"""Finds and ends all processes that a trial has started, also those that have left its session.

A trial's processes are found by the session and process group of each rank, and by a token in their environment. A
session's number is only used while the rank that leads it has not been reaped: after that the kernel may give the
number to another process, and killpg would end a stranger's group. The launchers therefore read exit codes without
reaping the ranks (`exit_code`, and serve.py in the fork server), and reap them after `kill_all`. Only where the fork
server itself dies does init reap its ranks before that. Numbers are given out in turn: one comes round again after
32,768 forks or more (man 5 proc, pid_max), which take seconds, not the moment until `kill_all`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

from autotune.launch.launcher import TOKEN_VARIABLE
from autotune.protocol.shared_memory import free_shared_memory

__all__ = ["bytes_above", "exit_code", "kill_all", "oom_kills"]

_GONE_WITHIN_S = 5.0  # our convention: a process that a SIGKILL has not ended by then waits for a device or a disk
_TICK_S = 0.002


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a child that has ended (negative: a signal), None where it runs; the child is not reaped."""
    if process.returncode is not None or sys.platform != "linux":
        return process.poll()
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill_all(leaders: Collection[int], token: str, *, spare: int | None = None) -> None:
    """End a trial and wait until all of it is gone: loader workers that live on would disturb the next trial.

    Args:
        leaders: The trial's ranks, each the leader of a session and process group; not reaped yet.
        token: The value of TOKEN_VARIABLE in the environment of the trial's processes.
        spare: A server that has the token too and lives on.
    """
    begun, pids = monotonic(), set(leaders)
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    while (doomed := _members(leaders, token, spare)) and monotonic() - begun < _GONE_WITHIN_S:
        for process in doomed:  # again, until none is left: a process may have forked meanwhile
            with suppress(psutil.Error):
                process.kill()
            pids.add(process.pid)
        sleep(_TICK_S)
    for pid in pids:
        free_shared_memory(pid)


def bytes_above(leaders: Collection[int], ceiling_bytes: int) -> int | None:
    """Memory of the process trees below `leaders` together where it is above the ceiling, else None.

    Resident sizes, which are cheap, count shared pages once for each process; only where they pass the ceiling is the
    proportional share (PSS) asked for, which takes the process's memory lock.
    """
    processes = [process for leader in leaders for process in _tree(leader)]
    if sum(_resident_bytes(process.pid) for process in processes) <= ceiling_bytes:
        return None
    total = sum(_proportional_bytes(process) for process in processes)
    return total if total > ceiling_bytes else None


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck since boot; 0 where the kernel does not count."""
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
        and (_session(process.pid) in leaders or _has_token(process, token))
        and _is_running(process)
    ]


def _session(pid: int) -> int | None:
    with suppress(OSError):
        return os.getsid(pid)
    return None


def _is_running(process: psutil.Process) -> bool:
    """Whether a process is no zombie: those wait for their parent, which in a container may never reap them."""
    with suppress(psutil.Error):
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    return False


def _has_token(process: psutil.Process, token: str) -> bool:
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
