"""Whose memory was used up: the device's, the host's, or nobody's.

Takes an exception of whatever raised it (torch's allocators, CUDA's libraries, NCCL, the kernel, a loader worker, a pin
thread); hands on a Shortage, or None for any other failure. Only the messages of types that torch or the system raise
count: a RuntimeError or an OSError, not a ValueError of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autotune.worker.failure.causes import ErrorText, errors_in
from autotune.worker.setup.device import Device, opened_device

__all__ = ["Shortage", "device_was_full", "shortage_of"]

_ALMOST_NOTHING_BYTES = 256 * 2**20
"""Free device memory below which a library's first call may fail: what cuBLAS or cuDNN load with their kernels and a
workspace (32 MiB on Hopper) take together, rounded up. Our own convention."""

# Messages that appear only where the device's memory is used up. Sources: c10/cuda/CUDACachingAllocator.cpp and its XPU
# and MPS counterparts; cudaErrorMemoryAllocation as c10/cuda/CUDAException.cpp and aten/src/ATen/cuda/Exceptions.h give
# it on; the status codes of cuBLAS, cuSOLVER, cuSPARSE, cuFFT (aten/src/ATen/native/cuda/CuFFTUtils.h), cuDNN 8 and 9
# (cudnn_graph.h) and MIOpen; NCCL's src/include/checks.h, with or without the error's number; Triton's driver.c;
# unified-runtime's ur_api.h.
_DEVICE = re.compile(
    r"\b(CUDA|HIP|XPU) (ran )?out of memory\b|\bMPS backend out of memory\b"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'|Triton Error \[(CUDA|HIP)\]: out of memory"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED|(CU|HIP)FFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|miopenStatusAllocFailed"
    r"|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
)

# Messages that appear where the device's memory is used up, and for other reasons too: cuDNN has no engine for a
# precision or a card, a library does not match the driver, a kernel has failed before. torch takes an allocator's error
# for that of an engine and tries the next: aten/src/ATen/native/cudnn/Conv_v8.cpp (try_plans), Conv_v7.cpp (try_all).
# NCCL reports every allocation that failed alike: src/include/alloc.h (ncclCudaCallocDebug).
_PERHAPS = re.compile(
    r"[Uu]nable to find an engine to execute this computation|[Uu]nable to find a valid cuDNN algorithm"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b|CUFFT_INTERNAL_ERROR"
    r"|Failed to CUDA calloc|UR_RESULT_ERROR_OUT_OF_RESOURCES"
)

# The host's. Sources: c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp, torch/csrc/DataLoader.cpp,
# torch/utils/data/_utils/signal_handling.py, strerror(3), cudnn_graph.h, unified-runtime's ur_api.h, and NCCL's
# src/include/alloc.h and src/misc/shmutils.cc (ncclShmOpen), of which older versions give no error's name.
_FILES = re.compile("Too many open files|received 0 items of ancdata")
_SHARED_MEMORY = re.compile(
    r"Bus error|bus error encountered in worker|No space left on device.*shm|/shm/.*No space left on device"
    r"|unable to (write to file|resize file|mmap|allocate shared memory|open shared memory object)"
    r"(?!.*(No such file|Permission denied|File exists))"
    r"|(failed to extend|creating shared memory segment) \S*/nccl-\S* [^,\n]*(?m:$)"
)
_RAM = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory|Failed to malloc \d+ bytes"
    r"|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED|UR_RESULT_ERROR_OUT_OF_HOST_MEMORY"
)
_KILLED = re.compile("DataLoader worker .* is killed by signal: Killed")

_Memory = Literal["device", "host"]
_FULL_DEVICE: tuple[_Memory, str] = "device", "the device ran out of memory"
_FULL_RAM: tuple[_Memory, str] = "host", "the machine ran out of memory"
_FULL_SHARED_MEMORY: tuple[_Memory, str] = "host", "the shared memory (/dev/shm) is full"
_USED_UP: dict[re.Pattern[str], tuple[_Memory, str]] = {
    _DEVICE: _FULL_DEVICE,
    _FILES: ("host", "the limit of open files (ulimit -n) was reached"),
    _SHARED_MEMORY: _FULL_SHARED_MEMORY,
    _RAM: _FULL_RAM,
    re.compile("Failed to CUDA host alloc"): ("host", "the machine ran out of memory that can be page-locked"),
    _KILLED: ("host", "a loader worker was killed, most likely for its memory"),
    _PERHAPS: _FULL_DEVICE,
}
"""Whose memory, and what is used up, by its message; the first that matches counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory, or what stands for it, that was used up."""

    memory: _Memory
    """host: RAM, shared memory, or the files that may be open."""
    reason: str
    """What was used up, and the message."""


def shortage_of(error: BaseException, is_full: Callable[[], bool] | None = None) -> Shortage | None:
    """Whose memory an exception, one that it stems from, or one that it quotes reports as used up; None: nobody's.

    Args:
        error: what was raised.
        is_full: whether the device's memory was used up, asked where the message alone does not decide; None: the
            device that this process has opened is asked, if any, see `device_was_full`.
    """
    for text in errors_in(error):
        found = _used_up(text, is_full or device_was_full)
        if found is not None:
            memory, what = found
            detail = f": {text.first_line}" if text.message or memory == "device" else " (MemoryError)"
            return Shortage(memory=memory, reason=what + detail)
    return None


def device_was_full(device: Device | None = None, refusals_before: int = 0) -> bool:
    """Whether its allocators have refused memory more than `refusals_before` times, or next to nothing is free.

    Without a device, the one that this process has opened is asked; where there is none, none is full.
    """
    device = device or opened_device()
    if device is None:
        return False
    free_bytes = device.free_bytes()
    return device.refusals() > refusals_before or (free_bytes is not None and free_bytes < _ALMOST_NOTHING_BYTES)


def _used_up(text: ErrorText, is_full: Callable[[], bool]) -> tuple[_Memory, str] | None:
    if "OutOfMemoryError" in text.kinds:
        return _FULL_DEVICE
    if "MemoryError" in text.kinds:
        return _FULL_RAM
    if not {"RuntimeError", "OSError"} & set(text.kinds):
        return None
    if _was_pinning(text):
        return "host", "the machine ran out of memory that can be page-locked (pin_memory)"
    if _was_making_a_semaphore(text):
        return _FULL_SHARED_MEMORY
    matching = (pattern for pattern in _USED_UP if pattern.search(text.message))
    return next((_USED_UP[pattern] for pattern in matching if pattern is not _PERHAPS or is_full()), None)


def _was_pinning(text: ErrorText) -> bool:
    """Whether it was raised where a tensor is copied into page-locked memory, which is the host's.

    cudaHostAlloc's error has the words of cudaMalloc's; the device's allocator has words of its own.
    Source: aten/src/ATen/cuda/CachingHostAllocator.cpp (allocate_host_memory_slowpath).
    """
    return "pin_memory" in _innermost(text) and "error: out of memory" in text.message


def _was_making_a_semaphore(text: ErrorText) -> bool:
    """Whether it was raised where multiprocessing makes a semaphore; these lie in /dev/shm: man 7 sem_overview."""
    return "_multiprocessing.SemLock" in _innermost(text) and "No space left on device" in text.message


def _innermost(text: ErrorText) -> str:
    return text.stack[text.stack.rfind('  File "') :]
