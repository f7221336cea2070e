"""Describe the environment of a trial: hardware and versions, from torch, drivers and kernel.

Comes in: an open `Device`. Goes out: the `Environment` that reports show and studies compare.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata

import torch

from autotune.apply.cores import (
    Nodes,
    allowed_cores,
    allowed_nodes,
    node_of_pci,
    pci_address,
    processor_name,
    usable_cores,
)
from autotune.config.environment import Environment
from autotune.config.training_config import AMP_DTYPES, AmpDtype
from autotune.launch.machine import has_kept_memory, malloc_switches
from autotune.messages.trials import launches_wait
from autotune.note import Note
from autotune.worker import device as machine
from autotune.worker import nvml
from autotune.worker.device import Device
from autotune.worker.failures import blocking_variable

_PACKAGES = ("autotune-torch", "torch", "optuna", "numpy", "nvidia-ml-py", "pydantic")
_NATIVE_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16"},
}
"""Flags of processors that compute in a precision. Source: Linux kernel,
arch/x86/include/asm/cpufeatures.h and Documentation/arch/arm64/elf_hwcaps.rst."""
_MIN_TENSOR_CORE_CAPABILITY = (7, 0)  # Volta: the first with float16 matrix units
_MIN_TF32_CAPABILITY = (8, 0)  # Ampere: the first with TF32


def describe(device: Device, *, job_blocks: bool = False) -> Environment:
    """Return the environment of a trial on this device.

    Args:
        device: The device that trials run on.
        job_blocks: The job itself makes each launch wait for its kernel, so that deserves no note.
    """
    names = _device_names(device)
    # the NUMA nodes with cores that this process may use
    allowed = allowed_cores()
    nodes = allowed_nodes(allowed) if allowed else {}
    return Environment(
        device=str(device.torch_device),
        device_kind=device.kind,
        device_name=names[device.torch_device.index or 0],
        device_memory_bytes=device.total_memory_bytes,
        device_count=1 if device.kind == "cpu" else device.module.device_count(),
        device_names=names if len(set(names)) > 1 else (),
        native_amp_dtypes=_native_dtypes(device),
        driver=nvml.driver_version() if device.kind == "cuda" else None,
        cores=usable_cores(),
        numa_nodes=max(1, len(nodes)),
        node_cores=tuple(map(len, nodes.values())),
        device_nodes=_device_nodes(device, nodes),
        ram_bytes=machine.usable_ram_bytes(),
        platform=platform.platform(terse=True),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        versions=_versions(),
        tf32_overrides=machine.tf32_overrides() if device.kind == "cuda" else (),
        malloc=malloc_switches(os.environ),
        keeps_memory=has_kept_memory(os.environ),
        notes=tuple(_notes(device, job_blocks=job_blocks)),
    )


def _notes(device: Device, *, job_blocks: bool) -> list[Note]:
    notes = list[Note]()
    if device.note is not None:
        notes.append(device.note)
    variable = blocking_variable(device.kind)
    if variable is not None and not job_blocks:
        notes.append(launches_wait(variable))
    return notes


def _device_names(device: Device) -> tuple[str, ...]:
    """Return the product name of each device of this kind; the processor's for the CPU and on MPS."""
    if device.kind in {"cpu", "mps"}:
        return (processor_name(),)
    return tuple(
        str(device.module.get_device_name(index)) for index in range(device.module.device_count())
    )


def _device_nodes(device: Device, nodes: Nodes) -> tuple[int, ...]:
    """Return the position of each device's NUMA node among these; -1 if unknown or not among them."""
    if device.kind not in {"cuda", "rocm"} or not nodes:
        return ()
    kind = device.torch_device.type
    places = {node: place for place, node in enumerate(nodes)}
    found = list[int]()
    for index in range(device.module.device_count()):
        node = node_of_pci(pci_address(torch.device(kind, index)), nodes)
        found.append(-1 if node is None else places.get(node, -1))
    return tuple(found)


def _native_dtypes(device: Device) -> tuple[AmpDtype, ...]:
    """Return the precisions that the device computes in natively."""
    kind = device.kind
    if kind in {"cuda", "rocm"}:
        capability = torch.cuda.get_device_capability(device.torch_device)
        native = {
            "tf32": kind == "cuda" and capability >= _MIN_TF32_CAPABILITY,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
            "float16": kind == "rocm" or capability >= _MIN_TENSOR_CORE_CAPABILITY,
        }
    elif kind == "cpu":
        flags = machine.processor_flags()
        native = {name: not flags.isdisjoint(any_of) for name, any_of in _NATIVE_FLAGS.items()}
    elif kind == "other":
        # see torch.utils.rename_privateuse1_backend
        known: list[torch.dtype] = getattr(device.module, "get_amp_supported_dtype", list)()
        native = {name: getattr(torch, name) in known for name in ("bfloat16", "float16")}
    else:
        native = {"bfloat16": kind == "xpu", "float16": True}
    return tuple(name for name in AMP_DTYPES if name == "float32" or native.get(name))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
