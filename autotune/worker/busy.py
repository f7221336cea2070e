"""How busy the device was during a window, read passively: NVML's own samples on NVIDIA, the loop's waits elsewhere.

NVML's utilization is the share of its sample period in which at least one kernel ran: it says busy, not full.
Source: NVML API reference, nvmlDeviceGetSamples and nvmlUtilization_t.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from autotune.worker.device import Device

__all__ = ["NVML_SOURCE", "WAIT_SOURCE", "BusyProbe"]

NVML_SOURCE = "NVML utilization"
WAIT_SOURCE = "1 - data wait"


class BusyProbe:
    """Reads NVML's buffer of utilization samples between `start` and `stop`."""

    def __init__(self, device: Device) -> None:
        self._handle = _nvml_handle(device) if device.kind == "cuda" else None
        self._since_us = 0

    def start(self) -> None:
        """Forget what was sampled before now."""
        if self._handle is not None:
            self._since_us = max((time_us for time_us, _ in _samples(self._handle, 0)), default=0)

    def stop(self, data_wait_fraction: float) -> tuple[float, str]:
        """Busy fraction since `start`, and its source; the loop's waits serve where NVML has no sample."""
        if self._handle is not None:
            values = [value for _, value in _samples(self._handle, self._since_us)]
            if values:
                return fmean(values) / 100, NVML_SOURCE
        return 1.0 - data_wait_fraction, WAIT_SOURCE


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
