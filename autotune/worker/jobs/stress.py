"""The stress run: trains on ordinary batches and on a batch of the largest samples in turns, and reads the peak memory.

Takes a StressJob; hands on StressFigures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from autotune.protocol.jobs import StressJob
from autotune.records.stress_check import StressFigures, sample_scan_s
from autotune.settings.workload import Workload
from autotune.worker.jobs.largest_batch import LargestBatch, largest_batch
from autotune.worker.measure.batch import Reused, batch_bytes
from autotune.worker.measure.feed import Feed
from autotune.worker.measure.step import StepTrainer, open_trainer
from autotune.worker.setup.build import build_dataset, build_model
from autotune.worker.setup.device import Device
from autotune.worker.setup.loader import build_loader

__all__ = ["stress_figures", "train_on_largest"]

_MIN_STEPS = 3  # peaks of memory cover at least three optimizer steps (CONTRIBUTING, Rules of measuring)


def train_on_largest(
    workload: Workload, job: StressJob, device: Device, scratch: Path, ends_at: float
) -> StressFigures:
    """Train for `job.train_s` seconds, and at least three optimizer steps; `ends_at` cuts that short.

    Raises:
        Exception: any that means that the memory does not suffice for the largest samples, see `out_of_memory`.
        WorkloadFault: something about the workload can't be used.
    """
    loader = build_loader(workload, build_dataset(workload), job.config, scratch)
    now = perf_counter()
    largest = largest_batch(workload, loader, job.config.micro_batch_size, now + sample_scan_s(ends_at - now))
    model = build_model(workload, job.config, device)
    feed = Feed(loader)
    first = feed.start().batch
    trainer = open_trainer(workload, model, first, job.config, device)
    return stress_figures(trainer, largest, first, feed, job, ends_at)


def stress_figures(
    trainer: StepTrainer, largest: LargestBatch, first: Any, feed: Feed, job: StressJob, ends_at: float
) -> StressFigures:
    """The figures of training on the largest batch and the loader's own in turns; `first` is the loader's first."""
    gc.collect()
    device = trainer.device
    device.reset_peak()
    begun = perf_counter()
    steps, retries = _train(trainer, _in_turns(first, feed, largest), begun + job.train_s, ends_at)
    return StressFigures(
        steps=steps,
        seconds=perf_counter() - begun,
        items_seen=len(largest.sizes),
        median_item_bytes=median(largest.sizes) if largest.sizes else 0.0,
        largest_item_bytes=max(largest.sizes, default=0),
        largest_batch_bytes=batch_bytes([largest.batch]),
        remark=largest.remark,
        memory=device.peak_memory(retries),
    )


def _in_turns(first: Any, feed: Feed, largest: LargestBatch) -> Iterator[Any]:
    """Batches of the largest samples and of the loader, in turns."""
    ordinary, again = first, Reused([largest.batch])
    while True:
        if largest.remark is None:
            yield next(again)
        yield ordinary
        ordinary = feed.take().batch


def _train(trainer: StepTrainer, batches: Iterator[Any], until: float, ends_at: float) -> tuple[int, int | None]:
    """Train until a time of perf_counter, and at least three steps with each kind of batch.

    Returns the optimizer's steps, and the allocator's retries up to the end of the first of them: a device that settles
    down, by cuDNN's trials among others, is not short of memory.
    """
    steps, retries = 0, trainer.device.alloc_retries()
    for taken, batch in enumerate(batches, 1):
        trainer.train(batch)
        if trainer.accumulated:
            continue
        trainer.device.synchronize()
        if steps == 0:
            trainer.device.cap_memory()  # again: the kernels have been loaded, outside the allocator
            retries = trainer.device.alloc_retries()
        steps += 1
        now = perf_counter()
        if now > ends_at or (now > until and steps >= _MIN_STEPS and taken >= 2 * _MIN_STEPS):
            break
    return steps, retries
