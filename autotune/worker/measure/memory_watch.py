"""What a trial holds after each block of its window, so that a growth shows: in RAM, and on its devices.

Takes a device; hands on MemoryGrowths. Reads /proc between blocks, some 20 us a process, and the allocator's own count;
elsewhere than on Linux the host's memory is not watched.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import psutil

from autotune.analysis.memory.growth import growth_of
from autotune.records.measurement import Block
from autotune.records.memory import MemoryGrowth
from autotune.worker.setup.device import Device

__all__ = ["MemoryWatch"]


def _own_processes() -> list[Path]:
    with suppress(psutil.Error):
        own = psutil.Process()
        pids = [own.pid, *(child.pid for child in own.children(recursive=True))]
        return [Path(f"/proc/{pid}/statm") for pid in pids]
    return []


@dataclass(slots=True)
class MemoryWatch:
    """Reads what is held, block by block.

    Made once the loader's workers run, and before the warm-up: to look through all processes of a machine takes
    milliseconds, in which the queue fills.
    """

    device: Device
    _statm: list[Path] = field(default_factory=_own_processes)
    """Of this process and its loader workers; [] once one of them is gone."""
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

    def _private_bytes(self) -> int | None:
        """Resident memory beside files and shared memory. Source: man 5 proc, /proc/pid/statm."""
        try:
            parts = [path.read_text().split() for path in self._statm]
            pages = sum(int(part[1]) - int(part[2]) for part in parts)
        except (OSError, IndexError, ValueError):  # a worker that is not persistent has ended with its epoch
            self._statm = []
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") if parts else None
