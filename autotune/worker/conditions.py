"""Read what explains a window: memory growth, host load, utilization, clocks and other processes.

Comes in: a device or its GPUs. Each probe reads at the edges of a window (the memory watch after
each block) and returns a record of `autotune.records.measurement`; a value that a machine does not
report is None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import psutil
import torch

from autotune.apply.cores import cgroup_folders, cpu_quota, usable_cores
from autotune.models.group import merged_conditions
from autotune.models.growing_memory import Copying, PagesRead, copying_between
from autotune.models.memory import growth_of
from autotune.records.measurement import (
    GPM_SOURCE,
    NVML_SOURCE,
    WAIT_SOURCE,
    Block,
    BusyReading,
    DeviceConditions,
    Fullness,
    HostLoad,
    MemoryGrowth,
    ThrottleReason,
)
from autotune.worker import nvml
from autotune.worker.device import Device, pages_of, process_tree, tf32_overrides
from autotune.worker.nvml import (
    GPM_LEAST_S,
    THROTTLE_COUNTERS,
    EdgeReading,
    Gpu,
    GpuSample,
    free_gpm,
    gpm_shares,
    take_gpm,
    utilization_since,
)

# Memory growth: memory in use after each block of a window.


_LONGEST_READING_S = 0.05
"""Seconds of the first reading of pages above which there is no other: it grows with the workers'
memory, and the second one is within the warm-up. Source: 75 ms for three processes of 0.5 GB; a
trial's warm-up takes a second and more."""


@contextmanager
def open_memory_watch(device: Device, workers: Sequence[int] = ()) -> Iterator[MemoryWatch]:
    """Watch the memory of a device, of this process and of its loader workers.

    Open it once the workers run and before the warm-up: listing the processes of a machine takes
    milliseconds, in which the queue fills.

    Args:
        device: The device.
        workers: Process ids of the loader's workers, whose copied pages are read.
    """
    watch = MemoryWatch(device)
    try:
        for process in process_tree():
            watch.statm.append(os.open(f"/proc/{process.pid}/statm", os.O_RDONLY))
        if not device.has_own_memory:
            watch.workers = [*workers]
            watch.read_pages(0)
    except (OSError, psutil.Error):  # the system has no such files, or a process has ended
        watch.leave_host()
    try:
        yield watch
    finally:
        watch.leave_host()


@dataclass(slots=True)
class MemoryWatch:
    """Reads memory in use after each block; made by `open_memory_watch`.

    Memory growth takes seven readings at equal distance (models/memory.py), and windows that end by
    their precision have only 3 to 13 blocks in 1 to 4 s (gpu-nvidia-h100-80gb-hbm3.json): a reading
    per second would show none. So every block is read, and readings are cheap: about 3 us per
    process from /proc, and the allocator's own count. Host memory is watched only on Linux.
    """

    device: Device
    statm: list[int] = field(default_factory=list)
    """Descriptors of this process and its loader workers; [] once one of them is gone. They stay
    open: opening, reading and closing each file takes nine system calls instead of one, and over
    ten times as long. Each call releases the GIL, which a pin-memory thread may then keep from the
    training loop."""
    workers: list[int] = field(default_factory=list)
    """Process ids of the loader workers; [] if the limit is not on RAM, if one is gone, or if their
    pages take too long to read."""
    _pages: list[PagesRead] = field(default_factory=list)
    _on_host: list[tuple[int, int]] = field(default_factory=list)
    """Batches so far and bytes in use after each block."""
    _on_device: list[tuple[int, int]] = field(default_factory=list)
    """The same of the device's memory."""
    _batches: int = 0
    _begun: float = 0.0
    """Time of perf_counter when the first block had ended; 0 before that."""
    _latest: float = 0.0
    """Time of perf_counter when the last block had ended."""

    def after(self, block: Block) -> None:
        """Read the memory in use after a block of the window."""
        self._latest = perf_counter()
        self._begun = self._begun or self._latest
        self._batches += block.batches
        resident_bytes = self._private_bytes()
        if resident_bytes is not None:
            self._on_host.append((self._batches, resident_bytes))
        allocated_bytes = self.device.allocated_bytes()
        if allocated_bytes is not None:
            self._on_device.append((self._batches, allocated_bytes))

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """Return the growth of each kind of memory that has enough readings so far."""
        passed_s = self._latest - self._begun
        found = (
            growth_of("host", self._on_host, passed_s),
            growth_of("device", self._on_device, passed_s),
        )
        return tuple(filter(None, found))

    @property
    def has_read_in_warm_up(self) -> bool:
        """True once pages were read after the watch was opened."""
        return len(self._pages) > 1

    def read_pages(self, samples: int) -> None:
        """Read which pages the workers have copied.

        It takes milliseconds: never call it in a window. Three readings show a pace: when the watch
        is opened, once within the warm-up, and after the window.

        Args:
            samples: Samples since the watch was opened.
        """
        if not self.workers:
            return
        begun = perf_counter()
        pages = [pages_of(pid) for pid in self.workers]
        known = [one for one in pages if one is not None]
        is_slow = not self._pages and perf_counter() - begun > _LONGEST_READING_S
        # or a worker has ended, or the system does not report it
        if is_slow or len(known) < len(pages):
            self.workers.clear()
            self._pages.clear()
            return
        self._pages.append(PagesRead(samples, known))

    def copied(self) -> Copying | None:
        """Return what the workers have copied of this process's memory; None if unknown or nothing."""
        return copying_between(self._pages)

    def leave_host(self) -> None:
        """Close the counters of processes; host memory is no longer read."""
        while self.statm:
            os.close(self.statm.pop())

    def _private_bytes(self) -> int | None:
        """Return resident memory without files and shared memory. Source: man 5 proc, /proc/pid/statm."""
        if not self.statm:
            return None
        pages = 0
        try:
            for descriptor in self.statm:
                # seven numbers of at most 20 digits (man 5 proc)
                _, resident, shared, *_ = os.pread(descriptor, 256, 0).split()
                pages += int(resident) - int(shared)
        except (OSError, ValueError):  # a worker that is not persistent ends with its epoch
            self.leave_host()
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")


# Host load: CPU time of other processes during a window, from two readings of the kernel's counters.

_PROC = Path("/proc")
_IDLE = 3
_IO_WAIT = 4
_STEAL = 7
_PROCESS_TIMES = slice(11, 15)
"""utime, stime, cutime and cstime, counted from the state. Source: man 5 proc, /proc/pid/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """CPU time since boot, in seconds."""

    at_s: float
    """Time of perf_counter."""
    busy_s: float
    stolen_s: float
    own_s: float
    group_s: float | None
    pressure_s: float | None


class HostLoadProbe:
    """Reads how many of the host's cores other processes use, at the two edges of a window.

    Passive: each reading takes half a millisecond on two cores, outside the window's clock. Works
    on Linux only. A rank reads its own process tree; analysis.group joins the readings of a group.
    """

    def __init__(self) -> None:
        folders = cgroup_folders("cpu")
        self._cores = usable_cores()
        self._reachable = set[int]()
        self._tick_s = 0.0
        if hasattr(os, "sched_getaffinity"):
            self._reachable = os.sched_getaffinity(0)
            self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._limited = _limiting_group(folders, len(self._reachable))
        own = [folder / "cpu.pressure" for folder in folders[:1]]
        self._pressure = next((path for path in own if path.exists()), _PROC / "pressure" / "cpu")
        self._first: _Reading | None = None

    def start(self) -> None:
        """Read the first edge, before the clock starts."""
        self._first = self._read()

    def stop(self) -> HostLoad | None:
        """Read the second edge, after the clock has stopped; None if the kernel does not report the load."""
        first = self._first
        last = self._read()
        if first is None or last is None:
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
        """Return the counters now; None if this system has none."""
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
    if first is None or last is None:
        return None
    return max(0.0, last - first)


def _ticks_of_cores(cores: set[int]) -> tuple[int, int]:
    """Return the ticks in which these cores were busy, and those that the hypervisor took."""
    busy = 0
    stolen = 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            # the fields after these repeat a guest's time (man 5 proc)
            ticks = [int(field) for field in fields[:8]]
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IO_WAIT]
            stolen += ticks[_STEAL]
    return busy, stolen


def _ticks_of_tree(pid: str) -> int:
    """Return the CPU time, in ticks, of a process, of its reaped children and of all below it.

    Raises:
        OSError: The kernel does not list a process's children, so that loader workers would count
            as other processes.
    """
    # the name, which may hold spaces and brackets, ends at the last bracket
    fields = (_PROC / pid / "stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[_PROCESS_TIMES]))
    for thread in (_PROC / pid / "task").iterdir():
        for child in (thread / "children").read_text().split():
            # a child that has ended meanwhile is counted once reaped
            with suppress(FileNotFoundError, ProcessLookupError):
                ticks += _ticks_of_tree(child)
    return ticks


def _limiting_group(folders: Sequence[Path], reachable: int) -> Path | None:
    """Return the cgroup with the tightest quota; None if none limits the cores of this process."""
    tightest = min(folders, key=cpu_quota, default=None)
    if tightest is None or cpu_quota(tightest) >= reachable:
        return None
    return tightest


def _group_s(folder: Path) -> float | None:
    """Return the CPU time of all of a cgroup's processes; None for cgroup v1, which counts elsewhere."""
    with suppress(OSError, ValueError, KeyError):
        lines = (folder / "cpu.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6
    return None


def _pressure_s(path: Path) -> float | None:
    """Return the total, in seconds, of the line "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"."""
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text().splitlines()[0].rpartition("total=")[2]) / 1e6
    return None


# Utilization: from GPM, from NVML's samples, else from the loop's waits.

_LEAST_COVERED = 0.5
"""Least share of a stretch that whole samples must cover to represent it: the rest is the same
steady loop. Three samples in 0.6 s do, since two of their periods lie within it. An H200's period
is 0.2 s: 168 samples lie 197 to 204 ms apart (benchmarks/results/gpu-nvidia-h200, nvml). Source:
our own convention."""
_BUSY = 1  # NVML_GPM_METRIC_GRAPHICS_UTIL
_METRICS = {"sm_fraction": 2, "sm_occupancy": 3, "tensor_fraction": 5, "dram_fraction": 10}
"""NVML's numbers of the metrics by the field of `Fullness`: SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL,
DRAM_BW_UTIL."""


class BusyProbe:
    """Reads how busy and how full the devices are between `start` and `stop`.

    GPM (Hopper and newer) covers the time between two samples, taken at the window's edges: in what
    share of it "any compute/graphics app was active on the GPU", and how full that was
    (multiprocessors, tensor pipes, memory bandwidth). NVML's utilization, on all other GPUs, is the
    share of its sample period, "between 1 second and 1/6 second depending on the product", in which
    at least one kernel ran: it shows how busy, not how full. Source: NVML API reference,
    nvmlGpmMetricsGet, nvmlGpmMetricId_t, nvmlDeviceGetSamples and nvmlUtilization_t.

    If one process drives several devices, each source reports the least busy one, provided it has a
    reading of all.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._probes: list[_Probe] = []

    def start(self) -> None:
        """Begin at the window's first edge."""
        self._probes = [_Probe(gpu) for gpu in self._gpus]

    def stop(self, data_wait_fraction: float) -> tuple[tuple[BusyReading, ...], Fullness | None]:
        """Return the utilization since `start`.

        Args:
            data_wait_fraction: Share of the window that the loop waited for data.

        Returns:
            The reading of each available source, the best first: GPM's, NVML's if its samples cover
                the window, the loop's waits. And how full the least busy device was.
        """
        ended = [probe.stop() for probe in self._probes]
        all_shares = [shares for shares, _ in ended]
        readings = (
            *_least(GPM_SOURCE, [shares.get(_BUSY) for shares in all_shares]),
            *_least(NVML_SOURCE, [sampled for _, sampled in ended]),
            BusyReading(fraction=1.0 - data_wait_fraction, source=WAIT_SOURCE),
        )
        least_busy = min(all_shares, key=lambda shares: shares.get(_BUSY, 1.0), default={})
        return readings, _fullness(least_busy)


class _Probe:
    """Utilization of one device; remembers NVML's last sample, then takes GPM's first."""

    def __init__(self, gpu: Gpu) -> None:
        samples = utilization_since(gpu, 0)
        self._gpu = gpu
        self._since_us = None if samples is None else samples[-1].time_us
        self._first = take_gpm(gpu)
        self._begun = perf_counter()

    def stop(self) -> tuple[Mapping[int, float], float | None]:
        """Return GPM's metrics by number and the mean of NVML's samples; free GPM's samples."""
        elapsed_s = perf_counter() - self._begun
        first = self._first
        self._first = None
        second = None
        if first is not None and elapsed_s >= GPM_LEAST_S:
            second = take_gpm(self._gpu)
        shares = gpm_shares(first, second, (_BUSY, *_METRICS.values()))
        free_gpm(first)
        free_gpm(second)
        samples = None if self._since_us is None else utilization_since(self._gpu, self._since_us)
        return shares, covered_busy_fraction(samples or (), elapsed_s)


def covered_busy_fraction(samples: Sequence[GpuSample], stretch_s: float) -> float | None:
    """Return the busy share of a stretch, from the samples that were taken within it.

    A sample covers the time since the previous one: the first one's began before the stretch and is
    left out.

    Args:
        samples: Samples of NVML's buffer, the oldest first.
        stretch_s: Seconds of the stretch.

    Returns:
        None if the samples cover too little of the stretch.
    """
    covered_us = 0
    busy_us = list[float]()
    for earlier, later in pairwise(samples):
        span_us = later.time_us - earlier.time_us
        covered_us += span_us
        busy_us.append(span_us * later.busy_fraction)
    if covered_us <= 0 or covered_us < _LEAST_COVERED * stretch_s * 1e6:
        return None
    return fsum(busy_us) / covered_us


def _least(source: str, readings: Sequence[float | None]) -> Iterator[BusyReading]:
    """Yield the reading of the least busy device; nothing if one of them has none."""
    known = [reading for reading in readings if reading is not None]
    if known and len(known) == len(readings):
        yield BusyReading(fraction=min(known), source=source)


def _fullness(shares: Mapping[int, float]) -> Fullness | None:
    values = {field: shares.get(metric) for field, metric in _METRICS.items()}
    if all(value is None for value in values.values()):
        return None
    return Fullness(**values)


# Device conditions: clocks, power and throttling during a window, and what was on the device before.

BEFORE_S = 1.0
"""Seconds before a device is opened in which kernels of other processes are counted: one to six of
NVML's samples, whose period is 1 s to 1/6 s by product (nvmlUtilization_t), 0.2 s on an H200.
Source: our own convention."""

_REASONS: dict[int, ThrottleReason] = {
    0x04: "power_cap",  # SwPowerCap
    0x08: "hardware_slowdown",  # HwSlowdown: with one of the two below, which explain it, or alone
    0x20: "thermal",  # SwThermalSlowdown
    0x40: "thermal",  # HwThermalSlowdown
    0x80: "power_brake",  # HwPowerBrakeSlowdown
}
"""Reason by bit. Left out: an idle GPU, clocks that were set, sync boost and displays, which do not
lower the clock because of the workload."""
_LEAST_THROTTLED = 0.01
"""Least share of a window with a lowered clock that is worth a note. Source: our own convention."""


Others: TypeAlias = DeviceConditions
"""What was on a device before this process opened it: only `others_memory_bytes` and
`others_busy_fraction` are set."""


def others_before(device: str, first: int, count: int, quiet_s: float) -> Mapping[str, Others]:
    """Return what other processes use on the devices that this process is about to open.

    Makes no CUDA context.

    Args:
        device: As the user asked for it: torch's name, or "auto".
        first: Number of this rank's first device, counted from the named one.
        count: Devices that this process drives.
        quiet_s: Seconds in which no process of ours has used them; kernels before that may have
            been ours.

    Returns:
        Memory and utilization by UUID; {} unless these are CUDA devices.
    """
    kind, _, number = device.partition(":")
    if (
        torch.version.cuda is None
        or kind not in {"cuda", "auto"}
        or not (number or "0").isdecimal()
    ):
        return {}
    start = int(number or 0) + first
    gpus = [nvml.visible_gpu(index) for index in range(start, start + count)]
    stretch_s = min(quiet_s, BEFORE_S)
    return {gpu.uuid: _others_on(gpu, stretch_s) for gpu in gpus if gpu is not None}


def _others_on(gpu: Gpu, stretch_s: float) -> Others:
    """Return the memory in use on a GPU and its busy share in the last `stretch_s` seconds."""
    samples = nvml.utilization_since(gpu, time.time_ns() // 1000 - int(stretch_s * 1e6))
    busy_fraction = covered_busy_fraction(samples or (), stretch_s)
    return DeviceConditions(
        others_memory_bytes=nvml.memory_in_use(gpu), others_busy_fraction=busy_fraction
    )


def conditions_before(gpus: Sequence[Gpu], before: Mapping[str, Others]) -> DeviceConditions | None:
    """Return what was on this process's devices before, as one.

    Args:
        gpus: The devices that the process drives.
        before: What was on the devices that it was about to open, by UUID.

    Returns:
        None if nothing is known of any of them.
    """
    return merged_conditions([before[gpu.uuid] for gpu in gpus if gpu.uuid in before])


class ConditionsProbe:
    """Reads the devices of a process at the two edges of a window.

    Each edge is read right after waiting for the device, which may then look idle for a moment
    (NVML's reason "GpuIdle", which is no throttling). The clock has not fallen by then: one H200
    and one H100 had their highest clock at both edges of every window without a power limit
    (benchmarks/results/gpu-*.json). Where the driver counts what lowered the clock in between, that
    is used next to the edges. Source: NVML API reference, nvmlClocksEventReasons and
    NVML_FI_DEV_CLOCKS_EVENT_REASON_*.

    Args:
        gpus: The devices that it drives; () if NVML does not know them.
        before: What was on them before, by UUID; a device that was not expected has no entry.
        has_cuda: The device is NVIDIA's: variables that change its float32 are reported.
    """

    def __init__(
        self, gpus: Sequence[Gpu], before: Mapping[str, Others], *, has_cuda: bool
    ) -> None:
        self._gpus = gpus
        self._before = before
        self._has_cuda = has_cuda
        self._first: tuple[EdgeReading, ...] = ()

    def start(self) -> None:
        """Read the first edge, before the clock starts."""
        self._first = tuple(map(nvml.read_edge, self._gpus))

    def stop(self) -> DeviceConditions | None:
        """Read the second edge, after the clock has stopped; return the conditions of all devices as one."""
        last = tuple(map(nvml.read_edge, self._gpus))
        edges = zip(self._gpus, self._first, last, strict=True)
        conditions = merged_conditions([self._conditions(*edge) for edge in edges])
        overrides = tf32_overrides() if self._has_cuda else ()
        if not overrides:
            return conditions
        return (conditions or DeviceConditions()).model_copy(update={"tf32_overrides": overrides})

    def _conditions(self, gpu: Gpu, first: EdgeReading, last: EdgeReading) -> DeviceConditions:
        """Return the conditions of one GPU from its readings at both edges."""
        before = self._before.get(gpu.uuid, DeviceConditions())
        # none if the counter stood still or was reset
        energy_j = _difference(first.energy_j, last.energy_j) or None
        return DeviceConditions(
            sm_clock_mhz=_pair(first.sm_clock_mhz, last.sm_clock_mhz),
            max_sm_clock_mhz=nvml.max_sm_clock_mhz(gpu),
            memory_clock_mhz=_pair(first.memory_clock_mhz, last.memory_clock_mhz),
            temperature_c=_pair(first.temperature_c, last.temperature_c),
            power_w=_power_w(first, last, energy_j),
            energy_j=energy_j,
            throttle_reasons=tuple(sorted({*_seen(first), *_seen(last), *_counted(first, last)})),
            others_memory_bytes=before.others_memory_bytes,
            others_busy_fraction=before.others_busy_fraction,
            persistence_mode=nvml.has_persistence(gpu),
        )


def _pair(first: int | None, last: int | None) -> tuple[int, int] | None:
    if first is None or last is None:
        return None
    return first, last


def _power_w(first: EdgeReading, last: EdgeReading, energy_j: float | None) -> float | None:
    """Return the mean power: from the energy if known, else from the readings at the edges."""
    if energy_j is not None:
        return energy_j / (last.at_s - first.at_s)
    if first.power_w is None or last.power_w is None:
        return None
    return (first.power_w + last.power_w) / 2


def _seen(edge: EdgeReading) -> set[ThrottleReason]:
    """Return the reasons at an edge. A hardware slowdown counts only if no other bit explains it."""
    found = {reason for bit, reason in _REASONS.items() if (edge.event_bits or 0) & bit}
    if found & {"thermal", "power_brake"}:
        found.discard("hardware_slowdown")
    return found


def _counted(first: EdgeReading, last: EdgeReading) -> set[ThrottleReason]:
    """Return the reasons that the driver counted between the edges for more than a moment."""
    least_ns = max(1, _LEAST_THROTTLED * (last.at_s - first.at_s) * 1e9)
    return {
        THROTTLE_COUNTERS[number]
        for number, before in first.throttled_ns.items()
        if last.throttled_ns.get(number, 0) - before >= least_ns
    }
