"""NVIDIA's driver, kept from letting go of the devices between trials.

Without persistence mode the driver initialises a GPU for the first process that opens it, and lets go of it after the
last: one to three seconds a trial, and state such as clocks that were set is lost. The parent therefore holds handles
of NVML's while trials come and go: they initialise the GPU as a CUDA context would, but take no memory of it.
Source: NVIDIA Driver Persistence, Overview; NVML API reference, nvmlInit_v2 ("GPUs are discovered and initialized in
nvmlDeviceGetHandleBy* functions"). A Ray cluster's hosts are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["kept_initialised"]


@contextmanager
def kept_initialised(device: str) -> Iterator[None]:
    """Hold the GPUs that CUDA_VISIBLE_DEVICES lets trials see, where they may run on one; else, do nothing.

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
    """A handle needs no closing: NVML holds the device until it is shut down."""
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    with suppress(pynvml.NVMLError):
        visible = map(str, range(pynvml.nvmlDeviceGetCount())) if named is None else named.split(",")
        for one in visible:
            with suppress(pynvml.NVMLError):  # a device that is not there, or not this user's
                _take_handle(one.strip())


def _take_handle(name: str) -> None:
    import pynvml

    if name.isdecimal():
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
    else:
        pynvml.nvmlDeviceGetHandleByUUID(name)
