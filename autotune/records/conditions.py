"""What a device did while a window ran: clocks, power, temperature, throttling, and who else used it.

Filled by the worker, stored beside the figures that it explains; () and None stand for what the device does not
report. `remarks_on` and `note_on_others` turn it into notes.
Source: NVML API reference, nvmlDeviceGetClockInfo, nvmlDeviceGetTotalEnergyConsumption,
nvmlDeviceGetCurrentClocksEventReasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from autotune.frozen import FrozenModel
from autotune.messages.devices import clock_lowered, clock_moved, others_on_device
from autotune.note import Note

__all__ = [
    "OTHERS_LEAST_BUSY",
    "OTHERS_LEAST_BYTES",
    "DeviceConditions",
    "ThrottleReason",
    "note_on_others",
    "remarks_on",
]

ThrottleReason = Literal["power_cap", "thermal", "power_brake", "hardware_slowdown"]
"""Why a GPU ran below the clock that it was set to; an idle GPU and clocks that a user has set are not among them."""

_CLOCK_MOVED_BY = 0.03
"""Share by which a clock between a window's edges moves the rate by as much as what a search decides on: our own
convention."""
OTHERS_LEAST_BYTES = 256 * 2**20
"""Device memory from which on others count: less than another process that computes takes. What lay outside torch's
allocator, a context and loaded kernels, was 749 MiB and more on an H200 and an H100 (benchmarks/results/gpu-*.json).
Our own convention."""
OTHERS_LEAST_BUSY = 0.05
"""Share of time that another process has to compute before it moves a rate by what a search decides on: our own
convention."""


class DeviceConditions(FrozenModel):
    """One device during a window; of several devices the sum of energy and power, and otherwise the worst of them."""

    sm_clock_mhz: tuple[int, int] | None = None
    """Clock of the multiprocessors at the window's two edges."""
    max_sm_clock_mhz: int | None = None
    """The highest that the device can be set to."""
    memory_clock_mhz: tuple[int, int] | None = None
    """Clock of the memory at the window's two edges."""
    temperature_c: tuple[int, int] | None = None
    """At the window's two edges, in degrees Celsius."""
    power_w: Annotated[float, Field(ge=0)] | None = None
    """Mean over the window: energy over time; where energy is not counted, the mean of the two edges."""
    energy_j: Annotated[float, Field(ge=0)] | None = None
    """Drawn by the whole device during the window. The sensor behind it samples only a part of the time: compare
    windows of a second and more. Source: Yang et al., Part-time Power Measurements, arXiv:2312.02741."""
    throttle_reasons: tuple[ThrottleReason, ...] = ()
    """Those at either edge of the window, or counted between them, sorted."""
    others_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    """Memory of the device in use before this process opened it."""
    others_busy_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of time in which the device ran kernels right before this process opened it; None as well where an earlier
    trial may have been the one that ran them."""
    persistence_mode: bool | None = None
    """The driver keeps the device initialised while it is unused."""
    tf32_overrides: tuple[str, ...] = ()
    """Variables of the environment that change what float32 means, as NAME=value: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and
    NVIDIA_TF32_OVERRIDE."""

    @property
    def clock_moved_by(self) -> float | None:
        """By what share the multiprocessors' clock changed from one edge to the other; None where it is not known."""
        if self.sm_clock_mhz is None or min(self.sm_clock_mhz) <= 0:
            return None
        first, last = self.sm_clock_mhz
        return last / first - 1

    @property
    def has_moved(self) -> bool:
        """Whether the clock changed by enough to move the rate."""
        return self.clock_moved_by is not None and abs(self.clock_moved_by) >= _CLOCK_MOVED_BY

    @property
    def is_at_power_limit(self) -> bool:
        """Whether the power limit lowered the clock: normal under heavy load, and no disturbance."""
        return "power_cap" in self.throttle_reasons

    @property
    def disturbances(self) -> tuple[ThrottleReason, ...]:
        """What lowered the clock beside the power limit: the same load may run faster at another time."""
        return tuple(reason for reason in self.throttle_reasons if reason != "power_cap")

    @property
    def has_others(self) -> bool:
        """Whether another process had the device open, by its memory.

        Kernels alone do not show that: a process of ours that has just ended may have run them.
        """
        return self.others_memory_bytes is not None and self.others_memory_bytes >= OTHERS_LEAST_BYTES


def remarks_on(conditions: DeviceConditions) -> Iterator[Note]:
    """What disturbed a window."""
    if conditions.disturbances:
        yield clock_lowered(reasons=conditions.disturbances)
    if conditions.has_moved and conditions.sm_clock_mhz is not None:
        first, last = conditions.sm_clock_mhz
        yield clock_moved(first_mhz=first, last_mhz=last)


def note_on_others(conditions: DeviceConditions | None) -> Note | None:
    """The note of a search whose device was in use before it began; None where it was not."""
    if conditions is None or not conditions.has_others:
        return None
    busy = conditions.others_busy_fraction
    return others_on_device(
        held_bytes=conditions.others_memory_bytes or 0,
        busy_fraction=None if busy is None or busy < OTHERS_LEAST_BUSY else busy,
    )
