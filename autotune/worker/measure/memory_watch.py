"""What a trial holds after each block of its window, so that a growth shows: in RAM, and on its devices.

Takes a device; hands on MemoryGrowths. Reads /proc between blocks, some 3 us a process, and the allocator's own count;
elsewhere than on Linux the host's memory is not watched.

Every block is read. A growth takes seven readings of equal distance (analysis/memory/growth.py), and windows that end
by their precision have no more than 3 to 13 blocks in 1 to 4 s (gpu-nvidia-h100-80gb-hbm3.json): a reading a second
would show no growth there. Readings are cheap instead. The last one costs nothing, since the clock has stopped by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import psutil

from autotune.analysis.memory.growth import growth_of
from autotune.records.measurement import Block
from autotune.records.memory import MemoryGrowth
from autotune.worker.setup.device import Device

__all__ = ["MemoryWatch", "open_memory_watch"]


@contextmanager
def open_memory_watch(device: Device) -> Iterator[MemoryWatch]:
    """Watch what is held by a device, by this process and by its loader workers.

    Opened once the workers run, and before the warm-up: to look through all processes of a machine takes milliseconds,
    in which the queue fills.
    """
    watch = MemoryWatch(device, _open_statm())
    try:
        yield watch
    finally:
        watch.leave_host()


def _open_statm() -> list[int]:
    """Open the figures on memory of this process and of all that it has started; [] where one has none."""
    opened = list[int]()
    try:
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            opened.append(os.open(f"/proc/{process.pid}/statm", os.O_RDONLY))
    except (OSError, psutil.Error):
        _close(opened)
    return opened


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


@dataclass(slots=True)
class MemoryWatch:
    """Reads what is held, block by block; made by `open_memory_watch`."""

    device: Device
    _statm: list[int]
    """Descriptors, of this process and its loader workers; [] once one of them is gone.

    They stay open. To open, read and close each file takes nine system calls in place of one, and over ten times as
    long; each call gives up the GIL, which a thread that pins batches may keep from a loop that launches kernels."""
    _host: list[tuple[int, int]] = field(default_factory=list)
    _on_device: list[tuple[int, int]] = field(default_factory=list)
    _batches: int = 0
    _begun: float = 0.0
    _latest: float = 0.0
    """When the first and the last block had ended."""

    def after(self, block: Block) -> None:
        """Read what is held after a block of the window."""
        self._latest = perf_counter()
        self._begun = self._begun or self._latest
        self._batches += block.batches
        if (held := self._private_bytes()) is not None:
            self._host.append((self._batches, held))
        if (allocated := self.device.allocated_bytes()) is not None:
            self._on_device.append((self._batches, allocated))

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """What the blocks so far show, of each kind of memory that they tell enough of."""
        passed_s = self._latest - self._begun
        found = (growth_of("host", self._host, passed_s), growth_of("device", self._on_device, passed_s))
        return tuple(filter(None, found))

    def leave_host(self) -> None:
        """Close what is read of processes; the host's memory is read no more."""
        _close(self._statm)

    def _private_bytes(self) -> int | None:
        """Resident memory beside files and shared memory. Source: man 5 proc, /proc/pid/statm."""
        if not self._statm:
            return None
        pages = 0
        try:
            for descriptor in self._statm:
                # seven numbers of at most 20 digits (man 5 proc)
                _, resident, shared, *_ = os.pread(descriptor, 256, 0).split()
                pages += int(resident) - int(shared)
        except (OSError, ValueError):  # a worker that is not persistent has ended with its epoch
            self.leave_host()
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")
