"""What the parent asks of NVIDIA's driver: to keep the GPUs initialised between trials, and what they are called.

Without persistence mode the driver initialises a GPU for the first process that opens it and releases it after the
last: this costs each trial one to three seconds, and state such as clocks that were set is lost. The parent therefore
keeps NVML handles open while trials start and end: they initialise the GPU like a CUDA context, but take no memory.
Source: NVIDIA Driver Persistence, Overview; NVML API reference, nvmlInit_v2 ("GPUs are discovered and initialized in
nvmlDeviceGetHandleBy* functions"). A Ray cluster's hosts are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

__all__ = ["driver_and_gpus", "kept_initialised"]


@contextmanager
def kept_initialised(device: str) -> Iterator[None]:
    """Keep handles of at least the GPUs that trials may run on, if they run on any.

    Without NVIDIA's driver nothing is done, and an error of NVML never ends a search. NVML counts its users: at the end
    no other user in this process is disconnected.

    Args:
        device: as asked for: torch's name, or "auto".
    """
    import pynvml

    with ExitStack() as held:
        with suppress(pynvml.NVMLError):
            if device.partition(":")[0] in {"auto", "cuda"}:
                pynvml.nvmlInit()
                held.callback(_let_go)
                _take_handles()
        yield


def driver_and_gpus() -> tuple[str | None, tuple[str, ...]]:
    """The driver's version and the GPUs' products, without a CUDA context; (None, ()) without NVIDIA's driver."""
    import pynvml

    with ExitStack() as held:
        try:
            pynvml.nvmlInit()
            held.callback(_let_go)
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return str(pynvml.nvmlSystemGetDriverVersion()), tuple(
                str(pynvml.nvmlDeviceGetName(one)) for one in handles
            )
        except pynvml.NVMLError:
            return None, ()


def _let_go() -> None:
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _take_handles() -> None:
    """Open handles of the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else of all, unless it hides them.

    Its ordinals are CUDA's, which may count the GPUs in another order (CUDA_DEVICE_ORDER). A handle needs no closing:
    NVML keeps the device initialised until its shutdown.
    """
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    names: Iterable[object] = map(str.strip, named.split(","))
    take = pynvml.nvmlDeviceGetHandleByUUID
    if not named.startswith(("GPU-", "MIG-")):
        count = pynvml.nvmlDeviceGetCount() if named[:1].isdecimal() else 0
        take, names = pynvml.nvmlDeviceGetHandleByIndex, range(count)
    for name in names:
        with suppress(pynvml.NVMLError):  # a device that does not exist, or not this user's
            take(name)
