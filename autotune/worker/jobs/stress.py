"""Train on batches of the largest samples, and measure the peak of memory.

In: a StressJob. Out: StressFigures. Samples are sized for a short while only: the largest batch
consists of the largest samples sized by then. Loader workers read them if there are any: a file
opened in this process would be shared by all workers forked from it.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from autotune.apply.loader import drawn_by, fixed_batches, loader_like
from autotune.config.plan import Workload
from autotune.config.tf_data import TfLoader
from autotune.messages.trials import largest_samples_not_batched
from autotune.note import Note
from autotune.protocol.messages import StressJob
from autotune.records.trial import StressFigures, sample_scan_s
from autotune.worker.batch import Reused, batch_bytes, leaves_of
from autotune.worker.build import build_dataset, build_model, is_stream, length_of
from autotune.worker.device import Device
from autotune.worker.failures import cause_of, shortage_of
from autotune.worker.feed import Feed
from autotune.worker.loader import build_loader
from autotune.worker.step import StepTrainer, open_trainer

# The batch of the largest samples


_MOST_SIZED = 10_000
"""Number of samples to size at most; the time usually ends it sooner. Source: our convention."""
_MOST_DRAWN = 100_000
"""Length in batches of an epoch up to which all of it is drawn, not loaded. Source: our
convention."""
_SIZED_AT_ONCE = 8
"""Number of samples that a worker sizes before it answers. Source: our convention."""


@dataclass(slots=True, kw_only=True)
class LargestBatch:
    """A batch of the largest samples that were sized; few samples are repeated."""

    sizes: list[int]
    """Bytes of each sample, in the order in which they were sized."""
    batch: Any = None
    note: Note | None = None
    """Note on the reason if there is no such batch."""


def largest_batch(
    workload: Workload, loader: DataLoader[Any] | TfLoader, batch_size: int, stop_at: float
) -> LargestBatch:
    """Size samples for a while, and put the largest into one batch.

    If a batch sampler of the user's, or a tf.data pipeline, makes the batches, return the largest
    of these, after padding (its length times its largest sample).

    Args:
        workload: The workload.
        loader: Its loader.
        batch_size: Number of samples in the batch.
        stop_at: Time of perf_counter at which to stop sizing.

    Raises:
        Exception: The memory is too small to hold the batch, see `out_of_memory`.
    """
    found = LargestBatch(sizes=[])
    try:
        if isinstance(loader, TfLoader) or loader.batch_sampler is None:
            found.batch = _largest_made(found, loader, stop_at)
        elif is_stream(loader.dataset):
            items = _of_stream(found, iter(loader.dataset), batch_size, stop_at)
            found.batch = loader.collate_fn(items)
        else:
            chosen = _chosen(found, workload, loader, batch_size, stop_at)
            with closing(_over(loader, [chosen])) as batches:
                found.batch = next(batches)
    except Exception as error:
        # The user's code may raise anything: such samples may never meet in training.
        if shortage_of(error) is not None:
            raise
        found.note = largest_samples_not_batched(cause_of(error))
    return found


def bytes_of(item: Any) -> int:
    """Return the bytes of a sample's tensors, arrays, numbers and texts, in any containers."""
    return sum(map(_leaf_bytes, leaves_of(item)))


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return int(leaf.nbytes)
    if isinstance(leaf, str | bytes | bytearray):
        return len(leaf)
    # int64 or float64, as torch's default_collate makes of a number
    return 8 if isinstance(leaf, int | float | complex | np.generic) else 0


def _largest_made(found: LargestBatch, loader: DataLoader[Any] | TfLoader, stop_at: float) -> Any:
    """Return the largest of the first batches that a pipeline, or a dataset, makes itself.

    A pipeline's samples count as equal parts of their batch.
    """
    feed = Feed(loader)
    largest = None
    largest_bytes = -1
    taken = feed.start()
    try:
        while True:
            size = bytes_of(taken.batch)
            count = taken.samples if isinstance(loader, TfLoader) else 1
            found.sizes.extend([size // count] * count)
            if size > largest_bytes:
                largest = taken.batch
                largest_bytes = size
            if len(found.sizes) >= _MOST_SIZED or perf_counter() > stop_at:
                return largest
            taken = feed.take()
            if taken.is_restart:
                return largest
    finally:
        feed.stop()


def _of_stream(found: LargestBatch, items: Iterator[Any], count: int, stop_at: float) -> list[Any]:
    """Return the largest of a stream's first samples; no more than a batch is held in memory.

    If the time sufficed for less than a batch, samples are repeated in turn.
    """
    kept: list[tuple[int, int, Any]] = []
    for item in islice(items, max(_MOST_SIZED, count)):
        size = bytes_of(item)
        found.sizes.append(size)
        push = heapq.heappush if len(kept) < count else heapq.heappushpop
        # The number breaks ties, so that items are never compared.
        push(kept, (size, -len(found.sizes), item))
        if perf_counter() > stop_at:
            return list(islice(cycle(item for _, _, item in sorted(kept, reverse=True)), count))
    # A stream with less than a batch gives no more in training either.
    return [item for _, _, item in kept]


def _chosen(
    found: LargestBatch,
    workload: Workload,
    loader: DataLoader[Any],
    batch_size: int,
    stop_at: float,
) -> list[Any]:
    """Return the indices of the samples in the largest batch."""
    # Choose among the user's own batches by their size after padding.
    if workload.batch_sampler is not None or fixed_batches(loader):
        batches = _some_batches(loader, stop_at)
        sizes = _sizes(found, loader, batches, stop_at)
        padded = [len(own) * max(own, default=0) for own in sizes]
        return batches[padded.index(max(padded))]

    # Otherwise put the largest samples together, no more than training puts into a batch.
    indices = _indices(loader, max(_MOST_SIZED, batch_size))
    groups = [indices[at : at + _SIZED_AT_ONCE] for at in range(0, len(indices), _SIZED_AT_ONCE)]
    sized = [size for group in _sizes(found, loader, groups, stop_at) for size in group]
    largest = heapq.nlargest(batch_size, range(len(sized)), key=lambda at: sized[at])
    in_turn = cycle(indices[at] for at in largest)
    return list(islice(in_turn, min(batch_size, len(indices))))


def _some_batches(loader: DataLoader[Any], stop_at: float) -> list[list[Any]]:
    """Return batches of a user's batch sampler, enough for the samples to be sized.

    If the epoch is short enough they come from all of it: if it is sorted by length, its largest
    batches are at its end.
    """
    drawn = islice(loader.batch_sampler or (), _MOST_SIZED)
    length = length_of(loader.batch_sampler)
    if length is not None and length <= _MOST_DRAWN:
        epoch = list[Any]()
        # The sampler may go on beyond its stated length.
        for batch in islice(loader.batch_sampler or (), length):
            epoch.append(batch)
            if perf_counter() > stop_at:
                break
        drawn = islice(random.sample(epoch, len(epoch)), _MOST_SIZED)
    batches = list[list[Any]]()
    samples = 0
    for batch in drawn:
        batches.append(list(batch))
        samples += len(batches[-1])
        if samples >= _MOST_SIZED:
            break
    return batches


def _sizes(
    found: LargestBatch, loader: DataLoader[Any], batches: Sequence[Any], stop_at: float
) -> list[list[int]]:
    """Return the bytes of each sample of each batch, within the limits of time and samples."""
    sizes = []
    with closing(_over(loader, batches, _bytes_of_each)) as sized:
        for own in sized:
            sizes.append(own)
            found.sizes.extend(own)
            if len(found.sizes) >= _MOST_SIZED or perf_counter() > stop_at:
                break
    return sizes


def _bytes_of_each(items: Sequence[Any]) -> list[int]:
    return [bytes_of(item) for item in items]


def _over(
    loader: DataLoader[Any], batches: Sequence[Any], collate: Callable[[Any], Any] | None = None
) -> Generator[Any, None, None]:
    """Yield the batches that a copy of a loader makes; end its workers when closed.

    Args:
        loader: The loader to copy.
        batches: Indices of each batch.
        collate: Collate function; None for a loader of the same class with its own one, which may
            do more than collate.
    """
    settings = {
        "num_workers": loader.num_workers,
        "prefetch_factor": None,
        "persistent_workers": False,
    }
    if collate is None:
        made = loader_like(loader, settings, 1, batch_sampler=batches)
    else:
        made = DataLoader(
            loader.dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        )
    feed = Feed(made)
    try:
        yield feed.start().batch
        yield from (feed.take().batch for _ in batches[1:])
    finally:
        feed.stop()


def _indices(loader: DataLoader[Any], most: int) -> list[Any]:
    """Return distinct indices of the dataset: random ones, or those that the user's sampler draws."""
    length = length_of(loader.dataset)
    drawn = drawn_by(loader)
    if length is None or not isinstance(drawn, RandomSampler | SequentialSampler):
        return list(islice(drawn, most))
    return random.sample(range(length), min(length, most))


# The stress run: ordinary batches and the largest one in turn


_MIN_STEPS = 3
"""Optimizer steps that a peak of memory covers at least. Source: CONTRIBUTING, Rules of
measuring."""


def train_on_largest(
    workload: Workload, job: StressJob, device: Device, scratch: Path, ends_at: float
) -> StressFigures:
    """Train for `job.train_s` seconds, and at least three optimizer steps.

    Args:
        workload: The workload.
        job: The job.
        device: The device that trains.
        scratch: A folder for temporary files.
        ends_at: Time of perf_counter at which the training is cut short.

    Raises:
        Exception: The memory is too small for the largest samples, see `out_of_memory`.
        WorkloadFault: Something about the workload can't be used.
    """
    # Find the largest batch, before the loader starts for training.
    loader = build_loader(workload, build_dataset(workload), job.config, scratch)
    now = perf_counter()
    scan_until = now + sample_scan_s(ends_at - now)
    largest = largest_batch(workload, loader, job.config.micro_batch_size, scan_until)

    # Train on it.
    model = build_model(workload, job.config, device)
    feed = Feed(loader)
    first = feed.start().batch
    trainer = open_trainer(workload, model, first, job.config, device)
    return stress_figures(trainer, largest, first, feed, job, ends_at)


def stress_figures(
    trainer: StepTrainer,
    largest: LargestBatch,
    first: Any,
    feed: Feed,
    job: StressJob,
    ends_at: float,
) -> StressFigures:
    """Train on the largest batch and the loader's own ones in turn, and return the figures.

    Args:
        trainer: The trainer.
        largest: The largest batch, or the reason why there is none.
        first: First batch of the feed.
        feed: The feed of the loader's own batches.
        job: The job.
        ends_at: Time of perf_counter at which the training is cut short.
    """
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
        note=largest.note,
        memory=device.peak_memory(retries),
    )


def _in_turns(first: Any, feed: Feed, largest: LargestBatch) -> Iterator[Any]:
    """Yield the largest batch and the loader's batches, in turn."""
    ordinary = first
    again = Reused([largest.batch])
    while True:
        if largest.note is None:
            yield next(again)
        yield ordinary
        ordinary = feed.take().batch


def _train(
    trainer: StepTrainer, batches: Iterator[Any], until: float, ends_at: float
) -> tuple[int, int | None]:
    """Train until a time of perf_counter, and at least three steps with each kind of batch.

    Returns:
        The number of optimizer steps, and the allocator's retries up to the end of the first one:
        retries while the device warms up (by cuDNN's trials of algorithms) are no lack of memory.
    """
    steps = 0
    retries = trainer.device.alloc_retries()
    for taken, batch in enumerate(batches, 1):
        trainer.train(batch)
        if trainer.accumulated:
            continue
        trainer.device.synchronize()
        if steps == 0:
            # Cap again: the kernels were loaded meanwhile, outside the allocator.
            trainer.device.cap_memory()
            retries = trainer.device.alloc_retries()
        steps += 1
        now = perf_counter()
        if now > ends_at or (now > until and steps >= _MIN_STEPS and taken >= 2 * _MIN_STEPS):
            break
    return steps, retries
