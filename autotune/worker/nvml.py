"""All that a worker asks of NVML: a handle for torch's device, and its readings.

Takes torch's devices; hands on Gpus and readings in this project's units. Nothing else in the
worker knows pynvml. Whatever NVML refuses (not supported, no permission, not found, lacking in this
driver or pynvml) is None, reading by reading; without a driver all are. What readings mean is
judged elsewhere (utilization.py, conditions.py). Source: NVML API reference; function names and
structures as in nvidia-ml-py's pynvml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import torch

GPM_LEAST_S = 0.1
"""Seconds between two samples of GPM, which refreshes them no sooner. Source: nvmlGpmMetricsGet."""

_SM_CLOCK = 1
_MEMORY_CLOCK = 2  # nvmlClockType_t
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU
_UTILIZATION_SAMPLES = 1  # NVML_GPU_UTILIZATION_SAMPLES
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2
_METRICS_VERSION = 1  # NVML_GPM_METRICS_GET_VERSION
_MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
_THROTTLED_NS = (74, 269, 270, 271)
"""NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, _SW_THERM_SLOWDOWN, _HW_THERM_SLOWDOWN,
_HW_POWER_BRAKE_SLOWDOWN: how long each has held the clock down, in ns. By number: an older pynvml
lacks the names."""

_REFUSED = object()
_OLDER_NAMES = {
    # Before driver 535.
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature",  # before CUDA 12.8
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of torch's as NVML knows it: a whole GPU, or an instance into which MIG has split one."""

    uuid: str
    """With its prefix: "GPU-..." or "MIG-..."."""
    handle: Any
    """NVML's handle for the device itself: for an instance it has the memory, and little else."""
    whole: Any
    """NVML's handle for the GPU that an instance is a part of: clocks and temperature are the whole
    GPU's."""
    instance: int | None = None
    """Number of the GPU instance; None for a whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """A sample of NVML's buffer."""

    time_us: int
    """When its period ended, by the clock of the CPU (time.time)."""
    busy_fraction: float
    """Share of the period in which at least one kernel ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeReading:
    """What a GPU is like at one moment; None, and no entry, where it has no reading."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    event_bits: int | None
    """What holds the clock where it is: nvmlClocksEventReasons."""
    throttled_ns: Mapping[int, int]
    """For how long the clock has been held down so far, by the number of NVML's field."""
    power_w: float | None
    """Mean of the last second on Ampere (but GA100) and newer. Source: nvmlDeviceGetPowerUsage."""
    energy_j: float | None
    """Since the driver was loaded."""
    at_s: float
    """Time of perf_counter at which the energy was read."""


def driver_version() -> str | None:
    """The version of NVIDIA's driver."""
    _does("nvmlInit")
    version: str | None = _ask("nvmlSystemGetDriverVersion")
    return version


def driver_cuda() -> int | None:
    """The newest major version of CUDA that the driver is for; None where its library libcuda is not found."""
    _does("nvmlInit")
    version: int | None = _ask("nvmlSystemGetCudaDriverVersion_v2")
    return None if version is None else version // 1000


def gpu_count() -> int:
    """NVIDIA's GPUs that this process may use, whether or not CUDA works."""
    _does("nvmlInit")
    return _ask("nvmlDeviceGetCount") or 0


def gpus_of(devices: Sequence[torch.device]) -> tuple[Gpu, ...]:
    """NVML's view of CUDA devices that are open; () where it does not know one of them."""
    known = [gpu for device in devices if (gpu := _gpu_of(device)) is not None]
    return tuple(known) if len(known) == len(devices) else ()


def _gpu_of(device: torch.device) -> Gpu | None:
    """By UUID, since CUDA_VISIBLE_DEVICES renumbers.

    torch gives it without a prefix; of a GPU that MIG has split it is that of the instance in use.
    Where it is the whole GPU's in spite of that, the instance is not known, and nothing is read:
    other jobs have a part in the whole GPU's power, memory and GPM. Source:
    torch/csrc/cuda/Module.cpp (uuid_to_string); CUDA driver API, cuDeviceGetUuid_v2.
    """
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    bare = str(uuid).removeprefix("GPU-").removeprefix("MIG-")
    instance = gpu_with_uuid(f"MIG-{bare}")
    if instance is not None:
        return instance
    gpu = gpu_with_uuid(f"GPU-{bare}")
    return None if gpu is None or _is_split(gpu) else gpu


def _is_split(gpu: Gpu) -> bool:
    """Return whether MIG divides a GPU into instances now; a GPU that has no MIG refuses to answer.

    Source: nvmlDeviceGetMigMode, which gives the current mode and the one after the next reset.
    """
    current, _ = _ask("nvmlDeviceGetMigMode", gpu.handle) or (0, 0)
    return current == _MIG_ENABLED


def gpu_with_uuid(uuid: str) -> Gpu | None:
    """NVML's view of the device with a UUID, "GPU-..." or "MIG-..."."""
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
    """NVML's view of the device that CUDA is about to number so, asked for before CUDA is initialised.

    CUDA_VISIBLE_DEVICES is taken apart by torch, which does the same to count devices before a
    fork; in a torch without that function the answer is None. CUDA may number unlike GPUs another
    way (CUDA_DEVICE_ORDER), and a GPU that MIG has split by its instances: compare UUIDs once the
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
    """CUDA takes the beginning of a UUID for the whole, where one GPU alone has it."""
    fitting = [uuid for index in range(gpu_count()) if (uuid := _uuid_at(index)).startswith(prefix)]
    return gpu_with_uuid(fitting[0]) if len(fitting) == 1 else None


def _uuid_at(index: int) -> str:
    """The UUID of the GPU that NVML numbers so; "", which none has, where there is no such GPU."""
    return _ask("nvmlDeviceGetUUID", _ask("nvmlDeviceGetHandleByIndex", index)) or ""


def memory_in_use(gpu: Gpu) -> int | None:
    """Bytes that processes hold, without what the driver keeps for itself: separate since driver 510."""
    memory = _ask("nvmlDeviceGetMemoryInfo", gpu.handle, _MEMORY_V2)
    return None if memory is None else int(memory.used)


def has_persistence(gpu: Gpu) -> bool | None:
    """Whether the driver keeps the GPU initialised while nobody uses it."""
    mode = _ask("nvmlDeviceGetPersistenceMode", gpu.whole)
    return None if mode is None else bool(mode)


def max_sm_clock_mhz(gpu: Gpu) -> int | None:
    """The highest clock that the multiprocessors can be set to."""
    clock: int | None = _ask("nvmlDeviceGetMaxClockInfo", gpu.whole, _SM_CLOCK)
    return clock


def read_edge(gpu: Gpu) -> EdgeReading:
    """Clocks, power and the like now; energy comes last, with its time.

    Power and energy are the whole GPU's: of an instance, beside which others draw it too, they are
    None.
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
    values = _ask("nvmlDeviceGetFieldValues", handle, _THROTTLED_NS)
    return {value.fieldId: value.value.ullVal for value in values or () if value.nvmlReturn == 0}


def _from_thousandths(value: int | None) -> float | None:
    return None if value is None else value / 1000


def utilization_since(gpu: Gpu, since_us: int) -> list[GpuSample] | None:
    """The samples of NVML's buffer that are younger than a moment, the oldest first.

    None where there is none; NVML has none of an instance, nor of the GPU that it is a part of. The
    buffer may change between the calls for its size and for its content, which looks the same.
    Source: nvmlDeviceGetSamples.
    """
    _, samples = _ask("nvmlDeviceGetSamples", gpu.handle, _UTILIZATION_SAMPLES, since_us) or (
        None,
        (),
    )
    young = [
        GpuSample(time_us=sample.timeStamp, busy_fraction=min(1.0, sample.sampleValue.uiVal / 100))
        for sample in samples
        if sample.timeStamp > since_us
    ]
    return sorted(young, key=lambda sample: sample.time_us) or None


def take_gpm(gpu: Gpu) -> Any:
    """GPM's counters now, to be freed by `free_gpm`; None where there are none, or not for this user."""
    support = _ask("nvmlGpmQueryDeviceSupport", gpu.whole)
    sample = (
        _ask("nvmlGpmSampleAlloc") if support is not None and support.isSupportedDevice else None
    )
    if gpu.instance is None:
        is_taken = _does("nvmlGpmSampleGet", gpu.whole, sample)
    else:
        is_taken = _does("nvmlGpmMigSampleGet", gpu.whole, gpu.instance, sample)
    if not is_taken:
        free_gpm(sample)
    return sample if is_taken else None


def free_gpm(sample: Any) -> None:
    """Free what `take_gpm` gave; None is passed over."""
    _does("nvmlGpmSampleFree", sample)


def gpm_shares(first: Any, second: Any, metrics: Sequence[int]) -> dict[int, float]:
    """Metrics in per cent between two of GPM's samples, as shares; those that it does not give are left out."""
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
    """The answer of one of pynvml's functions; None where it refuses. Of a function without an answer: `_does`."""
    return None if (answer := _call(name, *arguments)) is _REFUSED else answer


def _does(name: str, *arguments: Any) -> bool:
    """Whether one of pynvml's functions succeeded."""
    return _call(name, *arguments) is not _REFUSED


def _call(name: str, *arguments: Any) -> Any:
    """The answer, if need be by an older name; _REFUSED where NVML refuses, pynvml lacks it or an argument is None."""
    import pynvml

    function = getattr(pynvml, name, None)
    if function is not None and None not in arguments:
        with suppress(pynvml.NVMLError):
            return function(*arguments)
    return _call(_OLDER_NAMES[name], *arguments) if name in _OLDER_NAMES else _REFUSED
