"""Whose memory was used up, told by the words of those who say it: torch, CUDA's libraries, NCCL, gloo, the kernel.

The texts are what is really said, first lines and what matters below them; each names where it comes from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils import pin_memory

from autotune.worker.failures import Shortage, shortage_of

# c10/cuda/CUDACachingAllocator.cpp, malloc
ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 78.04 GiB memory in use. Of the allocated memory 76.10 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
# c10/cuda/CUDAException.cpp with get_cuda_error_help and get_cuda_async_error_suffix of CUDAMiscFunctions.cpp
RUNTIME = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
# torch/csrc/distributed/c10d/NCCLUtils.hpp, C10D_NCCL_CHECK, and getNcclErrorDetailStr of NCCLUtils.cpp
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.5"
    "\n{}\nLast error:\n{}"
)
CUDA_CALL = "ncclUnhandledCudaError: Call to CUDA function failed."
SYSTEM_CALL = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "


def nccl(last: str, *, detail: str = CUDA_CALL) -> RuntimeError:
    """What torch raises of an error of NCCL's, with NCCL's last warning."""
    return torch.distributed.DistBackendError(NCCL.format("unhandled cuda error", detail, last))


FULL_DEVICE = [
    torch.OutOfMemoryError(ALLOCATOR),
    RuntimeError(ALLOCATOR),  # re-raised by a library under another type
    RuntimeError(RUNTIME),  # a context, a stream, a graph: what torch's allocator does not hand out
    torch.AcceleratorError(RUNTIME),
    RuntimeError(  # torch 2.14.1, libtorch_cuda.so
        "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes, cuDNN may need "
        "additional device memory to JIT-compile shape-specialized kernels. Consider calling "
        "torch.cuda.memory.set_per_process_memory_fraction(fraction) early in the process to leave memory available "
        "for cuDNN."
    ),
    RuntimeError(
        "CUDA driver error: out of memory"
    ),  # aten/src/ATen/cuda/Exceptions.h, AT_CUDA_DRIVER_CHECK
    # The same file, TORCH_CUDABLAS_CHECK and TORCH_CUSOLVER_CHECK
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. If you keep seeing "
        "this error, you may use `torch.backends.cuda.preferred_linalg_library()` to try linear algebra operators with "
        "other supported backends."
    ),
    RuntimeError(
        "cuFFT error: CUFFT_ALLOC_FAILED"
    ),  # aten/src/ATen/native/cuda/CuFFTUtils.h, CUFFT_CHECK
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),  # Exceptions.h, AT_CUDNN_CHECK, cuDNN 8
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),  # cuDNN 9, cudnn_graph.h
    RuntimeError(
        "Triton Error [CUDA]: out of memory"
    ),  # triton/backends/nvidia/driver.c, gpuAssert
    nccl("Cuda failure 2 'out of memory'"),  # NCCL 2.2x, src/include/checks.h, CUDACHECK
    nccl("Cuda failure 'out of memory'"),  # the same, before and after
    RuntimeError(
        "HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 63.98 GiB"
    ),
    RuntimeError(
        "HIP error: out of memory\nSearch for `hipErrorOutOfMemory' in https://rocm.docs.amd.com/"
    ),
    RuntimeError("MIOpen Error: miopenStatusAllocFailed"),  # MIOpen, src/include/miopen/errors.hpp
    # c10/xpu/XPUCachingAllocator.cpp
    torch.OutOfMemoryError(
        "XPU out of memory. Tried to allocate 192.00 MiB. GPU 3 has a total capacity of 31.89 GiB"
    ),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    # aten/src/ATen/mps/MPSAllocator.mm
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: 18.13 GB). "
        "Tried to allocate 192.00 MB on private pool."
    ),
    # torch/_utils.py, ExceptionWrapper.reraise, of a replica of DataParallel
    torch.OutOfMemoryError(
        "Caught OutOfMemoryError in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n"
        '  File "/site-packages/torch/nn/parallel/parallel_apply.py", line 98, in _worker\n'
        f"    output = module(*input, **kwargs)\ntorch.OutOfMemoryError: {ALLOCATOR}\n"
    ),
    # torch/_dynamo/exc.py, BackendCompilerFailed: raised from None
    RuntimeError(f"backend='inductor' raised:\nRuntimeError: {RUNTIME}"),
]

PERHAPS_FULL_DEVICE = [
    # aten/src/ATen/native/cudnn/Conv_v8.cpp, run_single_conv and try_plans; Conv_v7.cpp, try_all
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasLtMatmul(ltHandle, ...)`"
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`."
    ),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    nccl(
        "Failed to CUDA calloc async 608 bytes"
    ),  # NCCL, src/include/alloc.h, ncclCudaCallocAsyncDebug
    nccl("Failed to CUDA calloc 4194304 bytes"),
]

FULL_HOST: dict[str, list[BaseException]] = {
    "the machine ran out of memory": [
        MemoryError(
            "Unable to allocate 8.00 TiB for an array with shape (1099511627776,) and data type float64"
        ),
        # c10/core/impl/alloc_cpu.cpp
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 1125899906842624 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
            "1125899906842624 bytes."
        ),
        OSError(12, "Cannot allocate memory"),  # fork(2), of a loader worker
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        nccl("Failed to malloc 1048576 bytes", detail=SYSTEM_CALL),
        nccl(
            "Error while creating shared memory segment /dev/shm/nccl-aKifJm (size 4194656), error: Cannot allocate "
            "memory (12)",
            detail=SYSTEM_CALL,
        ),
        # torch/_utils.py of a type that it can't build anew
        RuntimeError(
            "Caught _ArrayMemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "data.py", line 3, in __getitem__\n    return np.empty(2**40)\n'
            "numpy._core._exceptions.MemoryError: Unable to allocate 8.00 TiB for an array\n"
        ),
    ],
    "the shared memory (/dev/shm) is full": [
        # aten/src/ATen/MapAllocator.cpp
        RuntimeError(
            "unable to open shared memory object </torch_812_3_1> in read-write mode: No space left on device (28)"
        ),
        RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_812_3_1>: No space left on device (28)"
        ),
        RuntimeError("unable to write to file </torch_19130_12>: No space left on device (28)"),
        RuntimeError(
            "unable to mmap 67108880 bytes from file </torch_1_2_3>: Cannot allocate memory (12)"
        ),
        # torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py
        RuntimeError(
            "DataLoader worker (pid 88) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit."
        ),
        OSError(28, "No space left on device", "/dev/shm/psm_5a1f"),
        # NCCL, src/misc/shmutils.cc, ncclShmOpen: with the error since 2.2x, without it before
        nccl(
            "Error while creating shared memory segment /dev/shm/nccl-VPyhzw (size 21823872), error: No space left on "
            "device (28)",
            detail=SYSTEM_CALL,
        ),
        nccl(
            "Error while creating shared memory segment /dev/shm/nccl-UbzKZ9 (size 9637888)",
            detail=SYSTEM_CALL,
        ),
        nccl("Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes", detail=SYSTEM_CALL),
        # multiprocessing/synchronize.py, where a loader makes its queues
        OSError(
            "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n'
            "    sl = self._semlock = _multiprocessing.SemLock(\n                         ^^^^^^^^^^^^^^^^^^^^^^^^^\n"
            "OSError: [Errno 28] No space left on device\n"
        ),
    ],
    "the limit of open files (ulimit -n) was reached": [
        OSError(24, "Too many open files"),
        RuntimeError("received 0 items of ancdata"),  # multiprocessing/reduction.py
        RuntimeError(
            "unable to open shared memory object </torch_8_3_1> in read-write mode: Too many open files (24)"
        ),
    ],
    "the machine ran out of memory that can be page-locked": [
        nccl(
            "Failed to CUDA host alloc 8388608 bytes"
        ),  # NCCL, src/include/alloc.h, ncclCudaHostCallocDebug
        # torch/utils/data/_utils/pin_memory.py; cudaHostAlloc has the words of cudaMalloc
        torch.AcceleratorError(
            "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
            '  File "/site-packages/torch/utils/data/_utils/pin_memory.py", line 41, in do_one_step\n'
            "    data = pin_memory(data, device)\n           ^^^^^^^^^^^^^^^^^^^^^^^^\n"
            '  File "/site-packages/torch/utils/data/_utils/pin_memory.py", line 64, in pin_memory\n'
            f"    return data.pin_memory()\n           ^^^^^^^^^^^^^^^^^\ntorch.AcceleratorError: {RUNTIME}\n"
        ),
    ],
    "a loader worker was killed, most likely for its memory": [
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    ],
}

ANOTHER_FAILURE = [
    ValueError("CUDA out of memory"),  # the user's own words
    ValueError("the shard is out of memory: Too many open files"),
    KeyError("CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("the reader ran out of memory cards"),
    torch.AcceleratorError(
        "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs"
    ),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, ...)`"
    ),
    RuntimeError(
        "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes or "
    ),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x2)"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"
    ),
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, checkTimeout
    torch.distributed.DistBackendError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    ),
    nccl("Cuda failure 719 'unspecified launch failure'"),
    nccl("socketPollConnect: Connect to 10.0.0.2<44413> failed : Software caused connection abort"),
    nccl(
        "Error while attaching to shared memory segment /dev/shm/nccl-x (size 0), error: No such file or directory (2)",
        detail=SYSTEM_CALL,
    ),
    nccl(
        "Error while creating shared memory segment /dev/shm/nccl-x (size 8), error: Permission denied (13)",
        detail=SYSTEM_CALL,
    ),
    RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2719"
    ),
    RuntimeError(
        "unable to open shared memory object </torch_8_3_1> in read-write mode: No such file or directory (2)"
    ),
    OSError(28, "No space left on device", "/data/cache/item-12"),  # a disk of the user's
    FileNotFoundError(2, "No such file or directory", "/data/out of memory.jpg"),
    # A user's own exception in a loader worker: only what it says counts, not the code around it
    ValueError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 3, in __getitem__\n    raise ValueError("CUDA out of memory")\n'
        "ValueError: CUDA out of memory\n"
    ),
    RuntimeError(
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 3, in __getitem__\n    read(fallback="CUDA error: out of memory")\n'
        "RuntimeError: item 3 is unreadable\n"
    ),
]


def name_of(error: object) -> str:
    """The first words, for the test's name."""
    return (
        str(error)[-60:].strip().replace("\n", " ")
        if isinstance(error, BaseException)
        else str(error)
    )


def found(error: BaseException, *, is_full: bool = False) -> str | None:
    shortage = shortage_of(error, lambda: is_full)
    return None if shortage is None else shortage.memory


@pytest.mark.parametrize("error", FULL_DEVICE, ids=name_of)
def test_full_device(error: BaseException) -> None:
    shortage = shortage_of(error, lambda: False)
    assert shortage is not None
    assert shortage.memory == "device"
    assert "\n" not in shortage.reason


@pytest.mark.parametrize("error", PERHAPS_FULL_DEVICE, ids=name_of)
def test_perhaps_full_device(
    error: BaseException,
) -> None:
    assert found(error, is_full=True) == "device"
    assert found(error, is_full=False) is None


@pytest.mark.parametrize(
    ("explanation", "error"),
    [(why, error) for why, errors in FULL_HOST.items() for error in errors],
    ids=name_of,
)
def test_full_host(explanation: str, error: BaseException) -> None:
    shortage = shortage_of(error, lambda: True)
    assert shortage is not None
    assert shortage.memory == "host"
    assert shortage.reason.startswith(explanation)


@pytest.mark.parametrize("error", ANOTHER_FAILURE, ids=name_of)
def test_another_failure(error: BaseException) -> None:
    assert shortage_of(error, lambda: True) is None


def test_reason() -> None:
    told = shortage_of(OSError(24, "Too many open files"))
    reason = "the limit of open files (ulimit -n) was reached: [Errno 24] Too many open files"
    assert told == Shortage(memory="host", reason=reason)


def test_cause_counts() -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = RuntimeError(RUNTIME)
    assert found(outer) == "device"
    hidden = ValueError("raised from None, as torch.compile does")
    hidden.__context__, hidden.__suppress_context__ = torch.OutOfMemoryError(ALLOCATOR), True
    assert found(hidden) == "device"


def test_cause_in_a_worker_counts() -> None:
    quoted = ValueError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 3, in __getitem__\n    open(path)\n'
        "OSError: [Errno 24] Too many open files: 'a.jpg'\n\n"
        "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        '  File "data.py", line 5, in __getitem__\n    raise ValueError(path) from error\nValueError: a.jpg\n'
    )
    shortage = shortage_of(quoted)
    assert shortage is not None
    assert "[Errno 24]" in shortage.reason


pin: Any = pin_memory.pin_memory


class Unpinnable:
    """A batch that can't be page-locked, as torch says it."""

    def pin_memory(self) -> None:
        raise torch.AcceleratorError(RUNTIME)


def test_full_pinned_memory() -> None:
    """Raised by torch's own function, as in the main thread of a loader without workers."""
    with pytest.raises(torch.AcceleratorError) as raised:
        pin([Unpinnable()])
    shortage = shortage_of(raised.value)
    assert shortage is not None
    assert shortage.memory == "host"
    assert "pin_memory" in shortage.reason


def test_full_device_while_pinning() -> None:
    class OnDevice:
        def pin_memory(self) -> None:
            raise torch.OutOfMemoryError(ALLOCATOR)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        pin(OnDevice())
    assert found(raised.value) == "device"


def test_no_open_device() -> None:
    assert shortage_of(PERHAPS_FULL_DEVICE[0]) is None


def test_numpy_without_memory() -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(2**56)
    shortage = shortage_of(raised.value)
    assert shortage is not None
    assert shortage.memory == "host"
    assert str(raised.value).splitlines()[0] in shortage.reason


def test_torch_without_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert found(raised.value) == "host"
