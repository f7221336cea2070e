"""Failures of kernels are told from failures of calls, whoever says them."""

from __future__ import annotations

import os

import pytest
import torch

from autotune.worker.failures import (
    block_launches,
    blocking_variable,
    is_kernel_failure,
    launches_block,
)

# c10/cuda/CUDAException.cpp, after cudaGetErrorString
SUFFIX = (
    "\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for "
    "more information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{SUFFIX}"),
        RuntimeError(f"CUDA error: device-side assert triggered{SUFFIX}"),
        RuntimeError(f"CUDA error: unspecified launch failure{SUFFIX}"),
        RuntimeError(f"CUDA error: misaligned address{SUFFIX}"),
        RuntimeError(f"CUDA error: an illegal instruction was encountered{SUFFIX}"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA driver error: an illegal memory access was encountered"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\n"
            "Cuda failure 700 'an illegal memory access was encountered'"
        ),
        # What an earlier kernel's failure makes of the next call to a library
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n)`"
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
        torch.AcceleratorError(
            "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
            '  File "/site-packages/torch/utils/data/_utils/pin_memory.py", line 64, in pin_memory\n'
            f"    return data.pin_memory()\ntorch.AcceleratorError: CUDA error: device-side assert triggered{SUFFIX}"
        ),
    ],
    ids=lambda error: str(error)[:60].partition("\n")[0],
)
def test_kernel_failures(error: BaseException) -> None:
    assert is_kernel_failure(error)
    outer = ValueError("the step failed")
    outer.__cause__ = error
    assert is_kernel_failure(outer)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ValueError("CUDA error: device-side assert triggered"),  # the user's own words
        RuntimeError("an illegal memory access was encountered in page 3 of the book"),
        IndexError("index 12 is out of bounds for dimension 0 with size 4"),
    ],
    ids=lambda error: str(error)[:60],
)
def test_other_failures(error: BaseException) -> None:
    assert not is_kernel_failure(error)


def test_block_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert not launches_block()
    block_launches()
    assert launches_block()
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"


@pytest.mark.parametrize(
    ("name", "value", "kind", "told"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "cuda", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA_LAUNCH_BLOCKING", "0", "cuda", None),
        ("CUDA_LAUNCH_BLOCKING", "1", "rocm", None),
        ("AMD_SERIALIZE_KERNEL", "3", "rocm", "AMD_SERIALIZE_KERNEL=3"),
        ("CUDA_LAUNCH_BLOCKING", "1", "cpu", None),
    ],
)
def test_blocking_variable(
    name: str, value: str, kind: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    assert blocking_variable(kind) == told
