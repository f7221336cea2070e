"""What the device does during a window, and what it was like before this process opened it: DeviceConditions, filled.

Either edge of a window is read right after the device was waited for. It may then look idle for a moment (NVML's reason
"GpuIdle", which is no throttling). The clock does not fall by then: one H200 and one H100 had their highest clock at
both edges of every window that no limit of power held (benchmarks/results/gpu-*.json). What held the clock down in
between is counted by the driver, where it does, beside what the edges show.
Source: NVML API reference, nvmlClocksEventReasons and NVML_FI_DEV_CLOCKS_EVENT_REASON_*.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from autotune.analysis.group import merged_conditions
from autotune.records.conditions import DeviceConditions, ThrottleReason
from autotune.worker.measure import nvml
from autotune.worker.measure.nvml import EdgeReading, Gpu
from autotune.worker.measure.utilization import covered_busy_fraction
from autotune.worker.setup.machine import tf32_overrides

__all__ = ["BEFORE_S", "ConditionsProbe", "Others", "conditions_before", "others_before"]

BEFORE_S = 1.0
"""Seconds before a device is opened in which kernels of other processes are counted: one to six of NVML's samples,
whose period is 1 s to 1/6 s by product (nvmlUtilization_t), 0.2 s on an H200. Our own convention."""

_REASONS: dict[int, ThrottleReason] = {
    0x04: "power_cap",  # SwPowerCap
    0x08: "hardware_slowdown",  # HwSlowdown: beside one of the two below, which say why, or alone
    0x20: "thermal",  # SwThermalSlowdown
    0x40: "thermal",  # HwThermalSlowdown
    0x80: "power_brake",  # HwPowerBrakeSlowdown
}
"""By bit. An idle GPU, clocks that were set, sync boost and a display lower no clock because of the work."""
_COUNTED: dict[int, ThrottleReason] = {74: "power_cap", 269: "thermal", 270: "thermal", 271: "power_brake"}
"""By the number of the driver's counter; see nvml.py."""
_LEAST_THROTTLED = 0.01
"""Share of a window for which a clock must have been held down to be worth a remark: our own convention."""


Others: TypeAlias = DeviceConditions
"""What was on a device before this process opened it: `others_memory_bytes` and `others_busy_fraction` alone."""


def others_before(device: str, first: int, count: int, quiet_s: float) -> Mapping[str, Others]:
    """What uses the devices that this process is about to open, by UUID; makes no CUDA context.

    Args:
        device: as asked for: torch's name, or "auto".
        first: number of this rank's first device among those from the named one on.
        count: devices that this process drives.
        quiet_s: seconds for which no process of ours has used them: kernels before that may have been ours.
    """
    kind, _, number = device.partition(":")
    if torch.version.cuda is None or kind not in {"cuda", "auto"} or not (number or "0").isdecimal():
        return {}
    start = int(number or 0) + first
    gpus = [nvml.visible_gpu(index) for index in range(start, start + count)]
    return {gpu.uuid: _others_on(gpu, min(quiet_s, BEFORE_S)) for gpu in gpus if gpu is not None}


def _others_on(gpu: Gpu, stretch_s: float) -> Others:
    samples = nvml.utilization_since(gpu, time.time_ns() // 1000 - int(stretch_s * 1e6))
    busy_fraction = covered_busy_fraction(samples or (), stretch_s)
    return DeviceConditions(others_memory_bytes=nvml.memory_in_use(gpu), others_busy_fraction=busy_fraction)


def conditions_before(gpus: Sequence[Gpu], before: Mapping[str, Others]) -> DeviceConditions | None:
    """What was on the devices that turned out to be this process's; None where nothing is known."""
    return merged_conditions([before[gpu.uuid] for gpu in gpus if gpu.uuid in before])


class ConditionsProbe:
    """Reads a process's devices at a window's two edges.

    Args:
        gpus: those that it drives; () where NVML does not know them.
        before: what was on them before; by UUID; a device that turned out to be another one has no entry.
        has_cuda: the device is NVIDIA's: variables that change its float32 are reported.
    """

    def __init__(self, gpus: Sequence[Gpu], before: Mapping[str, Others], *, has_cuda: bool) -> None:
        self._gpus, self._before, self._has_cuda = gpus, before, has_cuda
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
        before, energy_j = self._before.get(gpu.uuid, DeviceConditions()), _energy_j(first, last)
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
    return None if first.power_w is None or last.power_w is None else (first.power_w + last.power_w) / 2


def _seen(edge: EdgeReading) -> set[ThrottleReason]:
    """What an edge shows. A hardware slowdown stands alone only where no other bit gives its reason."""
    found = {reason for bit, reason in _REASONS.items() if (edge.event_bits or 0) & bit}
    return found - {"hardware_slowdown"} if found & {"thermal", "power_brake"} else found


def _counted(first: EdgeReading, last: EdgeReading) -> set[ThrottleReason]:
    """What the driver has counted between the edges, where it is more than a moment."""
    least_ns = max(1, _LEAST_THROTTLED * (last.at_s - first.at_s) * 1e9)
    held_ns = {number: last.throttled_ns.get(number, 0) - before for number, before in first.throttled_ns.items()}
    return {reason for number, reason in _COUNTED.items() if held_ns.get(number, 0) >= least_ns}
