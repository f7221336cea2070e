"""File systems and a memory cgroup of a case's own, where the machine allows them.

In its own mount namespace, /dev/shm and the disk of the run folder are small and empty: a fault can fill them, and what
is left there is the case's. It all goes with the process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

__all__ = ["Surroundings", "enter", "has_memory_groups"]

_CLONE_NEWNS = 0x20000  # linux/sched.h
_SHM, _SHM_SIZE, _DISK_SIZE = Path("/dev/shm"), "64m", "96m"
_GROUPS, _GROUP_BYTES = Path("/sys/fs/cgroup/memory"), 512 * 2**20  # version 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a case has for itself."""

    has_mounts: bool

    def shared_memory(self) -> list[str]:
        """What lies in /dev/shm; empty where that is not the case's own."""
        return [path.name for path in _SHM.iterdir()] if self.has_mounts else []

    @contextmanager
    def memory_group(self, *, is_wanted: bool) -> Iterator[str]:
        """A memory cgroup, empty so far, with a limit; "" where none is wanted."""
        if not is_wanted:
            yield ""
            return
        group = _GROUPS / f"autotune-endurance-{uuid.uuid4().hex}"
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(_GROUP_BYTES))
            yield str(group)
        finally:
            for _ in range(50):
                with suppress(OSError):  # what ran there is not reaped yet
                    group.rmdir()
                    break
                sleep(0.1)


def has_memory_groups() -> bool:
    """Whether a memory cgroup can be made here."""
    return (_GROUPS / "memory.limit_in_bytes").exists() and os.access(_GROUPS, os.W_OK)


def enter(folder: Path) -> Surroundings:
    """Give this process file systems of its own for /dev/shm and the folder `disk`, where it may."""
    disk = folder / "disk"
    disk.mkdir()
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return Surroundings(has_mounts=False)
    private = ["mount", "--make-rprivate", "/"]
    mounts = [
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        for place, size in ((_SHM, _SHM_SIZE), (disk, _DISK_SIZE))
    ]
    done = [
        subprocess.run(command, capture_output=True, check=False).returncode
        for command in (private, *mounts)
    ]
    return Surroundings(has_mounts=not any(done))
