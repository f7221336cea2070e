"""How much of the host's cores other programs use during a window: HostLoad, filled from two readings of the kernel's.

Passive: each reading takes half a millisecond on two cores, before the window's clock starts and after it has stopped.
Linux alone tells it. A rank reads its own process tree; a group's readings are joined by analysis.group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from autotune.records.host_load import HostLoad
from autotune.settings.applied.cores.processor import cgroup_folders, cpu_quota, usable_cores

__all__ = ["HostLoadProbe"]

_PROC = Path("/proc")
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7
_PROCESS_TIMES = slice(11, 15)
"""utime, stime, cutime and cstime, counted from the state on. Source: man 5 proc, /proc/pid/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """CPU time since boot, in seconds."""

    at_s: float
    busy_s: float
    stolen_s: float
    own_s: float
    group_s: float | None
    pressure_s: float | None


class HostLoadProbe:
    """Reads the host at a window's two edges. What the process may use is looked up when it is made, before both."""

    def __init__(self) -> None:
        folders, self._cores = cgroup_folders("cpu"), usable_cores()
        self._reachable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK") if self._reachable else 0.0
        self._limited = _limiting_group(folders, len(self._reachable))
        own = [folder / "cpu.pressure" for folder in folders[:1]]
        self._pressure = next((path for path in own if path.exists()), _PROC / "pressure" / "cpu")
        self._first: _Reading | None = None

    def start(self) -> None:
        """Read the first edge, before the clock starts."""
        self._first = self._read()

    def stop(self) -> HostLoad | None:
        """Read the second edge, after the clock has stopped; None where the kernel does not tell."""
        first, last = self._first, self._read()
        if first is None or last is None or last.at_s <= first.at_s:
            return None
        return HostLoad(
            seconds=last.at_s - first.at_s,
            cores=self._cores,
            reachable_cores=len(self._reachable),
            busy_s=max(0.0, last.busy_s - first.busy_s),
            own_s=max(0.0, last.own_s - first.own_s),
            stolen_s=max(0.0, last.stolen_s - first.stolen_s),
            group_s=_difference(first.group_s, last.group_s),
            pressure_s=_difference(first.pressure_s, last.pressure_s),
        )

    def _read(self) -> _Reading | None:
        if not self._reachable:
            return None
        with suppress(OSError, ValueError, IndexError):
            busy, stolen = _ticks_of_cores(self._reachable)
            return _Reading(
                at_s=perf_counter(),
                busy_s=busy * self._tick_s,
                stolen_s=stolen * self._tick_s,
                own_s=_ticks_of_tree("self") * self._tick_s,
                group_s=None if self._limited is None else _group_s(self._limited),
                pressure_s=_pressure_s(self._pressure),
            )
        return None


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else max(0.0, last - first)


def _ticks_of_cores(cores: set[int]) -> tuple[int, int]:
    """Ticks in which these cores were not idle, and those of them that the hypervisor gave away."""
    busy = stolen = 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            ticks = [int(field) for field in fields[:8]]  # a guest's is counted in the user's too (man 5 proc)
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IO_WAIT]
            stolen += ticks[_STEAL]
    return busy, stolen


def _ticks_of_tree(pid: str) -> int:
    """CPU time of a process, of those it has reaped, and of all below it.

    Raises:
        OSError: the kernel does not list a process's children, so that its loader workers would count as others.
    """
    ticks = sum(map(int, (_PROC / pid / "stat").read_text().rpartition(")")[2].split()[_PROCESS_TIMES]))
    for thread in (_PROC / pid / "task").iterdir():
        for child in (thread / "children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile, and is counted once reaped
                ticks += _ticks_of_tree(child)
    return ticks


def _limiting_group(folders: Sequence[Path], reachable: int) -> Path | None:
    """The group whose quota is the tightest; None where none is below the cores that the process may run on."""
    tightest = min(folders, key=cpu_quota, default=None)
    return tightest if tightest is not None and cpu_quota(tightest) < reachable else None


def _group_s(folder: Path) -> float | None:
    """CPU time of all of a group's processes; None where it is of cgroup v1, which counts elsewhere."""
    with suppress(OSError, ValueError, KeyError):
        lines = (folder / "cpu.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6
    return None


def _pressure_s(path: Path) -> float | None:
    """Total of the line "some avg10=0.00 avg60=0.00 avg300=0.00 total=0", in microseconds there."""
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text().splitlines()[0].rpartition("total=")[2]) / 1e6
    return None
