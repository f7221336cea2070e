"""How busy and how full the device was during a window, read passively: NVIDIA's own counters, else the loop's waits.

NVML's utilization is the share of its sample period in which at least one kernel ran: it says busy, not full. GPM, on
Hopper and newer, says how full: the shares of multiprocessors, tensor pipes and memory bandwidth between two samples.
Source: NVML API reference, nvmlDeviceGetSamples, nvmlUtilization_t and nvmlGpmMetricsGet.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from autotune.core.busy import NVML_SOURCE, WAIT_SOURCE, BusyReading, Fullness
from autotune.worker.device import Device

__all__ = ["BusyProbe", "Busyness"]

_GPM_LEAST_S = 0.1  # between two samples; NVML API reference, nvmlGpmMetricsGet
_METRICS = {
    "sm_fraction": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_fraction": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_fraction": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
"""Fullness's fields, and pynvml's names of the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busyness:
    """What was read of a window."""

    reading: BusyReading
    """NVML's where it has samples of this window, else the loop's waits; core.objective.evaluate compares no others."""
    readings: tuple[BusyReading, ...]
    """By all that could tell."""
    fullness: Fullness | None


class BusyProbe:
    """Reads NVML's buffer of utilization samples, and GPM's counters, between `start` and `stop`."""

    def __init__(self, device: Device) -> None:
        self._handle = _nvml_handle(device) if device.kind == "cuda" else None
        self._since_us = 0
        self._full = None if self._handle is None else _FullnessProbe(self._handle)

    def start(self) -> None:
        """Forget what was sampled before now."""
        if self._handle is not None:
            self._since_us = max((time_us for time_us, _ in _samples(self._handle, 0)), default=0)
        if self._full is not None:
            self._full.start()

    def stop(self, data_wait_fraction: float) -> Busyness:
        """How busy the device was since `start`; the loop's waits serve where NVML has no sample."""
        fullness = None if self._full is None else self._full.stop()
        waits = BusyReading(fraction=1.0 - data_wait_fraction, source=WAIT_SOURCE)
        if self._handle is not None:
            values = [value for _, value in _samples(self._handle, self._since_us)]
            if values:
                sampled = BusyReading(fraction=min(1.0, fmean(values) / 100), source=NVML_SOURCE)
                return Busyness(reading=sampled, readings=(sampled, waits), fullness=fullness)
        return Busyness(reading=waits, readings=(waits,), fullness=fullness)


class _FullnessProbe:
    """Two GPM samples, and the metrics between them. Whatever NVML refuses makes the answer None."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._first: Any = None
        self._begun = 0.0

    def start(self) -> None:
        """Take the first sample."""
        self._first, self._begun = _gpm_sample(self._handle), perf_counter()

    def stop(self) -> Fullness | None:
        """Take the second sample and compare; frees both."""
        if self._first is None:
            return None
        second = _gpm_sample(self._handle) if perf_counter() - self._begun >= _GPM_LEAST_S else None
        try:
            return None if second is None else _fullness(self._first, second)
        finally:
            _free(self._first)
            _free(second)
            self._first = None


def _gpm_sample(handle: Any) -> Any:
    """GPM's counters now; None where the device or its driver has none, or does not give them to this user."""
    import pynvml

    sample = None
    with suppress(pynvml.NVMLError, AttributeError):  # AttributeError: a pynvml from before GPM
        if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            sample = pynvml.nvmlGpmSampleAlloc()
            pynvml.nvmlGpmSampleGet(handle, sample)
            return sample
    _free(sample)
    return None


def _free(sample: Any) -> None:
    import pynvml

    if sample is not None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlGpmSampleFree(sample)


def _fullness(first: Any, second: Any) -> Fullness | None:
    import pynvml

    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
    asked.sample1, asked.sample2 = first, second
    for index, name in enumerate(_METRICS.values()):
        asked.metrics[index].metricId = getattr(pynvml, name)
    try:
        pynvml.nvmlGpmMetricsGet(asked)
    except pynvml.NVMLError:
        return None
    values = {field: _share(asked.metrics[index]) for index, field in enumerate(_METRICS)}
    return Fullness(**values) if any(value is not None for value in values.values()) else None


def _share(metric: Any) -> float | None:
    """A metric in percent as a share; None where NVML says that it has none."""
    if metric.nvmlReturn != 0 or not isfinite(metric.value):
        return None
    return min(1.0, max(0.0, float(metric.value) / 100))


def _nvml_handle(device: Device) -> Any:
    """NVML's handle for torch's device, by UUID, since CUDA_VISIBLE_DEVICES renumbers; None where NVML has none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device.torch_device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except (pynvml.NVMLError, AttributeError):
        return None  # no driver library, MIG (which has no utilization), or a torch that does not tell the UUID
    return handle


def _samples(handle: Any, since_us: int) -> list[tuple[int, int]]:
    """(time in microseconds, percent) of each sample later than `since_us`."""
    import pynvml

    try:
        _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, since_us)
    except pynvml.NVMLError:
        return []  # no sample since then, or a buffer that changed between asking for its size and for its content
    return [(int(sample.timeStamp), int(sample.sampleValue.uiVal)) for sample in samples if sample.timeStamp > since_us]
