"""Measure the costs inside a loader: an item, collating, transfer from a worker, pinning, copying.

In: a trial's loader, after its workers have ended. Out: LoaderCosts. Items are made in this
process, one after the other, with one thread for torch's operations, as in a loader worker: the
figures are those of one worker that has a core to itself.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, cycle, islice, repeat
from math import inf
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset

from autotune.apply.cores import usable_cores
from autotune.config.tf_data import TfLoader
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import extra_failed
from autotune.note import Note
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import Ceiling
from autotune.settings_table import SETTINGS
from autotune.worker.batch import batch_bytes, copied, pinned, tensors_of, unwrapped
from autotune.worker.build import is_stream
from autotune.worker.device import bytes_from_disk
from autotune.worker.failures import cause_of
from autotune.worker.feed import Feed
from autotune.worker.side_alone import loader_alone
from autotune.worker.step import torch_threads

# A tf.data pipeline: it returns whole batches, so a sample's time is its share of its batch's,
# which includes collating, transfer and pinning


def measure_pipeline(
    loader: TfLoader, config: TrainingConfig, *, ends_at: float = inf
) -> LoaderCosts:
    """Time samples for about a second, with one thread for the whole pipeline.

    Args:
        loader: The trial's loader; its pipeline is built again.
        config: The configuration that the loader was built for.
        ends_at: Time of perf_counter after which no batch is begun.
    """
    plain = config.model_copy(
        update={setting.name: setting.neutral for setting in SETTINGS if setting.is_of_loader}
    )
    alone = TfLoader(loader.dataset, plain, threads=1)
    batches = chain.from_iterable(iter(partial(iter, alone), None))
    fetchers = repeat(lambda: [next(batches)] * alone.samples)
    timed = time_items(fetchers, 1, ends_at)
    # `kept` holds the first batch once for each of its samples.
    return costs_of(timed, timed.kept[0], len(timed.kept), collate_s=0.0)


# A DataLoader


# Numbers without a source are our convention.
_ENOUGH_ITEMS = 256
"""Number of items after which to stop; two or three of them are above the 99th percentile."""
_LEAST_S = 0.25
"""Seconds to time cheap items at least: a reader may pause now and then."""
_MOST_ITEMS = 50_000
"""Number of items to time at most, which bounds the memory of their times."""
_FEWEST_ITEMS = 5
"""Number of slow items to time at least, however long they take."""
_ITEMS_S = 1.0
"""Seconds to time slow items."""
_TAIL_FACTOR = 8.0
"""Multiple of the median above which an item is slow; see LoaderCosts.slow_tail_fraction."""
_REPEATS = 3
"""Repeats of collating, pinning and copying a batch."""
_REPEATS_S = 0.3
"""Seconds after which there are no more repeats."""
_TRANSFER_S = 0.2
"""Seconds to time the transfer: as long as a window's block."""


def measure_items(
    loader: DataLoader[Any],
    config: TrainingConfig,
    *,
    note: Callable[[Note], None],
    to_device: Callable[[Any], object] | None = None,
    ends_at: float = inf,
) -> LoaderCosts:
    """Time the parts of a loader's work, for about two seconds.

    CPU time is that of this whole process, all threads of the user's decoders included, and of
    processes that an item starts and waits for. torch's own threads are idle meanwhile, without
    spinning.

    Args:
        loader: The trial's loader; it is not iterated.
        config: The configuration that the loader was built for.
        note: Called with a note for each part other than the items that fails, and is left out.
        to_device: Function that copies a batch to the accelerator and waits for it; None if pinning
            has no effect.
        ends_at: Time of perf_counter after which no item is begun.
    """

    def tried(stage: str, measure: Callable[[], float]) -> float | None:
        """Return a measurement; None, with a note, if the user's code or objects raise."""
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the items' costs are worth keeping
            note(extra_failed(stage, cause=cause_of(error)))
            return None

    # Time items, then collating some of them.
    with torch_threads(1):  # as torch sets it in loader workers
        timed = time_items(item_fetchers(loader), config.micro_batch_size, ends_at)
        batch_items: Any = list(islice(cycle(timed.kept), config.micro_batch_size))
        if isinstance(batch_items[0], WholeBatch):
            batch_items = batch_items[0].batch

        def collate() -> Any:
            own = list(batch_items) if isinstance(batch_items, list) else batch_items
            return loader.collate_fn(own)

        begun = perf_counter()
        batch = collate()
        once_s = perf_counter() - begun
        collate_s = tried("collate_again", lambda: _mean_s(collate)) or once_s

    # Time the other parts of a batch's way to the device.
    costs: dict[str, float | None] = {}
    if config.num_workers:
        costs["transfer_s"] = tried(
            "transfer", lambda: _transfer_s(loader, config, batch_items, batch, collate_s, ends_at)
        )
    if config.pin_memory and torch.accelerator.is_available():
        costs["pin_s"] = tried("pinning", lambda: _warm_mean_s(pinned, batch))
    if to_device is not None:
        costs["copy_s"] = tried("copy", lambda: _warm_mean_s(to_device, batch))
        costs["pinned_copy_s"] = tried(
            "pinned_copy", lambda: _warm_mean_s(to_device, pinned(batch))
        )
    return costs_of(timed, batch, config.micro_batch_size, collate_s=collate_s, **costs)


def costs_of(
    timed: TimedItems, batch: Any, samples: int, *, collate_s: float, **others: float | None
) -> LoaderCosts:
    """Return the costs of timed items, together with other costs.

    Args:
        timed: The items.
        batch: A batch of such items.
        samples: Number of samples in it.
        collate_s: Seconds to collate it.
        others: Further fields of LoaderCosts.
    """
    seconds = timed.seconds
    item_bytes = batch_bytes([batch])
    tensors = tensors_of(batch)
    float32_bytes = sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.float32)
    return LoaderCosts(
        items=len(seconds),
        item_s=fmean(seconds),
        item_cpu_s=timed.cpu_s / len(seconds),
        item_others_cpu_s=timed.others_cpu_s / len(seconds),
        item_delayed_s=timed.delayed_s / len(seconds),
        item_median_s=median(seconds),
        item_p99_s=float(np.quantile(seconds, 0.99, method="inverted_cdf")),
        item_slowest_s=max(seconds),
        slow_tail_fraction=slow_tail(seconds),
        disk_bytes_per_item=timed.disk_bytes / len(seconds),
        item_bytes=item_bytes / samples,
        float32_fraction=float32_bytes / item_bytes if item_bytes else None,
        batch_tensors=len(tensors),
        collate_s=collate_s,
        **others,
    )


def with_batch_rates(
    costs: LoaderCosts, ceiling: Ceiling, config: TrainingConfig, local_ranks: int
) -> LoaderCosts:
    """Add the loader's batches/s per worker and per core.

    Args:
        costs: The costs.
        ceiling: The loader's throughput alone.
        config: The configuration that the loader was built for.
        local_ranks: Number of ranks on this host, which share its cores.
    """
    batches_per_s = ceiling.batches / ceiling.seconds
    sharing = 1 if config.numa_binding == "exclusive" else local_ranks
    workers = max(1, config.num_workers)
    cores = max(1, usable_cores() // sharing)
    rates = {
        "batches_per_worker_per_s": batches_per_s / workers,
        "batches_per_core_per_s": batches_per_s / cores,
    }
    return costs.model_copy(update=rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedItems:
    """Items with their times."""

    kept: list[Any]
    """Some of the items themselves."""
    seconds: list[float]
    """Seconds of each item."""
    cpu_s: float
    """CPU seconds of all items, in all threads and child processes."""
    own_cpu_s: float
    """CPU seconds of all items in the calling thread."""
    others_cpu_s: float
    """CPU seconds of all items in this process's other threads."""
    delayed_s: float = 0.0
    """Seconds in which the calling thread could run, but other threads had its core."""
    disk_bytes: int
    """Bytes read from the disk for all items."""


def time_items(
    fetchers: Iterator[Callable[[], list[Any]]], most_kept: int, ends_at: float
) -> TimedItems:
    """Time items until there are enough; the first draw, which may open files, is left out.

    Args:
        fetchers: Functions that make the next item, or the next few, without end.
        most_kept: Number of items to keep.
        ends_at: Time of perf_counter after which no item is begun.
    """
    kept = next(fetchers)()
    seconds = list[float]()
    cpu_s = 0.0
    own_cpu_s = 0.0
    began_children_s = _children_cpu_s()
    began_disk = bytes_from_disk()
    began_delayed_s = delayed_s()
    begun = perf_counter()
    for draw in fetchers:
        asked_own_s = thread_time()
        asked_cpu_s = process_time()
        asked = perf_counter()
        came = draw()
        now = perf_counter()
        now_cpu_s = process_time()
        now_own_s = thread_time()
        cpu_s = cpu_s + now_cpu_s - asked_cpu_s
        own_cpu_s = own_cpu_s + now_own_s - asked_own_s
        # Items of one draw share its time.
        seconds += [(now - asked) / len(came)] * len(came)
        kept += came[: max(0, most_kept - len(kept))]
        if _is_enough(len(seconds), now - begun) or now > ends_at:
            break
    others_cpu_s = max(0.0, cpu_s - own_cpu_s)
    # A thread works no longer than its time, to which reading the clocks adds for cheap items.
    cpu_s = others_cpu_s + min(own_cpu_s, sum(seconds))
    cpu_s += _children_cpu_s() - began_children_s
    disk_bytes = bytes_from_disk() - began_disk
    return TimedItems(
        kept=kept,
        seconds=seconds,
        cpu_s=cpu_s,
        own_cpu_s=own_cpu_s,
        others_cpu_s=others_cpu_s,
        delayed_s=min(delayed_s() - began_delayed_s, sum(seconds)),
        disk_bytes=disk_bytes,
    )


def delayed_s() -> float:
    """Return the seconds that this thread has waited for a core so far; 0 where unknown.

    Source: docs.kernel.org, "Scheduler Statistics", /proc/<pid>/schedstat: the second number, in
    nanoseconds.
    """
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def _is_enough(done: int, spent_s: float) -> bool:
    """Return whether the items timed so far suffice for one item's cost, rare pauses included."""
    if done >= _MOST_ITEMS or (done >= _ENOUGH_ITEMS and spent_s >= _LEAST_S):
        return True
    return spent_s > _ITEMS_S and (done >= _FEWEST_ITEMS or spent_s > _FEWEST_ITEMS * _ITEMS_S)


@dataclass(frozen=True, slots=True)
class _Made:
    """A dataset whose batches are made already."""

    items: Any
    """Items that the collate function gets."""

    def __getitems__(self, _: list[int]) -> Any:
        return self.items


def _transfer_s(
    loader: DataLoader[Any],
    config: TrainingConfig,
    items: Any,
    batch: Any,
    collate_s: float,
    ends_at: float,
) -> float:
    """Measure the seconds of a batch's way from one worker to this process.

    The worker makes the same batch from finished items over and over: its work in training, without
    the items. The time of collating, which fills the shared memory, is subtracted. A function of
    the user's that takes longer than copying a finished batch is left out: the difference would be
    noise.

    Args:
        loader: The trial's loader.
        config: The configuration that it was built for.
        items: What its collate function gets.
        batch: What that makes of them.
        collate_s: Seconds of this.
        ends_at: Time of perf_counter after which no batch is begun.
    """
    collate = loader.collate_fn
    if not is_torchs(unwrapped(loader).collate_fn):
        copy_s = _warm_mean_s(copied, batch)
        if copy_s < collate_s:
            items, collate, collate_s = batch, copied, copy_s
    dataset: Any = _Made(items)  # torch asks it for its items alone
    feed = Feed(
        DataLoader(
            dataset,
            batch_sampler=repeat([0]),
            num_workers=1,
            collate_fn=collate,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=10.0,
        )
    )
    try:
        feed.start()
        alone = config.model_copy(update={"num_workers": 1, "prefetch_factor": None})
        ceiling = loader_alone(feed, alone, seconds=_TRANSFER_S, ends_at=ends_at)
    finally:
        feed.stop()
    return max(0.0, ceiling.seconds / ceiling.batches - collate_s)


def is_torchs(collate: Any) -> bool:
    """Return whether a collate function is one of torch's own."""
    return str(getattr(collate, "__module__", "")).startswith("torch.utils.data.")


def _warm_mean_s(work: Callable[[Any], Any], batch: Any) -> float:
    """Measure the mean seconds of a few runs, after one in which torch's allocators take memory."""
    work(batch)
    return _mean_s(lambda: work(batch))


def _mean_s(work: Callable[[], Any]) -> float:
    """Measure the mean seconds of a few runs; of only one if it is long."""
    begun = perf_counter()
    done = 0
    spent_s = 0.0
    while done < _REPEATS and spent_s <= _REPEATS_S:
        work()
        done += 1
        spent_s = perf_counter() - begun
    return spent_s / done


def slow_tail(seconds: list[float]) -> float:
    """Return the share of all time that items above eight medians take."""
    total_s = sum(seconds)
    if total_s <= 0:
        return 0.0
    from_s = _TAIL_FACTOR * median(seconds)
    return min(1.0, sum(item_s for item_s in seconds if item_s > from_s) / total_s)


def _children_cpu_s() -> float:
    """Return the user and system CPU seconds of child processes that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def item_fetchers(
    loader: DataLoader[Any], most: int | None = None
) -> Iterator[Callable[[], list[Any]]]:
    """Yield functions that make the next item, without end.

    If the dataset makes whole batches (`__getitems__`), each function makes the next few items.

    Args:
        loader: The loader; it is not iterated.
        most: Number of items that one function makes at most; None for as many as the loader asks
            for at once.
    """
    dataset: Any = loader.dataset
    if is_stream(dataset):
        items = _items_without_end(dataset)
        return repeat(lambda: [next(items)])
    indices = _indices(loader)
    if makes_batches(dataset):
        size = most or loader.batch_size or 5
        return (partial(_at_once, dataset, list(islice(indices, size))) for _ in count())
    return (partial(_item, dataset, index) for index in indices)


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A batch that a dataset's `__getitems__` returns as a whole, in place of a list of its items."""

    batch: Any


def _at_once(dataset: Any, indices: list[Any]) -> list[Any]:
    """Return items that a dataset makes at once; for each of them the whole batch if it is no list of them."""
    made = dataset.__getitems__(indices)
    if isinstance(made, list) and len(made) == len(indices):
        return made
    return [WholeBatch(made)] * len(indices)


def _item(dataset: Any, index: Any) -> list[Any]:
    return [dataset[index]]


def _items_without_end(dataset: Any) -> Iterator[Any]:
    """Yield the items of an iterable, begun again at its end by the item that needs it."""
    nothing = object()
    while True:
        item = nothing
        for item in dataset:
            yield item
        if item is nothing:
            raise RuntimeError(
                "an iterable dataset must give an item each time it is begun, but gave none"
            )


def makes_batches(dataset: Any) -> bool:
    """Return whether the dataset makes whole batches; a Subset does if the dataset inside it does."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield indices as the loader draws them, without end; a shuffle draws without a permutation."""
    if type(loader.sampler) is RandomSampler and loader.batch_size is not None:
        size = len(loader.sampler.data_source)
        return (random.randrange(size) for _ in count())  # noqa: S311 - no secret
    if loader.batch_sampler is None:
        return chain.from_iterable(repeat(loader.sampler))
    batches = unwrapped(loader).batch_sampler  # a counting wrapper would count these as the feed's
    return chain.from_iterable(chain.from_iterable(repeat(batches)))
