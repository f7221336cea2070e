"""Ask NVML for a handle of torch's device, and for its readings.

Comes in: torch's devices. Goes out: `Gpu`s and readings in this project's units. No other module of
the worker knows pynvml. A reading that NVML refuses (not supported, no permission, not found,
unknown to this driver or pynvml) is None; without a driver all are. Their meaning is judged in
conditions.py. Source: NVML API reference; function names and structures as in nvidia-ml-py's
pynvml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import torch

from autotune.records.measurement import ThrottleReason

GPM_LEAST_S = 0.1
"""Seconds between two samples of GPM, which updates them no sooner. Source: nvmlGpmMetricsGet."""

_SM_CLOCK = 1
_MEMORY_CLOCK = 2  # nvmlClockType_t
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU
_UTILIZATION_SAMPLES = 1  # NVML_GPU_UTILIZATION_SAMPLES
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2
_METRICS_VERSION = 1  # NVML_GPM_METRICS_GET_VERSION
_MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
THROTTLE_COUNTERS: dict[int, ThrottleReason] = {
    74: "power_cap",
    269: "thermal",
    270: "thermal",
    271: "power_brake",
}
"""Reason by the number of the driver's counter of nanoseconds for which it has lowered the clock:
NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, _SW_THERM_SLOWDOWN, _HW_THERM_SLOWDOWN and
_HW_POWER_BRAKE_SLOWDOWN. Numbers, since an older pynvml lacks the names."""

_REFUSED = object()
_OLDER_NAMES = {
    # before driver 535
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature",  # before CUDA 12.8
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of torch's as NVML knows it: a whole GPU, or a MIG instance."""

    uuid: str
    """UUID with its prefix: "GPU-..." or "MIG-..."."""
    handle: Any
    """NVML's handle of the device itself; an instance's gives its memory, and little else."""
    whole: Any
    """NVML's handle of the GPU that an instance is part of, which has the clocks and
    temperature."""
    instance: int | None = None
    """Number of the GPU instance; None for a whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """A sample of NVML's buffer."""

    time_us: int
    """End of its period, by the CPU's clock (time.time)."""
    busy_fraction: float
    """Share of the period in which at least one kernel ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeReading:
    """State of a GPU at one moment; None, or no entry, for readings that it does not have."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    event_bits: int | None
    """Reasons for the present clock: nvmlClocksEventReasons."""
    throttled_ns: Mapping[int, int]
    """Nanoseconds for which the clock was lowered so far, by the number of NVML's field."""
    power_w: float | None
    """Mean of the last second on Ampere (except GA100) and newer. Source:
    nvmlDeviceGetPowerUsage."""
    energy_j: float | None
    """Energy since the driver was loaded."""
    at_s: float
    """Time of perf_counter when the energy was read."""


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver."""
    _does("nvmlInit")
    version: str | None = _ask("nvmlSystemGetDriverVersion")
    return version


def driver_cuda() -> int | None:
    """Return the newest major version of CUDA that the driver supports; None if libcuda is not found."""
    _does("nvmlInit")
    version: int | None = _ask("nvmlSystemGetCudaDriverVersion_v2")
    if version is None:
        return None
    return version // 1000


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that this process may use, whether or not CUDA works."""
    _does("nvmlInit")
    return _ask("nvmlDeviceGetCount") or 0


def gpus_of(devices: Sequence[torch.device]) -> tuple[Gpu, ...]:
    """Return NVML's view of open CUDA devices; () if it does not know one of them."""
    found = list[Gpu]()
    for device in devices:
        gpu = _gpu_of(device)
        if gpu is None:
            return ()
        found.append(gpu)
    return tuple(found)


def _gpu_of(device: torch.device) -> Gpu | None:
    """Return NVML's view of an open CUDA device, by UUID, since CUDA_VISIBLE_DEVICES renumbers.

    torch gives the UUID without a prefix; for a GPU split by MIG it is that of the instance in use.
    If it is the whole GPU's nevertheless, the instance is unknown and nothing is read: other jobs
    share the whole GPU's power, memory and GPM. Source: torch/csrc/cuda/Module.cpp
    (uuid_to_string); CUDA driver API, cuDeviceGetUuid_v2.
    """
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    bare = str(uuid).removeprefix("GPU-").removeprefix("MIG-")
    instance = gpu_with_uuid(f"MIG-{bare}")
    if instance is not None:
        return instance
    gpu = gpu_with_uuid(f"GPU-{bare}")
    if gpu is None or _is_split(gpu):
        return None
    return gpu


def _is_split(gpu: Gpu) -> bool:
    """Return whether MIG divides a GPU into instances now; NVML refuses for a GPU without MIG.

    Source: nvmlDeviceGetMigMode, which gives the current mode and the one after the next reset.
    """
    current, _ = _ask("nvmlDeviceGetMigMode", gpu.handle) or (0, 0)
    return current == _MIG_ENABLED


def gpu_with_uuid(uuid: str) -> Gpu | None:
    """Return NVML's view of the device with a UUID, "GPU-..." or "MIG-..."; None if there is none."""
    _does("nvmlInit")
    handle = _ask("nvmlDeviceGetHandleByUUID", uuid)
    if handle is None:
        return None
    whole = handle
    instance = None
    if uuid.startswith("MIG-"):
        whole = _ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        instance = _ask("nvmlDeviceGetGpuInstanceId", handle)
    return Gpu(uuid=uuid, handle=handle, whole=whole, instance=instance)


def visible_gpu(index: int) -> Gpu | None:
    """Return NVML's view of the device that CUDA will give a number, before CUDA is initialized.

    CUDA_VISIBLE_DEVICES is parsed by torch, which does so to count devices before a fork; the
    answer is None if torch lacks that function. CUDA may number different GPU models in another
    order (CUDA_DEVICE_ORDER), and a GPU split by MIG by its instances: compare UUIDs once the
    device is open. Source: torch/cuda/__init__.py, _parse_visible_devices and _device_count_nvml.
    """
    visible: Sequence[int | str] = getattr(torch.cuda, "_parse_visible_devices", tuple)()
    if index >= len(visible):
        return None
    named = visible[index]
    if isinstance(named, str):
        return gpu_with_uuid(named) or _gpu_that_begins_with(named)
    _does("nvmlInit")
    return gpu_with_uuid(_uuid_at(named))


def _gpu_that_begins_with(prefix: str) -> Gpu | None:
    """Return the only GPU whose UUID starts with a prefix, as CUDA does; None if several do."""
    uuids = [_uuid_at(index) for index in range(gpu_count())]
    fitting = [uuid for uuid in uuids if uuid.startswith(prefix)]
    if len(fitting) != 1:
        return None
    return gpu_with_uuid(fitting[0])


def _uuid_at(index: int) -> str:
    """Return the UUID of the GPU with NVML's number; "" if there is none."""
    return _ask("nvmlDeviceGetUUID", _ask("nvmlDeviceGetHandleByIndex", index)) or ""


def memory_in_use(gpu: Gpu) -> int | None:
    """Return the bytes that processes hold, without the driver's own (separate since driver 510)."""
    memory = _ask("nvmlDeviceGetMemoryInfo", gpu.handle, _MEMORY_V2)
    if memory is None:
        return None
    return int(memory.used)


def has_persistence(gpu: Gpu) -> bool | None:
    """Return whether the driver keeps the GPU initialized while nobody uses it."""
    mode = _ask("nvmlDeviceGetPersistenceMode", gpu.whole)
    if mode is None:
        return None
    return bool(mode)


def max_sm_clock_mhz(gpu: Gpu) -> int | None:
    """Return the highest clock that the multiprocessors can be set to."""
    clock: int | None = _ask("nvmlDeviceGetMaxClockInfo", gpu.whole, _SM_CLOCK)
    return clock


def read_edge(gpu: Gpu) -> EdgeReading:
    """Return clocks, power and the like now; the energy is read last, with its time.

    Power and energy are the whole GPU's: None for an instance, which shares them with others.
    """
    whole = gpu.whole
    alone = gpu.whole if gpu.instance is None else None
    return EdgeReading(
        sm_clock_mhz=_ask("nvmlDeviceGetClockInfo", whole, _SM_CLOCK),
        memory_clock_mhz=_ask("nvmlDeviceGetClockInfo", whole, _MEMORY_CLOCK),
        temperature_c=_ask("nvmlDeviceGetTemperatureV", whole, _GPU_SENSOR),
        event_bits=_ask("nvmlDeviceGetCurrentClocksEventReasons", whole),
        throttled_ns=_throttled_ns(whole),
        power_w=_from_thousandths(_ask("nvmlDeviceGetPowerUsage", alone)),
        energy_j=_from_thousandths(_ask("nvmlDeviceGetTotalEnergyConsumption", alone)),
        at_s=perf_counter(),
    )


def _throttled_ns(handle: Any) -> dict[int, int]:
    values = _ask("nvmlDeviceGetFieldValues", handle, tuple(THROTTLE_COUNTERS))
    return {value.fieldId: value.value.ullVal for value in values or () if value.nvmlReturn == 0}


def _from_thousandths(value: int | None) -> float | None:
    if value is None:
        return None
    return value / 1000


def utilization_since(gpu: Gpu, since_us: int) -> list[GpuSample] | None:
    """Return the samples of NVML's buffer that are younger than a time, the oldest first.

    NVML has none for an instance, nor for the GPU that it is part of. The buffer may change between
    the calls for its size and its content, which looks like an empty one. Source:
    nvmlDeviceGetSamples.

    Args:
        gpu: The GPU.
        since_us: Time by the CPU's clock (time.time).

    Returns:
        None if there are no such samples.
    """
    answer = _ask("nvmlDeviceGetSamples", gpu.handle, _UTILIZATION_SAMPLES, since_us)
    if answer is None:
        return None
    young = [
        GpuSample(time_us=sample.timeStamp, busy_fraction=min(1.0, sample.sampleValue.uiVal / 100))
        for sample in answer[1]
        if sample.timeStamp > since_us
    ]
    return sorted(young, key=lambda sample: sample.time_us) or None


def take_gpm(gpu: Gpu) -> Any:
    """Return GPM's counters now, to be freed by `free_gpm`; None if unavailable, or not for this user."""
    support = _ask("nvmlGpmQueryDeviceSupport", gpu.whole)
    sample = None
    if support is not None and support.isSupportedDevice:
        sample = _ask("nvmlGpmSampleAlloc")
    if gpu.instance is None:
        is_taken = _does("nvmlGpmSampleGet", gpu.whole, sample)
    else:
        is_taken = _does("nvmlGpmMigSampleGet", gpu.whole, gpu.instance, sample)
    if not is_taken:
        free_gpm(sample)
        return None
    return sample


def free_gpm(sample: Any) -> None:
    """Free a sample of `take_gpm`; None is ignored."""
    _does("nvmlGpmSampleFree", sample)


def gpm_shares(first: Any, second: Any, metrics: Sequence[int]) -> dict[int, float]:
    """Return metrics between two of GPM's samples, converted from per cent to shares.

    Args:
        first: The earlier sample.
        second: The later sample.
        metrics: Numbers of the metrics.

    Returns:
        Shares from 0 to 1 by metric; metrics that GPM does not give are missing.
    """
    if first is None or second is None:
        return {}
    import pynvml

    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = _METRICS_VERSION
    asked.numMetrics = len(metrics)
    asked.sample1 = first
    asked.sample2 = second
    for index, metric in enumerate(metrics):
        asked.metrics[index].metricId = metric
    if not _does("nvmlGpmMetricsGet", asked):
        return {}
    return {
        answer.metricId: min(1.0, max(0.0, answer.value / 100))
        for answer in asked.metrics[: len(metrics)]
        if answer.nvmlReturn == 0 and isfinite(answer.value)
    }


def _ask(name: str, *arguments: Any) -> Any:
    """Return the result of a pynvml function, None if it refuses; for functions without a result: `_does`."""
    answer = _call(name, *arguments)
    return None if answer is _REFUSED else answer


def _does(name: str, *arguments: Any) -> bool:
    """Return whether a pynvml function succeeded."""
    return _call(name, *arguments) is not _REFUSED


def _call(name: str, *arguments: Any) -> Any:
    """Call a pynvml function, by its older name if necessary.

    Returns:
        Its result; _REFUSED if NVML refuses, pynvml lacks the function, or an argument is None.
    """
    import pynvml

    function = getattr(pynvml, name, None)
    if function is not None and None not in arguments:
        with suppress(pynvml.NVMLError):
            return function(*arguments)
    if name in _OLDER_NAMES:
        return _call(_OLDER_NAMES[name], *arguments)
    return _REFUSED
