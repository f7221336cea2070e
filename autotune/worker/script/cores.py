"""Read which cores a script's training thread and loader workers may use, while it trains.

In: `remember_start` when the process begins, the ids of loader workers during steps. Out: the
`*_cores` fields of `Modes`. An import, the script itself, OpenMP or a launcher may narrow the
affinity after the start; workers inherit the affinity of the thread that forks them. Linux only:
elsewhere the fields stay None.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from math import isinf
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.records.watched_run import Modes
from autotune.worker.lines import is_users, shown_line

_PROC = Path("/proc")
_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP binds threads to cores. Source: OpenMP 5.2, 21.1.7; libgomp's manual;
LLVM's OpenMP documentation."""
_OFF = frozenset({"", "false", "none", "disabled"})
_GRANTS = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE")
"""SLURM's variables that hold cores, that of a task first. Source: sbatch(1), output environment
variables."""
_TASKS = "SLURM_NTASKS_PER_NODE"
_COUNT = re.compile(r"\d+")


@dataclass(slots=True)
class _Start:
    """Affinity that the script was given, and who changed it."""

    cores: frozenset[int] = frozenset()
    pinned_by: str = ""


_START = _Start()


def remember_start() -> None:
    """Note the cores that this process may use now, and who calls os.sched_setaffinity from now on.

    Call it before the script's first line. What autotune binds itself is part of the start.
    """
    plain: Callable[..., Any] | None = getattr(os, "sched_setaffinity", None)
    if plain is None or _START.cores:
        return
    _START.cores = frozenset(os.sched_getaffinity(0))

    @wraps(plain)
    def set_affinity(pid: int, mask: Iterable[int], /) -> None:
        cores = frozenset(mask)
        plain(pid, cores)
        if pid not in {0, os.getpid()}:
            return
        frame = sys._getframe(1)  # noqa: SLF001 - the caller's frame
        if frame.f_code.co_filename.startswith(_PACKAGE):
            _START.cores = cores
        else:
            _START.pinned_by = _place_of(frame)

    os.sched_setaffinity = set_affinity


def _place_of(frame: FrameType | None) -> str:
    """Return file and line of the script's own code that called; of the nearest frame if none did."""
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return shown_line(file, frame.f_lineno)
        if not nearest and not file.startswith("<"):
            nearest = shown_line(file, frame.f_lineno)
        frame = frame.f_back
    return nearest


def with_cores(
    modes: Modes, workers: Iterable[int], environment: Mapping[str, str] | None = None
) -> Modes:
    """Return modes with the cores that the calling thread and loader workers may use now.

    Call it in the training thread during steps. It takes some 10 us per thread and worker.

    Args:
        modes: Other modes of the process.
        workers: Process ids of the training loader's workers.
        environment: Environment variables; None: those of this process.
    """
    # Later, since `remember_start` runs in each Python process of a command
    from autotune.apply.cores import cpu_quota_here

    if not hasattr(os, "sched_getaffinity"):
        return modes
    variables = os.environ if environment is None else environment
    quota = cpu_quota_here()
    granted, source = granted_cores(variables)
    process = len(os.sched_getaffinity(0))
    threads = _thread_cores()
    start = len(_START.cores) or None
    pinned_by = _START.pinned_by
    if start is not None and process < start and not pinned_by:
        pinned_by = _openmp_binding(variables)
    return Modes(
        **{
            **dict(modes),
            "process_cores": process,
            "thread_cores": max(process, len(threads)),
            "worker_cores": _fewest_cores(workers),
            "machine_cores": os.cpu_count(),
            "start_cores": start,
            "quota_cores": None if isinf(quota) else quota,
            "granted_cores": granted,
            "grant_source": source,
            "pinned_by": pinned_by,
        }
    )


def granted_cores(environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the cores that SLURM granted to a task on this node, and the variable that states it.

    A node's cores are divided by the tasks on it. Values such as "16(x2),8" give their first
    number: another node's share is not this one's, but of the same job.

    Returns:
        (None, "") outside of SLURM, or if no variable holds a number.
    """
    for name in _GRANTS:
        found = _COUNT.match(environment.get(name, ""))
        if found is None:
            continue
        cores = int(found[0])
        tasks = _COUNT.match(environment.get(_TASKS, ""))
        if name != _GRANTS[0] and tasks is not None:
            cores //= max(1, int(tasks[0]))
        return max(1, cores), name
    return None, ""


def _thread_cores() -> frozenset[int]:
    """Return the cores that any thread of this process may use; none if it lists no threads."""
    cores = frozenset[int]()
    with suppress(OSError):
        for thread in (_PROC / "self" / "task").iterdir():
            with suppress(OSError, ValueError):  # it has ended
                cores |= os.sched_getaffinity(int(thread.name))
    return cores


def _fewest_cores(workers: Iterable[int]) -> int | None:
    """Return the cores of the worker that may use the fewest; None if none runs or may be asked."""
    counts = list[int]()
    for pid in workers:
        with suppress(OSError):  # it has ended, or the system forbids it
            counts.append(len(os.sched_getaffinity(pid)))
    return min(counts, default=None)


def _openmp_binding(environment: Mapping[str, str]) -> str:
    """Return the variable by which OpenMP binds threads, as NAME=value; "" if none is set."""
    for name in _OPENMP:
        value = environment.get(name, "")
        if value.lower() not in _OFF:
            return f"{name}={value}"
    return ""
