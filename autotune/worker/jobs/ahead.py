"""What the batches that a loader's workers hold ready would take of the host's memory, page-locked or shared.

Takes batches of one configuration and another one to be tried; refuses what would fill the memory.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import psutil

from autotune.analysis.expectation import PINNING_KINDS
from autotune.phrasing import say_mib
from autotune.protocol.messages import Job
from autotune.settings.training_config import TORCH_PREFETCH_FACTOR, TrainingConfig
from autotune.worker.measure.step import tensors_of
from autotune.worker.setup.device import Device
from autotune.worker.setup.machine import usable_ram_bytes

__all__ = ["refuse_too_much_ahead"]

_AHEAD_SHARE = 0.5  # of what is free: our own convention


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a batch in shared memory, and page-locked."""

    shared: int
    pinned: int


def refuse_too_much_ahead(batches: Sequence[Any], config: TrainingConfig, job: Job, device: Device) -> None:
    """Workers hold batches ready in shared memory, and nothing refuses them until that is full.

    Raises:
        ValueError: batches like these, which are of the job's own configuration, but as large and as many as of this
            one, would take too much of what is free.
    """
    ahead = config.num_workers * (config.prefetch_factor or TORCH_PREFETCH_FACTOR)
    growth = config.micro_batch_size / job.config.micro_batch_size
    shared = ahead * max(_sizes_of(batch, growth).shared for batch in batches)
    pinned = 0
    if config.pin_memory and device.kind in PINNING_KINDS:
        pinned = ahead * max(_sizes_of(batch, growth).pinned for batch in batches)
    for expected, free in ((shared, _free_shared_bytes()), (shared + pinned, _free_ram_bytes(job, device))):
        if expected > _AHEAD_SHARE * free:
            raise ValueError(f"batches ahead might take {say_mib(expected)} of the {say_mib(free)} that are free")


def _sizes_of(batch: Any, growth: float) -> _Sizes:
    """What a batch with so many times the samples takes.

    torch's allocator of page-locked memory takes a power of two for each tensor, and keeps it once the batch has gone
    to the device; those that follow lie in shared memory meanwhile.
    Source: aten/src/ATen/core/CachingHostAllocator.h (allocate, free).
    """
    sizes = [ceil(growth * tensor.nbytes) for tensor in tensors_of(batch)]
    return _Sizes(sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size > 0))


def _free_ram_bytes(job: Job, device: Device) -> int:
    """Bytes of RAM that are free now, and no more than may be used at all."""
    free = min(psutil.virtual_memory().available, usable_ram_bytes())
    if not device.has_own_memory and job.limit_bytes is not None:
        free = min(free, job.limit_bytes)
    return free


def _free_shared_bytes() -> int:
    """Bytes of shared memory that are free now."""
    with suppress(OSError):  # not on Linux
        return shutil.disk_usage("/dev/shm").free  # noqa: S108 - where torch's workers put batches
    return sys.maxsize
