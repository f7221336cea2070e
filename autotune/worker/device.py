"""The device room: all that differs between CUDA, ROCm, MPS, XPU and the CPU.

Opens a device by name and hands on one object whose functions synchronise it, cap its memory and read its peak.
torch.accelerator serves where it can; what only CUDA and ROCm have goes through torch.cuda.
"""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import psutil
import torch

from autotune.core.environment import DeviceKind, Environment
from autotune.core.measurement import MemorySample
from autotune.core.training_config import AmpDtype
from autotune.worker import machine, nvml

__all__ = ["Device", "DeviceError", "describe", "open_device"]

_PACKAGES = ("autotune-torch", "torch", "optuna", "numpy", "nvidia-ml-py", "pydantic")
_MIN_TENSOR_CORE_CAPABILITY = (7, 0)  # Volta: the first with float16 matrix units
_MIN_TF32_CAPABILITY = (8, 0)  # Ampere


class DeviceError(Exception):
    """The device that was asked for is not there; the message is a complete sentence."""


@dataclass(frozen=True)
class Device:
    """One device. On the CPU, memory is that of the process tree."""

    torch_device: torch.device
    kind: DeviceKind

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has an allocator whose peak torch counts."""
        return self.kind in {"cuda", "rocm", "xpu"}

    @cached_property
    def total_memory_bytes(self) -> int:
        """Memory of the device; the process's share of RAM on the CPU and on MPS."""
        if self.kind in {"cuda", "rocm"}:
            return int(torch.cuda.get_device_properties(self.torch_device).total_memory)
        if self.kind == "xpu":
            return int(torch.xpu.get_device_properties(self.torch_device).total_memory)
        return machine.usable_ram_bytes()

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def cap_memory(self, limit_bytes: int) -> None:
        """Make torch's allocator refuse what would pass the limit, so that a trial is measured under it.

        The cap is the limit less what lies outside torch (context, libraries, other processes). No effect on the CPU.
        """
        if self.kind in {"cuda", "rocm"}:
            share = max(0.0, min(1.0, (limit_bytes - self.outside_bytes()) / self.total_memory_bytes))
            torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def outside_bytes(self) -> int:
        """Device memory in use outside torch's allocator, this process's context included."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, total - free - torch.cuda.memory_reserved(self.torch_device))

    def reset_peak(self) -> None:
        """Start a new peak: what was needed to build the workload is not what training needs."""
        if self.has_own_memory:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.torch_device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; Linux, man 5 proc

    def peak_memory(self) -> MemorySample:
        """Peak memory since `reset_peak`. Takes milliseconds on the CPU: never inside a window."""
        if self.kind in {"cuda", "rocm"}:
            reserved, outside = torch.cuda.max_memory_reserved(self.torch_device), self.outside_bytes()
            return MemorySample(
                peak_bytes=reserved + outside,
                source="max reserved + outside torch",
                reserved_bytes=reserved,
                outside_bytes=outside,
            )
        if self.kind == "xpu":
            reserved = torch.accelerator.max_memory_reserved(self.torch_device)
            return MemorySample(peak_bytes=reserved, source="max reserved", reserved_bytes=reserved)
        return _process_tree_peak()


def open_device(name: str, rank: int = 0) -> Device:
    """Open a device by torch's name, or the machine's accelerator for "auto", else the CPU.

    The ranks of one machine take the devices from the one named on, in order; on the CPU they share it.

    Raises:
        DeviceError: there is no such device here.
    """
    if name == "auto":
        name = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"device must be one of torch's names, such as cuda:0 or cpu, but got {name!r}") from error
    if device.type == "cpu":
        return Device(torch.device("cpu"), "cpu")
    if not torch.accelerator.is_available() or device.type != torch.accelerator.current_accelerator().type:  # type: ignore[union-attr] # is_available just said so
        raise DeviceError(
            f"device {name!r} was asked for, but torch {torch.__version__} sees none here; set device: auto"
        )
    count, index = torch.accelerator.device_count(), (device.index or 0) + rank
    if index >= count:
        raise DeviceError(
            f"device {device.type}:{index} was asked for, but there are {count} here; name one below "
            f"{device.type}:{count}"
        )
    device = torch.device(device.type, index)
    torch.accelerator.set_device_index(index)
    return Device(device, "rocm" if device.type == "cuda" and torch.version.hip else _KINDS[device.type])


_KINDS: dict[str, DeviceKind] = {"cuda": "cuda", "mps": "mps", "xpu": "xpu"}


def describe(device: Device) -> Environment:
    """The environment of a trial on this device."""
    return Environment(
        device=str(device.torch_device),
        device_kind=device.kind,
        device_name=_device_name(device),
        device_memory_bytes=device.total_memory_bytes,
        device_count=1 if device.kind == "cpu" else torch.accelerator.device_count(),
        native_amp_dtypes=_native_dtypes(device),
        driver=nvml.driver_version() if device.kind == "cuda" else None,
        cores=machine.usable_cores(),
        ram_bytes=machine.usable_ram_bytes(),
        platform=platform.platform(terse=True),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        versions=_versions(),
    )


def _device_name(device: Device) -> str:
    if device.kind in {"cuda", "rocm"}:
        return torch.cuda.get_device_name(device.torch_device)
    if device.kind == "xpu":
        return str(torch.xpu.get_device_name(device.torch_device))
    return machine.processor_name()


def _native_dtypes(device: Device) -> tuple[AmpDtype, ...]:
    flags = machine.processor_flags()
    if device.kind in {"cuda", "rocm"}:
        capability = torch.cuda.get_device_capability(device.torch_device)
        tf32 = device.kind == "cuda" and capability >= _MIN_TF32_CAPABILITY
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        float16 = device.kind == "rocm" or capability >= _MIN_TENSOR_CORE_CAPABILITY
    elif device.kind == "cpu":
        tf32, bfloat16 = False, bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
        float16 = bool(flags & {"avx512_fp16", "amx_fp16"})
    else:
        tf32, bfloat16, float16 = False, device.kind == "xpu", True
    native = {"float32": True, "tf32": tf32, "bfloat16": bfloat16, "float16": float16}
    names: tuple[AmpDtype, ...] = ("float32", "tf32", "bfloat16", "float16")
    return tuple(name for name in names if native[name])


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _process_tree_peak() -> MemorySample:
    """PSS of this process and all below it, and what this process has had beyond that at its peak."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    shares = []
    for process in processes:
        with suppress(psutil.Error):
            full = process.memory_full_info()
            shares.append(int(getattr(full, "pss", full.uss)))
    source = "PSS of the process tree" if sys.platform == "linux" else "USS of the process tree"
    return MemorySample(peak_bytes=sum(shares) + _above_present_bytes(), source=source)


def _above_present_bytes() -> int:
    """How much more this process has had resident at its peak than now (activations, mostly). 0 where unknown."""
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        values = {line.partition(":")[0]: line.split() for line in lines}
        return max(0, int(values["VmHWM"][1]) - int(values["VmRSS"][1])) * 1024
    return 0
