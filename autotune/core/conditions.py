"""What a device did while a window ran: clocks, power, temperature, throttling, and who else used it.

Filled by the worker, stored beside the figures that it explains; () and None stand for what the device does not tell.
Source: NVML API reference, nvmlDeviceGetClockInfo, nvmlDeviceGetTotalEnergyConsumption,
nvmlDeviceGetCurrentClocksEventReasons.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DeviceConditions", "ThrottleReason"]

ThrottleReason = Literal["power_cap", "thermal", "power_brake", "hardware_slowdown"]
"""Why a GPU ran below the clock that it was set to; an idle GPU and clocks that somebody has set are none."""

_CLOCK_MOVED_BY = 0.03
"""Share by which a clock between a window's edges moves the rate by as much as what a search decides on: our own
convention."""


class DeviceConditions(BaseModel):
    """One device during a window; of several devices the sum of energy and power, and otherwise the worst of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sm_clock_mhz: tuple[int, int] | None = None
    """Clock of the multiprocessors at the window's two edges."""
    max_sm_clock_mhz: int | None = None
    """The highest that the device can be set to."""
    memory_clock_mhz: tuple[int, int] | None = None
    """Clock of the memory at the window's two edges."""
    temperature_c: tuple[int, int] | None = None
    """At the window's two edges, in degrees Celsius."""
    power_w: Annotated[float, Field(ge=0)] | None = None
    """Mean over the window: energy over time."""
    energy_j: Annotated[float, Field(ge=0)] | None = None
    """Drawn by the whole device during the window."""
    throttle_reasons: tuple[ThrottleReason, ...] = ()
    """Those seen at either edge of the window, or counted between them, sorted."""
    others_memory_bytes: int | None = None
    """Memory of the device in use before this trial opened it."""
    others_busy_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of time in which the device ran kernels before this trial opened it."""
    persistence_mode: bool | None = None
    """The driver keeps the device initialised while nobody uses it."""
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
