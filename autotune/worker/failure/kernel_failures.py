"""Failures of a device's kernels: noticed late and elsewhere, and nothing works in the process afterwards.

Takes exceptions; decides whether one is such a failure. Makes a process wait for each kernel, so that the
failure shows where it happens.
"""

from __future__ import annotations

import os
import re

from autotune.worker.failure.causes import errors_in

__all__ = ["block_launches", "blocking_variable", "is_kernel_failure", "launches_block"]

# What cudaGetErrorString and hipGetErrorString say of errors after which "the process must be terminated and
# relaunched". Source: CUDA Runtime API, cudaError (700, 702, 710, 714 to 721, 214), the first lines of which torch
# gives on: c10/cuda/CUDAException.cpp, c10_cuda_check_implementation.
_LOST = (
    "an illegal memory access was encountered|device-side assert triggered|unspecified launch failure"
    "|misaligned address|an illegal instruction was encountered|invalid program counter|hardware stack error"
    "|operation not supported on global/shared address space|the launch timed out and was terminated"
    "|uncorrectable ECC error encountered|[Ii]nvalid access of peer GPU memory over nvlink or a hardware error"
)
_FAILURE = re.compile(
    rf"(CUDA|HIP)( driver)? error: ({_LOST})"
    rf"|Triton Error \[(CUDA|HIP)\]: ({_LOST})"  # triton/backends/nvidia/driver.c, gpuAssert
    rf"|Cuda failure (\d+ )?'({_LOST})'"  # NCCL, src/include/checks.h, CUDACHECK
    # A library that finds the context lost reports no more than this, where its own call did not fail first.
    r"|(CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED"
    r"|UR_RESULT_ERROR_DEVICE_LOST"  # XPU, unified-runtime's ur_api.h
)

# CUDA's driver reads its variable when it is initialised, torch at the first error alone (c10/cuda's
# CUDAMiscFunctions.cpp, get_cuda_async_error_suffix); ROCm's counterpart is that of torch's own translation
# (torch/utils/hipify, cuda_to_hip_mappings.py). Both are to be set before the first call to the device.
_BLOCKING = {"cuda": ("CUDA_LAUNCH_BLOCKING", "1"), "rocm": ("AMD_SERIALIZE_KERNEL", "3")}


def is_kernel_failure(error: BaseException) -> bool:
    """Whether an exception, or one that it stems from, means that a kernel failed some time before."""
    return any("RuntimeError" in text.kinds and _FAILURE.search(text.message) for text in errors_in(error))


def block_launches() -> None:
    """Have each launch wait for its kernel, in this process and in all that it starts."""
    os.environ.update(_BLOCKING.values())


def launches_block() -> bool:
    """Whether each launch waits for its kernel: then an error has the place where it happened."""
    return any(os.environ.get(name) == value for name, value in _BLOCKING.values())


def blocking_variable(kind: str) -> str | None:
    """What has each launch on a kind of device wait for its kernel, as NAME=value; None: nothing does."""
    name, value = _BLOCKING.get(kind, ("", ""))
    return f"{name}={value}" if os.environ.get(name) == value else None
