"""NVML's raw answers, of what the product asks it and of what a test may want to see: once, and while a loop trains.

One line a call: when, what was asked, with which arguments, and what came back, or the error that NVML gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any

import pynvml

from benchmarks.measures.gpu_scale import Scale, case_of, plain
from benchmarks.measures.gpu_watch import cuda_uuid, nvml_handle
from benchmarks.measures.part_guard import Figures

__all__ = ["answers_while_training", "describe_gpu"]

_EVERY_S = 0.2
_GPM_METRICS = (1, 2, 3, 5, 10)  # of NVML's numbers: graphics, SM, occupancy, tensor, DRAM
_ONCE: Mapping[str, Sequence[Any]] = {
    "nvmlDeviceGetName": (),
    "nvmlDeviceGetUUID": (),
    "nvmlDeviceGetPersistenceMode": (),
    "nvmlDeviceGetMigMode": (),
    "nvmlDeviceGetComputeMode": (),
    "nvmlDeviceGetMaxClockInfo": (0, 1, 2),
    "nvmlDeviceGetEnforcedPowerLimit": (),
    "nvmlDeviceGetCudaComputeCapability": (),
    "nvmlDeviceGetSupportedClocksEventReasons": (),
    "nvmlGpmQueryDeviceSupport": (),
}
"""Asked once; each for every one of these arguments, where there are any: clocks of graphics, SM and memory."""
_OFTEN: Mapping[str, Sequence[Any]] = {
    "nvmlDeviceGetUtilizationRates": (),
    "nvmlDeviceGetMemoryInfo": (),
    "nvmlDeviceGetComputeRunningProcesses": (),
    "nvmlDeviceGetClockInfo": (1, 2),
    "nvmlDeviceGetTemperature": (0,),
    "nvmlDeviceGetPowerUsage": (),
    "nvmlDeviceGetTotalEnergyConsumption": (),
    "nvmlDeviceGetCurrentClocksEventReasons": (),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (),
    "nvmlDeviceGetViolationStatus": (0, 1),
}
"""Asked again and again; violations by power (0) and by heat (1)."""


def describe_gpu() -> Figures:
    """What NVML tells of the device itself; where there is none, why."""
    try:
        handle = nvml_handle(cuda_uuid())
    except (pynvml.NVMLError, OSError) as error:
        return {"nvml": str(error)}
    try:
        versions = {
            name: _answer(name)
            for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
        }
        return {
            **versions,
            **{_key(name, given): _answer(name, handle, *given) for name, given in _calls(_ONCE)},
        }
    finally:
        pynvml.nvmlShutdown()


def answers_while_training(scale: Scale) -> list[Figures]:
    """What NVML answers while a plain loop trains, its start included.

    Raises:
        pynvml.NVMLError, OSError: there is no NVML, or no device.
    """
    handle = nvml_handle(cuda_uuid())
    try:
        lines = [_line(name, handle, *given) for name, given in _calls(_ONCE)]
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(plain, "resnet50", scale, case_of("resnet50", scale).settings)
            since_us, sample = 0, _gpm_sample(handle)
            while not training.done():
                lines += [_line(name, handle, *given) for name, given in _calls(_OFTEN)]
                lines.append(
                    _line(
                        "nvmlDeviceGetSamples",
                        handle,
                        pynvml.NVML_GPU_UTILIZATION_SAMPLES,
                        since_us,
                    )
                )
                since_us = max(_times_us(lines[-1]), default=since_us)
                sleep(_EVERY_S)
                before, sample = sample, _gpm_sample(handle)
                lines.append(
                    {
                        "at_s": monotonic(),
                        "call": "nvmlGpmMetricsGet",
                        **_gpm_metrics(before, sample),
                    }
                )
                _free(before)
            _free(sample)
            training.result()
    finally:
        pynvml.nvmlShutdown()
    return lines


def _calls(table: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, arguments in table.items():
        if not arguments:
            yield name, ()
        for given in arguments:
            yield name, (given,)


def _key(name: str, given: Sequence[Any]) -> str:
    return f"{name}({', '.join(map(str, given))})"


def _line(name: str, handle: Any, *given: Any) -> Figures:
    told = _answer(name, handle, *given)
    return {"at_s": monotonic(), "call": name, "arguments": list(given), **told}


def _answer(name: str, *given: Any) -> Figures:
    """What a call answers, or NVML's error by its text."""
    try:
        return {"answer": _plain_value(getattr(pynvml, name)(*given))}
    except AttributeError:
        return {"error": "pynvml has no such function"}
    except pynvml.NVMLError as error:
        return {"error": str(error), "code": error.value}


def _plain_value(value: Any) -> Any:
    """An answer as JSON holds it: structures and unions by their fields."""
    if isinstance(value, list | tuple):
        return [_plain_value(one) for one in value]
    if fields := getattr(value, "_fields_", None):
        names = [field[0] for field in fields]
        return {name: _plain_value(getattr(value, name)) for name in names if name in dir(value)}
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _times_us(line: Figures) -> list[int]:
    return [int(one["timeStamp"]) for one in line["answer"][1]] if "answer" in line else []


def _gpm_sample(handle: Any) -> Any:
    try:
        sample = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, sample)
    except (pynvml.NVMLError, AttributeError) as error:
        return error
    return sample


def _free(sample: Any) -> None:
    if not isinstance(sample, Exception):
        pynvml.nvmlGpmSampleFree(sample)


def _gpm_metrics(first: Any, second: Any) -> Figures:
    """Each metric's value and return code between two samples, or why there is none."""
    refused = next((one for one in (first, second) if isinstance(one, Exception)), None)
    if refused is not None:
        return {"error": str(refused)}
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM_METRICS)
    asked.sample1, asked.sample2 = first, second
    for index, metric in enumerate(_GPM_METRICS):
        asked.metrics[index].metricId = metric
    try:
        pynvml.nvmlGpmMetricsGet(asked)
    except pynvml.NVMLError as error:
        return {"error": str(error), "code": error.value}
    told = asked.metrics[: len(_GPM_METRICS)]
    return {
        "answer": [
            {"metricId": one.metricId, "nvmlReturn": one.nvmlReturn, "value": one.value}
            for one in told
        ]
    }
