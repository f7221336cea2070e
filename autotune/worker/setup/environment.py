"""The Environment of a trial: hardware and versions, as torch, the drivers and the kernel give them.

Takes an open Device; hands on the record that reports show and studies compare.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from autotune.note import Note, note
from autotune.settings.environment import Environment
from autotune.settings.training_config import AmpDtype
from autotune.worker.failure.kernel_failures import blocking_variable
from autotune.worker.measure import nvml
from autotune.worker.setup import machine
from autotune.worker.setup.device import Device

__all__ = ["describe"]

_PACKAGES = ("autotune-torch", "torch", "optuna", "numpy", "nvidia-ml-py", "pydantic")
_MIN_TENSOR_CORE_CAPABILITY = (7, 0)  # Volta: the first with float16 matrix units
_MIN_TF32_CAPABILITY = (8, 0)  # Ampere


def describe(device: Device, *, job_blocks: bool = False) -> Environment:
    """The environment of a trial on this device.

    Args:
        device: What trials run on.
        job_blocks: The job itself makes each launch wait for its kernel, so that is no remark on the environment.
    """
    names = _device_names(device)
    return Environment(
        device=str(device.torch_device),
        device_kind=device.kind,
        device_name=names[device.torch_device.index or 0],
        device_memory_bytes=device.total_memory_bytes,
        device_count=1 if device.kind == "cpu" else device.module.device_count(),
        device_names=names if len(set(names)) > 1 else (),
        native_amp_dtypes=_native_dtypes(device),
        driver=nvml.driver_version() if device.kind == "cuda" else None,
        cores=machine.usable_cores(),
        ram_bytes=machine.usable_ram_bytes(),
        platform=platform.platform(terse=True),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        versions=_versions(),
        tf32_overrides=machine.tf32_overrides() if device.kind == "cuda" else (),
        remarks=tuple(_remarks(device, job_blocks=job_blocks)),
    )


def _remarks(device: Device, *, job_blocks: bool) -> list[Note]:
    variable = None if job_blocks else blocking_variable(device.kind)
    blocking = None if variable is None else note("launches_wait", variable=variable)
    return [remark for remark in (device.remark, blocking) if remark is not None]


def _device_names(device: Device) -> tuple[str, ...]:
    """The product of each device of this kind; the processor's for the CPU and on MPS."""
    if device.kind in {"cpu", "mps"}:
        return (machine.processor_name(),)
    return tuple(str(device.module.get_device_name(index)) for index in range(device.module.device_count()))


def _native_dtypes(device: Device) -> tuple[AmpDtype, ...]:
    kind, native = device.kind, {"float32"}
    if kind in {"cuda", "rocm"}:
        capability = torch.cuda.get_device_capability(device.torch_device)
        if kind == "cuda" and capability >= _MIN_TF32_CAPABILITY:
            native.add("tf32")
        if torch.cuda.is_bf16_supported(including_emulation=False):
            native.add("bfloat16")
        if kind == "rocm" or capability >= _MIN_TENSOR_CORE_CAPABILITY:
            native.add("float16")
    elif kind == "cpu":
        flags = machine.processor_flags()
        native |= {"bfloat16"} if flags & {"avx512_bf16", "amx_bf16", "bf16"} else set()
        native |= {"float16"} if flags & {"avx512_fp16", "amx_fp16"} else set()
    elif kind == "other":
        ask: Any = getattr(device.module, "get_amp_supported_dtype", list)  # torch.utils.rename_privateuse1_backend
        known = ask()
        native |= {name for name in ("bfloat16", "float16") if getattr(torch, name) in known}
    else:
        native |= {"bfloat16", "float16"} if kind == "xpu" else {"float16"}
    order: tuple[AmpDtype, ...] = ("float32", "tf32", "bfloat16", "float16")
    return tuple(name for name in order if name in native)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
