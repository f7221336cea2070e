"""Binds a script's process to its cores before its first line, while no device is open yet.

Comes in: a binding, and what was seen of the script. Goes out: the process on its cores, or a CoresError. Ranks are
those that a launcher such as torchrun has numbered. Where a GPU is, NVIDIA's driver tells; it has not run beside one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from autotune.settings.applied.cores.numa import Addresses, allowed_cores, bind_rank, is_bound_by_launcher
from autotune.worker.measure.nvml import visible_gpu

__all__ = ["Begun", "as_begun", "bind_script", "can_bind_script"]

_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, named by its PCI address. Source: NVIDIA driver README, the /proc file system interface."""


@dataclass(frozen=True, slots=True)
class Begun:
    """How a process stood before the first line of its script."""

    cores: frozenset[int]
    is_numbered: bool
    """A launcher has told it its rank on this host."""


def as_begun() -> Begun:
    """How this process stands now."""
    return Begun(allowed_cores(), "LOCAL_RANK" in os.environ)


def can_bind_script(begun: Begun, ranks: int, device: torch.device) -> bool:
    """Whether a script's process can be bound from outside.

    It must not have bound itself, nor been bound by whoever started it, and a launcher must have numbered its ranks.
    """
    is_known = device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)
    is_free = bool(begun.cores) and begun.cores == allowed_cores() and not is_bound_by_launcher()
    return is_free and is_known and (ranks == 1 or begun.is_numbered)


def bind_script(binding: str, ranks: int, device: torch.device) -> None:
    """Bind this process, and let an operation have no more threads than that leaves it.

    A launcher, which trains nothing itself, is left alone: its ranks would inherit its cores. So is a process that a
    launcher has bound: its share must not be shared out anew.

    Args:
        binding: "node" or "exclusive".
        ranks: Of the script, on all hosts.
        device: What the script trains on, of several ranks the first one's.

    Raises:
        CoresError: it can't be bound.
    """
    here, rank = (
        int(os.environ.get(name, number)) for name, number in (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if (ranks > 1 and "LOCAL_RANK" not in os.environ) or is_bound_by_launcher():
        return
    first = 0 if ranks > 1 else device.index or 0
    places: list[Addresses] = [
        () if device.type == "cpu" else [_address_of(first + number)] for number in range(here if ranks > 1 else 1)
    ]
    threads = bind_rank(binding, rank if ranks > 1 else 0, places, is_alone=ranks == 1)
    torch.set_num_threads(min(threads, torch.get_num_threads()))


def _address_of(index: int, folder: Path = _GPUS) -> str | None:
    """The PCI address of the GPU that CUDA is about to number so; None where the driver does not tell it."""
    gpu = visible_gpu(index)
    if gpu is None:
        return None
    files = (file for file in folder.glob("*/information") if f" {gpu.uuid}\n" in file.read_text().replace("\t", " "))
    return next((file.parent.name for file in files), None)
