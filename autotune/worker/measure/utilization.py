"""How busy and how full the device was during a window, read passively: GPM, NVML's samples, else the loop's waits.

GPM, on Hopper and newer, covers the time between two samples, which are taken at the window's edges: in what share of
it "any compute/graphics app was active on the GPU", and how full that was (multiprocessors, tensor pipes, memory
bandwidth). NVML's utilization, on all others, is the share of its sample period, "between 1 second and 1/6 second
depending on the product", in which at least one kernel ran: it shows how busy, not how full.
Source: NVML API reference, nvmlGpmMetricsGet, nvmlGpmMetricId_t, nvmlDeviceGetSamples and nvmlUtilization_t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from time import perf_counter

from autotune.records.utilization import GPM_SOURCE, NVML_SOURCE, WAIT_SOURCE, BusyReading, Fullness
from autotune.worker.measure.nvml import GPM_LEAST_S, Gpu, GpuSample, free_gpm, gpm_shares, take_gpm, utilization_since

__all__ = ["BusyProbe", "Busyness", "covered_busy_fraction"]

_LEAST_COVERED = 0.5
"""Share of a stretch that whole samples must cover to speak for it: our own convention. What they leave out is the same
steady loop. Three samples in 0.6 s do: two of their periods lie within it. An H200's period is 0.2 s: 168 samples lie
197 to 204 ms apart (benchmarks/results/gpu-nvidia-h200, nvml)."""
_BUSY = 1  # NVML_GPM_METRIC_GRAPHICS_UTIL
_METRICS = {"sm_fraction": 2, "sm_occupancy": 3, "tensor_fraction": 5, "dram_fraction": 10}
"""Fullness's fields, and NVML's numbers of the metrics: SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL, DRAM_BW_UTIL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busyness:
    """What was read of a window."""

    reading: BusyReading
    """The best of them: GPM's, else NVML's where its samples cover the window, else the loop's waits."""
    readings: tuple[BusyReading, ...]
    """By every source that could tell, the best first."""
    fullness: Fullness | None


class BusyProbe:
    """Reads GPM's counters, and NVML's buffer of utilization samples, between `start` and `stop`.

    Of several devices that one process drives, each source gives the least busy one's reading, where it has all.
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
        least_busy = min((shares for shares, _ in ended), key=lambda shares: shares.get(_BUSY, 1.0), default={})
        return Busyness(reading=readings[0], readings=readings, fullness=_fullness(least_busy))


class _Probe:
    """One device: remembers NVML's last sample, then takes GPM's first."""

    def __init__(self, gpu: Gpu) -> None:
        samples = utilization_since(gpu, 0)
        self._gpu, self._since_us = gpu, None if samples is None else samples[-1].time_us
        self._first, self._begun = take_gpm(gpu), perf_counter()

    def stop(self) -> tuple[Mapping[int, float], float | None]:
        """GPM's metrics since then, by number, and the mean of NVML's utilization samples; frees GPM's samples."""
        elapsed_s = perf_counter() - self._begun
        first, self._first = self._first, None
        second = take_gpm(self._gpu) if first is not None and elapsed_s >= GPM_LEAST_S else None
        shares = gpm_shares(first, second, (_BUSY, *_METRICS.values()))
        free_gpm(first)
        free_gpm(second)
        samples = None if self._since_us is None else utilization_since(self._gpu, self._since_us)
        return shares, covered_busy_fraction(samples or (), elapsed_s)


def covered_busy_fraction(samples: Sequence[GpuSample], stretch_s: float) -> float | None:
    """The busy share of a stretch, from the samples that came within it; None where they cover too little of it.

    A sample covers the time since the one before it: the first one's began before the stretch, and is left out.
    """
    spans = [(later.time_us - earlier.time_us, later.busy_fraction) for earlier, later in pairwise(samples)]
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
