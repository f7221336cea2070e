"""Read, around a window, what may disturb it: clocks, utilization, memory growth, other programs."""

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
from autotune.launch.answers import merged_conditions
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
from autotune.worker.device import Device, tf32_overrides
from autotune.worker.nvml import (
    GPM_LEAST_S,
    EdgeReading,
    Gpu,
    GpuSample,
    free_gpm,
    gpm_shares,
    take_gpm,
    utilization_since,
)

# What a trial holds after each block of its window, so that a growth shows: in RAM, and on its
# devices.
#
# Takes a device; hands on MemoryGrowths. Reads /proc between blocks, some 3 us a process, and the
# allocator's own count; elsewhere than on Linux the host's memory is not watched.
#
# Every block is read. A growth takes seven readings of equal distance (models/memory.py), and
# windows that end by their precision have no more than 3 to 13 blocks in 1 to 4 s
# (gpu-nvidia-h100-80gb-hbm3.json): a reading a second would show no growth there. Readings are
# cheap instead. The last one costs nothing, since the clock has stopped by then.


@contextmanager
def open_memory_watch(device: Device) -> Iterator[MemoryWatch]:
    """Watch what is held by a device, by this process and by its loader workers.

    Opened once the workers run, and before the warm-up: to look through all processes of a machine
    takes milliseconds, in which the queue fills.
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

    They stay open. To open, read and close each file takes nine system calls in place of one, and
    over ten times as long; each call gives up the GIL, which a thread that pins batches may keep
    from a loop that launches kernels."""
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
        found = (
            growth_of("host", self._host, passed_s),
            growth_of("device", self._on_device, passed_s),
        )
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


# How much of the host's cores other programs use during a window: HostLoad, filled from two
# readings of the kernel's.
#
# Passive: each reading takes half a millisecond on two cores, before the window's clock starts and
# after it has stopped. Linux alone tells it. A rank reads its own process tree; a group's readings
# are joined by analysis.group.


_PROC = Path("/proc")
_IDLE = 3
_IO_WAIT = 4
_STEAL = 7
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
        folders = cgroup_folders("cpu")
        self._cores = usable_cores()
        self._reachable = (
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        )
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
        first = self._first
        last = self._read()
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
            ticks = [
                int(field) for field in fields[:8]
            ]  # a guest's is counted in the user's too (man 5 proc)
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IO_WAIT]
            stolen += ticks[_STEAL]
    return busy, stolen


def _ticks_of_tree(pid: str) -> int:
    """CPU time of a process, of those it has reaped, and of all below it.

    Raises:
        OSError: the kernel does not list a process's children, so that its loader workers would
            count as others.
    """
    ticks = sum(
        map(int, (_PROC / pid / "stat").read_text().rpartition(")")[2].split()[_PROCESS_TIMES])
    )
    for thread in (_PROC / pid / "task").iterdir():
        for child in (thread / "children").read_text().split():
            with suppress(
                FileNotFoundError, ProcessLookupError
            ):  # it has ended meanwhile, and is counted once reaped
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


# How busy and how full the device was during a window, read passively: GPM, NVML's samples, else
# the loop's waits.
#
# GPM, on Hopper and newer, covers the time between two samples, which are taken at the window's
# edges: in what share of it "any compute/graphics app was active on the GPU", and how full that was
# (multiprocessors, tensor pipes, memory bandwidth). NVML's utilization, on all others, is the share
# of its sample period, "between 1 second and 1/6 second depending on the product", in which at
# least one kernel ran: it shows how busy, not how full. Source: NVML API reference,
# nvmlGpmMetricsGet, nvmlGpmMetricId_t, nvmlDeviceGetSamples and nvmlUtilization_t.


_LEAST_COVERED = 0.5
"""Share of a stretch that whole samples must cover to speak for it: our own convention. What they
leave out is the same steady loop. Three samples in 0.6 s do: two of their periods lie within it. An
H200's period is 0.2 s: 168 samples lie 197 to 204 ms apart (benchmarks/results/gpu-nvidia-h200,
nvml)."""
_BUSY = 1  # NVML_GPM_METRIC_GRAPHICS_UTIL
_METRICS = {"sm_fraction": 2, "sm_occupancy": 3, "tensor_fraction": 5, "dram_fraction": 10}
"""Fullness's fields, and NVML's numbers of the metrics: SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL,
DRAM_BW_UTIL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busyness:
    """What was read of a window."""

    reading: BusyReading
    """The best of them: GPM's, else NVML's where its samples cover the window, else the loop's
    waits."""
    readings: tuple[BusyReading, ...]
    """By every source that could tell, the best first."""
    fullness: Fullness | None


class BusyProbe:
    """Reads GPM's counters, and NVML's buffer of utilization samples, between `start` and `stop`.

    Of several devices that one process drives, each source gives the least busy one's reading,
    where it has all.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._probes: list[_Probe] = []

    def start(self) -> None:
        """Begin at the window's first edge."""
        self._probes = [_Probe(gpu) for gpu in self._gpus]

    def stop(self, data_wait_fraction: float) -> Busyness:
        """How busy the devices were since `start`; by the loop's waits where no other source is there."""
        ended = [probe.stop() for probe in self._probes]
        readings = (
            *_least(GPM_SOURCE, [shares.get(_BUSY) for shares, _ in ended]),
            *_least(NVML_SOURCE, [sampled for _, sampled in ended]),
            BusyReading(fraction=1.0 - data_wait_fraction, source=WAIT_SOURCE),
        )
        least_busy = min(
            (shares for shares, _ in ended), key=lambda shares: shares.get(_BUSY, 1.0), default={}
        )
        return Busyness(reading=readings[0], readings=readings, fullness=_fullness(least_busy))


class _Probe:
    """One device: remembers NVML's last sample, then takes GPM's first."""

    def __init__(self, gpu: Gpu) -> None:
        samples = utilization_since(gpu, 0)
        self._gpu = gpu
        self._since_us = None if samples is None else samples[-1].time_us
        self._first = take_gpm(gpu)
        self._begun = perf_counter()

    def stop(self) -> tuple[Mapping[int, float], float | None]:
        """GPM's metrics since then, by number, and the mean of NVML's utilization samples; frees GPM's samples."""
        elapsed_s = perf_counter() - self._begun
        first = self._first
        self._first = None
        second = take_gpm(self._gpu) if first is not None and elapsed_s >= GPM_LEAST_S else None
        shares = gpm_shares(first, second, (_BUSY, *_METRICS.values()))
        free_gpm(first)
        free_gpm(second)
        samples = None if self._since_us is None else utilization_since(self._gpu, self._since_us)
        return shares, covered_busy_fraction(samples or (), elapsed_s)


def covered_busy_fraction(samples: Sequence[GpuSample], stretch_s: float) -> float | None:
    """The busy share of a stretch, from the samples that came within it; None where they cover too little of it.

    A sample covers the time since the one before it: the first one's began before the stretch, and
    is left out.
    """
    spans = [
        (later.time_us - earlier.time_us, later.busy_fraction)
        for earlier, later in pairwise(samples)
    ]
    covered_us = sum(span_us for span_us, _ in spans)
    if covered_us <= 0 or covered_us < _LEAST_COVERED * stretch_s * 1e6:
        return None
    return fsum(span_us * fraction for span_us, fraction in spans) / covered_us


def _least(source: str, readings: Sequence[float | None]) -> Iterator[BusyReading]:
    """The reading of the least busy device; none where one of them has none."""
    known = [reading for reading in readings if reading is not None]
    if known and len(known) == len(readings):
        yield BusyReading(fraction=min(known), source=source)


def _fullness(shares: Mapping[int, float]) -> Fullness | None:
    values = {field: shares.get(metric) for field, metric in _METRICS.items()}
    return Fullness(**values) if any(value is not None for value in values.values()) else None


# What the device does during a window, and what it was like before this process opened it:
# DeviceConditions, filled.
#
# Either edge of a window is read right after the device was waited for. It may then look idle for a
# moment (NVML's reason "GpuIdle", which is no throttling). The clock does not fall by then: one
# H200 and one H100 had their highest clock at both edges of every window that no limit of power
# held (benchmarks/results/gpu-*.json). What held the clock down in between is counted by the
# driver, where it does, beside what the edges show. Source: NVML API reference,
# nvmlClocksEventReasons and NVML_FI_DEV_CLOCKS_EVENT_REASON_*.


BEFORE_S = 1.0
"""Seconds before a device is opened in which kernels of other processes are counted: one to six of
NVML's samples, whose period is 1 s to 1/6 s by product (nvmlUtilization_t), 0.2 s on an H200. Our
own convention."""

_REASONS: dict[int, ThrottleReason] = {
    0x04: "power_cap",  # SwPowerCap
    0x08: "hardware_slowdown",  # HwSlowdown: beside one of the two below, which say why, or alone
    0x20: "thermal",  # SwThermalSlowdown
    0x40: "thermal",  # HwThermalSlowdown
    0x80: "power_brake",  # HwPowerBrakeSlowdown
}
"""By bit. An idle GPU, clocks that were set, sync boost and a display lower no clock because of the
work."""
_COUNTED: dict[int, ThrottleReason] = {
    74: "power_cap",
    269: "thermal",
    270: "thermal",
    271: "power_brake",
}
"""By the number of the driver's counter; see nvml.py."""
_LEAST_THROTTLED = 0.01
"""Share of a window for which a clock must have been held down to be worth a remark: our own
convention."""


Others: TypeAlias = DeviceConditions
"""What was on a device before this process opened it: `others_memory_bytes` and
`others_busy_fraction` alone."""


def others_before(device: str, first: int, count: int, quiet_s: float) -> Mapping[str, Others]:
    """What uses the devices that this process is about to open, by UUID; makes no CUDA context.

    Args:
        device: as asked for: torch's name, or "auto".
        first: number of this rank's first device among those from the named one on.
        count: devices that this process drives.
        quiet_s: seconds for which no process of ours has used them: kernels before that may have
            been ours.
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
    return {gpu.uuid: _others_on(gpu, min(quiet_s, BEFORE_S)) for gpu in gpus if gpu is not None}


def _others_on(gpu: Gpu, stretch_s: float) -> Others:
    samples = nvml.utilization_since(gpu, time.time_ns() // 1000 - int(stretch_s * 1e6))
    busy_fraction = covered_busy_fraction(samples or (), stretch_s)
    return DeviceConditions(
        others_memory_bytes=nvml.memory_in_use(gpu), others_busy_fraction=busy_fraction
    )


def conditions_before(gpus: Sequence[Gpu], before: Mapping[str, Others]) -> DeviceConditions | None:
    """What was on the devices that turned out to be this process's; None where nothing is known."""
    return merged_conditions([before[gpu.uuid] for gpu in gpus if gpu.uuid in before])


class ConditionsProbe:
    """Reads a process's devices at a window's two edges.

    Args:
        gpus: those that it drives; () where NVML does not know them.
        before: what was on them before; by UUID; a device that turned out to be another one has no
            entry.
        has_cuda: the device is NVIDIA's: variables that change its float32 are reported.
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
        """Read the second edge, after the clock has stopped; what is known of all devices, as one."""
        last = tuple(map(nvml.read_edge, self._gpus))
        conditions = merged_conditions(
            [self._conditions(*edge) for edge in zip(self._gpus, self._first, last, strict=True)]
        )
        overrides = tf32_overrides() if self._has_cuda else ()
        return (
            (conditions or DeviceConditions()).model_copy(update={"tf32_overrides": overrides})
            if overrides
            else conditions
        )

    def _conditions(self, gpu: Gpu, first: EdgeReading, last: EdgeReading) -> DeviceConditions:
        before = self._before.get(gpu.uuid, DeviceConditions())
        energy_j = _energy_j(first, last)
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
    return None if first is None or last is None else (first, last)


def _energy_j(first: EdgeReading, last: EdgeReading) -> float | None:
    """None as well where the count stood still, or began again, between the edges: every GPU draws some."""
    if first.energy_j is None or last.energy_j is None or last.energy_j <= first.energy_j:
        return None
    return last.energy_j - first.energy_j


def _power_w(first: EdgeReading, last: EdgeReading, energy_j: float | None) -> float | None:
    if energy_j is not None and last.at_s > first.at_s:
        return energy_j / (last.at_s - first.at_s)
    return (
        None
        if first.power_w is None or last.power_w is None
        else (first.power_w + last.power_w) / 2
    )


def _seen(edge: EdgeReading) -> set[ThrottleReason]:
    """What an edge shows. A hardware slowdown stands alone only where no other bit gives its reason."""
    found = {reason for bit, reason in _REASONS.items() if (edge.event_bits or 0) & bit}
    return found - {"hardware_slowdown"} if found & {"thermal", "power_brake"} else found


def _counted(first: EdgeReading, last: EdgeReading) -> set[ThrottleReason]:
    """What the driver has counted between the edges, where it is more than a moment."""
    least_ns = max(1, _LEAST_THROTTLED * (last.at_s - first.at_s) * 1e9)
    held_ns = {
        number: last.throttled_ns.get(number, 0) - before
        for number, before in first.throttled_ns.items()
    }
    return {reason for number, reason in _COUNTED.items() if held_ns.get(number, 0) >= least_ns}
