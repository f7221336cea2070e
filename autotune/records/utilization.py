"""How busy the device was, by every source that measured it, and how full the busy time was."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = [
    "GPM_SOURCE",
    "NVML_SOURCE",
    "PROFILER_SOURCE",
    "WAIT_SOURCE",
    "BusyReading",
    "Fullness",
    "best_common_source",
    "best_direct_reading",
    "disagreement",
    "source_rank",
]

PROFILER_SOURCE = "profiler: kernels and copies"
GPM_SOURCE = "GPM graphics utilization"
NVML_SOURCE = "NVML utilization"
WAIT_SOURCE = "1 - data wait"
_RANKS = {PROFILER_SOURCE: 0, GPM_SOURCE: 1, NVML_SOURCE: 2, WAIT_SOURCE: 4}
_AGREE_WITHIN = 0.10  # our convention

_Fraction = Annotated[float, Field(ge=0, le=1)]


class BusyReading(FrozenModel):
    """A busy fraction, and where it comes from."""

    fraction: _Fraction
    """Of the time, in 0..1."""
    source: str
    """What told it, in a few words."""


class Fullness(FrozenModel):
    """How full the device's time was, by NVIDIA's GPM during the window, in 0..1; None where a metric is not given.

    Source: NVML API reference, GPM metrics 2 (SM_UTIL), 3 (SM_OCCUPANCY), 5 (ANY_TENSOR_UTIL), 10 (DRAM_BW_UTIL).
    """

    sm_fraction: _Fraction | None
    """"Percentage of SMs that were busy", as NVML has it; streaming multiprocessors."""
    sm_occupancy: _Fraction | None
    """"Percentage of warps that were active vs theoretical maximum"."""
    tensor_fraction: _Fraction | None
    """"Percentage of time the GPU's SMs were doing ANY tensor operations"."""
    dram_fraction: _Fraction | None
    """"Percentage of DRAM bw used vs theoretical maximum"."""


def source_rank(source: str) -> int:
    """How much a source is worth, 0 for the best.

    The profiler sees every kernel and copy. GPM reports the "percentage of time any compute/graphics app was active on
    the GPU" from one edge of a window to the other; NVML's samples are means over 1/6 s to 1 s by product, so that none
    to three of them lie within 0.6 s. The loop's waits show the loader alone: where launches delay the device, they
    read 1.
    Source: NVML API reference, nvmlGpmMetricId_t (GRAPHICS_UTIL) and nvmlUtilization_t.
    """
    return _RANKS.get(source, 3)  # a source of another version is worth more than the loop's waits


def best_common_source(available: Sequence[Collection[str]]) -> str | None:
    """The best of the sources that all configurations have, an entry each with its sources; None without one."""
    first = available[0] if available else ()
    common = [source for source in first if all(source in sources for sources in available)]
    return min(common, key=source_rank, default=None)


def best_direct_reading(readings: Sequence[BusyReading]) -> BusyReading | None:
    """Return the reading of the best source but the loop's waits; None where only these are known."""
    direct = [reading for reading in readings if reading.source != WAIT_SOURCE]
    return min(direct, key=lambda reading: source_rank(reading.source), default=None)


def disagreement(readings: Sequence[BusyReading]) -> tuple[BusyReading, BusyReading] | None:
    """The lowest and the highest reading where they lie over 10 points apart, else None.

    The loop's waits don't count against what a device itself reports: they are left out where there are other sources.
    """
    direct = [reading for reading in readings if reading.source != WAIT_SOURCE]
    if len(direct) < 2:
        return None
    low, *_, high = sorted(direct, key=lambda reading: reading.fraction)
    return (low, high) if high.fraction - low.fraction > _AGREE_WITHIN else None
