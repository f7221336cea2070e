"""Starts workers; finds and ends all processes that a trial has started, also those that have left its session.

A trial's processes are found by the session and process group of each rank, and by a token in their environment. A
session's number is only used while the rank that leads it has not been reaped: after that the kernel may give the
number to another process, and killpg would end a stranger's group. The launchers therefore read exit codes without
reaping the ranks (`exit_code`, and serve.py in the fork server), and reap them after `kill_all`. Only where the fork
server itself dies does init reap its ranks before that. Numbers are given out in turn: one comes round again after
32,768 forks or more (man 5 proc, pid_max), which take seconds, not the moment until `kill_all`.

The dead leave shared memory. torch's, by the sharing strategy "file_system": its process that would remove the files
(torch_shm_manager) is ended with the trial. Source: torch/csrc/MapAllocator.cpp (NewProcessWideShmHandle): "/torch_",
pid, "_", random, "_", counter. NCCL's, which it removes once all ranks have them open. Source: NCCL's
src/misc/shmutils.cc (ncclShmOpen): mkstemp of "/dev/shm/nccl-XXXXXX", unlinked by the last rank that attaches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import sleep

import psutil

from autotune.errors import LauncherError
from autotune.launch.launcher import TOKEN_VARIABLE
from autotune.launch.local.kept_memory import with_kept_memory
from autotune.protocol.clock import monotonic

__all__ = [
    "bytes_above",
    "exit_code",
    "exit_code_of",
    "free_segments",
    "free_shared_memory",
    "kill_all",
    "oom_kills",
    "segments",
    "start_worker",
]

_GONE_WITHIN_S = 5.0  # our convention: a process that a SIGKILL has not ended by then waits for a device or a disk
_SHARED = Path("/dev/shm")  # noqa: S108 - torch's and NCCL's own place
_NCCL = "nccl-"


def start_worker(
    *arguments: str,
    environment: Mapping[str, str],
    token: str,
    stdin: int,
    output: int,
    descriptors: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start an interpreter with the worker's code, in a session of its own.

    Args:
        arguments: Of its command line.
        environment: The caller's; its module search path, which the working directory does not change, is added, and
            what has malloc keep memory.
        token: Marks all that the worker starts.
        stdin: What it reads, as for Popen.
        output: The descriptor that it prints to.
        descriptors: Others that it inherits.

    Raises:
        LauncherError: the system refuses.
    """
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str) and entry)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.worker", *arguments],
            env={**with_kept_memory(environment), "PYTHONPATH": path, TOKEN_VARIABLE: token},
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise LauncherError(f"a process for trials can't be started: {error}") from error


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a child that has ended (negative: a signal), None where it runs; the child is not reaped."""
    if process.returncode is not None or sys.platform != "linux":
        return process.poll()
    return exit_code_of(process.pid)


def exit_code_of(child: int) -> int | None:
    """The same of a child by its number; on Linux alone."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
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
    pids.update(process.pid for process in _members(leaders, token, spare))  # the groups' end leaves no trace of them
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    while (doomed := _members(leaders, token, spare)) and monotonic() - begun < _GONE_WITHIN_S:
        for process in doomed:  # again, until none is left: a process may have forked meanwhile
            with suppress(psutil.Error):
                process.kill()
            pids.add(process.pid)
        sleep(0.002)  # about as long as a killed process needs to be gone
    for pid in pids:
        free_shared_memory(pid)


def bytes_above(leaders: Collection[int], ceiling_bytes: int) -> int | None:
    """Memory of the process trees below `leaders` together where it is above the ceiling, else None.

    Resident sizes, which are cheap, count shared pages once for each process; only where they pass the ceiling is the
    proportional share (PSS) asked for, which takes the process's memory lock.
    """
    processes = [process for leader in leaders for process in _tree(leader)]
    if _summed(processes, lambda process: process.memory_info().rss) <= ceiling_bytes:
        return None
    total = _summed(processes, _proportional_bytes)
    return total if total > ceiling_bytes else None


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck since boot; 0 where the kernel does not count."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _tree(leader: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        root = psutil.Process(leader)
        return [root, *root.children(recursive=True)]
    return []


def _summed(processes: Iterable[psutil.Process], bytes_of: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            total += bytes_of(process)
    return total


def _proportional_bytes(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", full.uss))


def _members(leaders: Collection[int], token: str, spare: int | None) -> list[psutil.Process]:
    others = (process for process in psutil.process_iter() if process.pid not in {os.getpid(), spare})
    return [process for process in others if _is_member(process, leaders, token)]


def _is_member(process: psutil.Process, leaders: Collection[int], token: str) -> bool:
    """Whether a process of a trial runs; zombies wait for their parent, which in a container may never reap them."""
    with suppress(psutil.Error, OSError):
        is_ours = os.getsid(process.pid) in leaders or process.environ().get(TOKEN_VARIABLE) == token
        return is_ours and process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    return False


def free_shared_memory(pid: int) -> None:
    """Remove torch's files in /dev/shm that a dead process has left."""
    for path in _SHARED.glob(f"torch_{pid}_*"):
        with suppress(OSError):
            path.unlink()


def segments() -> dict[int, Path]:
    """This user's files of NCCL that are there now, by their inodes."""
    found = {}
    for path in _SHARED.glob(f"{_NCCL}*"):
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid == os.getuid():
                found[status.st_ino] = path
    return found


def free_segments(before: Collection[int]) -> None:
    """Remove NCCL's files that were not there before, and that no living process has open or mapped.

    Processes of other containers that share /dev/shm are not visible: a group of this user's that starts in one while a
    trial's ranks run here may lose its file. Hence this is called after groups only, which may have left some.
    """
    new = {inode: path for inode, path in segments().items() if inode not in before}
    used = _used_names() if new else set()
    for path in new.values():
        if path.name not in used:
            with suppress(OSError):  # its owner has removed it
                path.unlink()


def _used_names() -> set[str]:
    """Names of such files that living processes have open or mapped."""
    targets = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            targets += (process / "maps").read_text(errors="replace").splitlines()
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    targets.append(str(descriptor.readlink()))
    prefix = f"{_SHARED}/{_NCCL}"
    return {Path(target[target.index(prefix) :]).name for target in targets if prefix in target}
