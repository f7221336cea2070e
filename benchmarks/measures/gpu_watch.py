"""A look at the GPU from outside: NVML's answers, taken down by a thread while trials run elsewhere.

It shares no code with the product's own probes, and makes no CUDA context: which device torch calls cuda:0, whatever
CUDA_VISIBLE_DEVICES says, is asked of the driver by a short process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from time import monotonic
from types import TracebackType
from typing import Any, Self

import pynvml

__all__ = ["GpuSample", "GpuWatch", "cuda_uuid", "nvml_handle"]

_EVERY_S = 0.02
_ANSWER_WITHIN_S = 30.0
_ASK = """
import ctypes, sys, uuid
driver = ctypes.CDLL("libcuda.so.1")
device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
ask = driver.cuDeviceGetUuid_v2 if hasattr(driver, "cuDeviceGetUuid_v2") else driver.cuDeviceGetUuid
calls = [
    ("cuInit", lambda: driver.cuInit(0)),
    ("cuDeviceGet", lambda: driver.cuDeviceGet(ctypes.byref(device), int(sys.argv[1]))),
    ("cuDeviceGetUuid", lambda: ask(found, device)),
]
for name, call in calls:
    code = call()
    if code:
        sys.exit(f"{name} answered {code}")
print(uuid.UUID(bytes=bytes(found)))
"""
"""Source: CUDA driver API, device management; the second form answers for a MIG instance with the instance's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What NVML said at a moment of time.monotonic; None where it can't tell."""

    at_s: float
    used_bytes: int
    busy_percent: int | None
    """Share of NVML's sample period with a kernel running."""
    energy_j: float | None
    """Drawn since the driver was loaded."""


class GpuWatch:
    """Samples the device that torch calls cuda:0 while entered. Where there is none it sees nothing, and says why.

    Args:
        uuid: the device, without NVML's prefix; None: the one that CUDA counts first.
    """

    def __init__(self, uuid: str | None = None) -> None:
        self.samples: list[GpuSample] = []
        self.idle_bytes: int | None = None
        """Memory in use when the watch began."""
        self.why_blind: str | None = None
        self._uuid = uuid
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            handle = nvml_handle(self._uuid or cuda_uuid())
            self.idle_bytes = _used_bytes(handle)
        except (pynvml.NVMLError, OSError) as error:
            self.why_blind = str(error)
            return self
        self._thread = threading.Thread(target=self._watch, args=(handle,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            pynvml.nvmlShutdown()

    def peak_bytes(self, start_s: float, end_s: float) -> int | None:
        """Most memory in use between two moments, beyond what was in use before; None where nothing was seen."""
        used = [one.used_bytes for one in self._between(start_s, end_s)]
        return max(used) - self.idle_bytes if used and self.idle_bytes is not None else None

    def busy_fraction(self, start_s: float, end_s: float) -> float | None:
        """Mean utilization between two moments."""
        known = [
            one.busy_percent
            for one in self._between(start_s, end_s)
            if one.busy_percent is not None
        ]
        return fmean(known) / 100 if known else None

    def power_w(self, start_s: float, end_s: float) -> float | None:
        """Mean power between two moments: energy over time."""
        known = [
            (one.at_s, one.energy_j)
            for one in self._between(start_s, end_s)
            if one.energy_j is not None
        ]
        if len(known) < 2:
            return None
        (first_s, first_j), (last_s, last_j) = known[0], known[-1]
        return (last_j - first_j) / (last_s - first_s)

    def _between(self, start_s: float, end_s: float) -> list[GpuSample]:
        return [one for one in self.samples if start_s <= one.at_s <= end_s]

    def _watch(self, handle: Any) -> None:
        while not self._is_over.wait(_EVERY_S):
            with suppress(pynvml.NVMLError):
                used, energy_mj = (
                    _used_bytes(handle),
                    _known(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle),
                )
                rates = _known(pynvml.nvmlDeviceGetUtilizationRates, handle)
                self.samples.append(
                    GpuSample(
                        at_s=monotonic(),
                        used_bytes=used,
                        busy_percent=None if rates is None else int(rates.gpu),
                        energy_j=None if energy_mj is None else energy_mj / 1e3,
                    )
                )


def cuda_uuid(index: int = 0) -> str:
    """The UUID of a device by CUDA's number, as CUDA_VISIBLE_DEVICES leaves it; without NVML's prefix.

    Raises:
        OSError: there is no driver, or no such device, or no answer within 30 s.
    """
    command = [sys.executable, "-c", _ASK, str(index)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"CUDA's driver does not answer within {_ANSWER_WITHIN_S:.0f} s") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"CUDA's driver does not tell which device cuda:{index} is: {said[-1]}")
    return done.stdout.strip()


def nvml_handle(uuid: str) -> Any:
    """NVML's handle for a device, or for an instance of MIG; NVML is initialised, to be shut down by the caller.

    Raises:
        pynvml.NVMLError: NVML is not there, or does not know the device.
    """
    pynvml.nvmlInit()
    try:
        with suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        raise


def _used_bytes(handle: Any) -> int:
    """Memory in use by processes; what the driver keeps for itself is left out where NVML tells it apart."""
    with suppress(pynvml.NVMLError, AttributeError, TypeError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _known(ask: Callable[[Any], Any], handle: Any) -> Any:
    with suppress(pynvml.NVMLError):
        return ask(handle)
    return None
