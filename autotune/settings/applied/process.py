"""The process that trains: its device, the threads of its operations, and how cuDNN chooses among its algorithms."""

from __future__ import annotations

import os
from typing import Any

import torch

from autotune.settings.applied.cores.processor import usable_cores

__all__ = ["local_rank", "local_ranks", "own_device", "set_cudnn_benchmark", "set_current", "set_threads"]


def own_device(*, is_rank: bool) -> torch.device:
    """The accelerator's current device, for a rank of torchrun the one of its number on this host; else the CPU."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return torch.device("cpu")
    index = os.environ.get("LOCAL_RANK", "") if is_rank else ""
    return torch.device(kind.type, int(index) if index.isdecimal() else torch.accelerator.current_device_index())


def set_current(device: torch.device) -> None:
    """Make an accelerator's device the current one, as trials do: what names no device lies there then."""
    if device.index is not None and torch.accelerator.is_available():
        own = torch.accelerator.current_accelerator()
        if own is not None and own.type == device.type:
            torch.accelerator.set_device_index(device.index)


def set_threads(count: int | None, ranks_here: int | None) -> None:
    """So many threads for each of torch's operations on the CPU; without a number the ranks of a host share its cores.

    Both None: as they are.
    """
    if count is not None or ranks_here is not None:
        torch.set_num_threads(count or max(1, usable_cores() // (ranks_here or 1)))


def set_cudnn_benchmark(is_on: bool) -> None:
    """Have cuDNN time its algorithms for each new shape, or choose by its own rules; ROCm's MIOpen alike.

    Of no effect where torch has neither. Source: torch.backends.cudnn.benchmark.
    """
    torch.backends.cudnn.benchmark = is_on


def local_rank() -> int:
    """This rank's number on its host, as torchrun says it; else that in its process group, if one is open."""
    own = os.environ.get("LOCAL_RANK", "")
    if own.isdecimal():
        return int(own)
    group: Any = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() else 0


def local_ranks(world_size: int) -> int:
    """Ranks on this host, as torchrun says it; all of them where nothing does."""
    own = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(own) if own.isdecimal() and int(own) else world_size
