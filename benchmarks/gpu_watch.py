"""A look at the GPU from outside: NVML's memory and utilization, sampled by a thread while trials run elsewhere.

It shares no code with the product's own probes, and makes no CUDA context.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from time import monotonic
from types import TracebackType
from typing import Any, Self

import pynvml

__all__ = ["GpuSample", "GpuWatch"]

_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What NVML said at a moment of time.monotonic."""

    at_s: float
    used_bytes: int
    busy_percent: int | None
    """Share of NVML's sample period with a kernel running; None where it can't tell (MIG)."""


class GpuWatch:
    """Samples the first GPU that CUDA would use, while entered. Without NVML it sees nothing, and says why."""

    def __init__(self, index: int = 0) -> None:
        self.samples: list[GpuSample] = []
        self.idle_bytes: int | None = None
        """Memory in use when the watch began."""
        self.why_blind: str | None = None
        self._index = index
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            self.idle_bytes = _used_bytes(handle)
        except pynvml.NVMLError as error:
            self.why_blind = f"NVML: {error}"
            return self
        self._thread = threading.Thread(target=self._watch, args=(handle,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            pynvml.nvmlShutdown()

    def peak_bytes(self, start_s: float, end_s: float) -> int | None:
        """Most memory in use between two moments, beyond what was in use before; None where nothing was seen."""
        used = [sample.used_bytes for sample in self.samples if start_s <= sample.at_s <= end_s]
        return max(used) - self.idle_bytes if used and self.idle_bytes is not None else None

    def busy_fraction(self, start_s: float, end_s: float) -> float | None:
        """Mean utilization between two moments."""
        busy = [one.busy_percent for one in self.samples if start_s <= one.at_s <= end_s]
        known = [percent for percent in busy if percent is not None]
        return fmean(known) / 100 if known else None

    def _watch(self, handle: Any) -> None:
        while not self._is_over.wait(_EVERY_S):
            with suppress(pynvml.NVMLError):
                used = _used_bytes(handle)
                self.samples.append(GpuSample(at_s=monotonic(), used_bytes=used, busy_percent=_busy_percent(handle)))


def _used_bytes(handle: Any) -> int:
    """Memory in use by processes; what the driver keeps for itself is left out where NVML tells it apart."""
    with suppress(pynvml.NVMLError, AttributeError, TypeError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _busy_percent(handle: Any) -> int | None:
    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return None
