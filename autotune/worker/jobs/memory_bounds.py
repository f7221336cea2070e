"""What is not even tried, since it might fill the host's memory: loaders that hold too much ready, batches too large.

Takes what was measured so far and a configuration to try; hands on a Note that says why not, or None. Where memory is
the host's, nothing else refuses it until it is full and the system ends the whole job.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import psutil

from autotune.analysis.forecast.expectation import PINNING_KINDS
from autotune.analysis.memory.model import MemoryModel, Peak
from autotune.analysis.statistics import t_quantile
from autotune.messages.trials import batch_too_large, queue_too_large
from autotune.note import Note
from autotune.policy import POLICY
from autotune.protocol.jobs import CurvesJob
from autotune.settings.training_config import TrainingConfig
from autotune.worker.measure.batch import tensors_of
from autotune.worker.setup.device import Device
from autotune.worker.setup.machine import usable_ram_bytes

__all__ = ["refusal_of_batch", "refusal_of_queue"]


def refusal_of_queue(batches: Iterable[Any], config: TrainingConfig, job: CurvesJob, device: Device) -> Note | None:
    """Why a loader whose workers might fill the memory is not tried; None where it is.

    They hold batches ready in shared memory, or page-locked; these may take no more than a part of what is free.

    Args:
        batches: Batches of the job's own configuration.
        config: The loader's settings: its batches are so much larger, and so many lie ready.
        job: The job; its limit counts where memory is the host's.
        device: What is trained on.
    """
    ready = config.num_workers * config.batches_per_worker
    growth = config.micro_batch_size / job.config.micro_batch_size
    sizes = [_batch_sizes(batch, growth) for batch in batches]
    shared = ready * max(shared for shared, _ in sizes)
    pins = config.pin_memory and device.kind in PINNING_KINDS
    pinned = ready * max(pinned for _, pinned in sizes) if pins else 0
    for expected, free in ((shared, _free_shared_bytes()), (shared + pinned, _free_ram_bytes(job, device))):
        if expected > POLICY.trials.queue_share * free:
            return queue_too_large(expected_bytes=expected, free_bytes=free)
    return None


def refusal_of_batch(
    peaks: Sequence[Peak], config: TrainingConfig, limit_bytes: int | None, device: Device
) -> Note | None:
    """Why a configuration that might pass the limit is not tried; None where it is.

    `peaks` were measured in this process, which has no loader workers now; there is at least one.
    """
    if device.has_own_memory or limit_bytes is None:
        return None
    memory = MemoryModel(observed=peaks, has_workers_in_ram=False)
    if memory.chance_to_fit([config], limit_bytes)[0] >= POLICY.trials.sure_to_fit:
        return None
    expected, sd = memory.expect([config])
    might_be = float(expected[0] + t_quantile(POLICY.trials.sure_to_fit, memory.degrees_of_freedom) * sd[0])
    return batch_too_large(expected_bytes=might_be, limit_bytes=limit_bytes)


def _batch_sizes(batch: Any, growth: float) -> tuple[int, int]:
    """Bytes of a batch with so many times the samples: in shared memory, and page-locked.

    torch's allocator of page-locked memory takes a power of two for each tensor, and keeps it once the batch has gone
    to the device; the batches that follow lie in shared memory meanwhile.
    Source: aten/src/ATen/core/CachingHostAllocator.h (allocate, free).
    """
    sizes = [ceil(growth * tensor.nbytes) for tensor in tensors_of(batch)]
    return sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size > 0)


def _free_ram_bytes(job: CurvesJob, device: Device) -> int:
    """Bytes of RAM that are free now, and no more than may be used at all."""
    limit_bytes = None if device.has_own_memory else job.process.limit_bytes
    return min(psutil.virtual_memory().available, usable_ram_bytes(), limit_bytes or sys.maxsize)


def _free_shared_bytes() -> int:
    """Bytes of shared memory that are free now."""
    with suppress(OSError):  # not on Linux
        return shutil.disk_usage("/dev/shm").free  # noqa: S108 - where torch's workers put batches
    return sys.maxsize
