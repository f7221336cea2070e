"""NVIDIA's driver, kept from letting go of the devices between trials.

Without persistence mode the driver initialises a GPU for the first process that opens it, and lets go of it after the
last: one to three seconds a trial, and state such as clocks that were set is lost. The parent therefore holds handles
of NVML's while trials come and go: they initialise the GPU as a CUDA context would, but take no memory of it.
Source: NVIDIA Driver Persistence, Overview; NVML API reference, nvmlInit_v2 ("GPUs are discovered and initialized in
nvmlDeviceGetHandleBy* functions"). A Ray cluster's hosts are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["kept_initialised"]


@contextmanager
def kept_initialised(device: str) -> Iterator[None]:
    """Hold the GPUs that trials may run on, or more; where they run on none, do nothing.

    Nothing is done either without NVIDIA's driver, and no refusal of NVML's ends a search. NVML counts who uses it:
    nobody else in this process is cut off at the end.

    Args:
        device: as asked for: torch's name, or "auto".
    """
    import pynvml

    if device.partition(":")[0] not in {"auto", "cuda"}:
        yield
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield
        return
    try:
        _take_handles()
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _take_handles() -> None:
    """Hold the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else, unless it hides them, all.

    Its ordinals are CUDA's, which may count the GPUs in another order (CUDA_DEVICE_ORDER). A handle takes no memory,
    and needs no closing: NVML holds the device until it is shut down.
    """
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    with suppress(pynvml.NVMLError):
        if named.startswith(("GPU-", "MIG-")):
            _take_each(pynvml.nvmlDeviceGetHandleByUUID, map(str.strip, named.split(",")))
        elif named[:1].isdecimal():
            _take_each(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))


def _take_each(take: Callable[[Any], object], names: Iterable[object]) -> None:
    import pynvml

    for one in names:
        with suppress(pynvml.NVMLError):  # a device that is not there, or not this user's
            take(one)
