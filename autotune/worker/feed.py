# ruff: noqa: SLF001 - torch has no public way to ask for more batches
"""Deliver batches without end to the measuring loop, with the time each one took.

Comes in: a DataLoader or a tf.data loader. Goes out: `Delivery` after delivery, epoch after epoch,
and what is known of the loader: batches ready, items made by its workers, length of the queue.
"""

from __future__ import annotations

import ctypes
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.sharedctypes import RawArray
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from autotune.config.tf_data import TfBatches, TfData, TfLoader
from autotune.config.training_config import TORCH_PREFETCH_FACTOR
from autotune.worker.batch import length_of_batch, size_counter
from autotune.worker.build import WorkloadFault, length_of
from autotune.worker.loader import set_sampler_epoch

# Items made by a loader's workers, counted while they make them.

_STRIDE = 8
"""Integers from one slot to the next: a cache line, so that workers do not invalidate each other's
cache."""
_PART_S = 1e-3
"""Seconds of making the items that are counted at once, within a factor of 2. Counting takes half a
microsecond; slower items are counted one by one. Source: our own convention."""


@dataclass(slots=True)
class ItemCounter:
    """Counts the items that a loader's workers have made, while they make them.

    It gives the loader's own throughput, whatever is queued. The count lies in shared memory, one
    slot per worker, so that no lock is needed. Workers count in torch's fetcher, which is patched
    only in their processes, by a wrapped `worker_init_fn`: dataset, sampler and collate function
    stay as they are, and so does the loader once its iterator is made.

    The count is unknown if torch has other names for these parts, if the loader has workers of its
    own kind, or if the counts do not fit the batches that arrived.
    """

    _slots: Any = None
    _size: int = 0
    _given: Callable[[int], None] | None = None
    """The loader's own worker_init_fn, while it is wrapped."""
    _came: int = 0
    _largest: int = 0
    """Samples of the largest batch."""
    _most_batches: int = 0
    """Most batches that workers hold, unfinished ones included."""
    _is_known: bool = True

    def begin(self, loader: DataLoader[Any]) -> None:
        """Make the workers count that the loader starts before `end`; call it before iterating."""
        if loader.num_workers == 0 or not self._is_known:
            return
        if self._slots is None:
            self._size = loader.num_workers
            self._slots = RawArray(ctypes.c_longlong, self._size * _STRIDE)
        if self._size != loader.num_workers:
            self._is_known = False
            return
        self._most_batches = (loader.prefetch_factor or TORCH_PREFETCH_FACTOR) * loader.num_workers
        self.end(loader)  # if the last iterator could not be made
        self._given = loader.worker_init_fn
        loader.worker_init_fn = _Counting(self._slots, self._given)

    def end(self, loader: DataLoader[Any]) -> None:
        """Restore the loader's own worker_init_fn, once its iterator is made."""
        if isinstance(loader.worker_init_fn, _Counting):
            loader.worker_init_fn = self._given
        self._given = None

    def add(self, samples: int) -> None:
        """Count a batch that was taken."""
        self._came += samples
        self._largest = max(self._largest, samples)

    def made(self) -> int | None:
        """Return the items made so far; None if unknown.

        Each item is made before it is delivered, and workers hold few batches: counts outside of
        these bounds come from another way of loading, and are dropped.
        """
        if not self._is_known or self._slots is None or self._came == 0:
            return None
        made = sum(self._slots[::_STRIDE])
        self._is_known = self._came <= made <= self._came + self._most_batches * self._largest
        return made if self._is_known else None


@dataclass(frozen=True, slots=True)
class _Counting:
    """A worker_init_fn that calls the loader's own, then makes its worker count."""

    slots: Any
    then: Callable[[int], None] | None
    pid: int = field(default_factory=os.getpid)
    """The process that starts the workers."""

    def __call__(self, worker_id: int) -> None:
        """Start counting; torch calls it in each worker before it makes its fetcher."""
        if self.then is not None:
            self.then(worker_id)
        if os.getpid() != self.pid:  # else the workers are threads
            _count_in_fetchers(self.slots, worker_id * _STRIDE)


def _count_in_fetchers(slots: Any, at: int) -> None:
    """Count the items of this worker's dataset in a slot."""
    fetch = getattr(torch.utils.data._utils, "fetch", None)
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        kind: Any = getattr(fetch, name, None)
        if hasattr(kind, "fetch"):
            kind.fetch = _counted(kind.fetch, slots, at)


def _counted(plain: Callable[[Any, Any], Any], slots: Any, at: int) -> Callable[[Any, Any], Any]:
    """Return torch's `fetch` with a count of the items it makes; `at` is the index of the slot."""

    def fetch(self: Any, indices: Any) -> Any:
        info = get_worker_info()
        if info is None or self.dataset is not info.dataset:  # a loader inside the dataset
            return plain(self, indices)
        if not self.auto_collation:
            batch = plain(self, indices)
            slots[at] += length_of_batch(batch)
            return batch
        if isinstance(indices, Sized) and _takes_each(self.dataset):
            return plain(self, _Counted(indices, slots, at))
        batch = plain(self, indices)
        slots[at] += len(indices) if isinstance(indices, Sized) else 1
        return batch

    return fetch


def _takes_each(dataset: Any) -> bool:
    """Return whether torch itself iterates the indices of a batch, without the user's `__getitems__`."""
    if isinstance(dataset, IterableDataset):
        return True
    if type(dataset) is Subset:
        dataset = dataset.dataset
    return not getattr(dataset, "__getitems__", None)


class _Counted(Sequence[Any]):
    """The indices of a batch; each part of them is counted when the next one is asked for."""

    __slots__ = ("_at", "_indices", "_slots")

    def __init__(self, indices: Any, slots: Any, at: int) -> None:
        self._indices = indices
        self._slots = slots
        self._at = at

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return self._indices[at]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterable[Any]]:
        """Yield the indices in parts that take about _PART_S each, and count each part."""
        indices = iter(self._indices)
        size = 1
        begun = perf_counter()
        while part := tuple(islice(indices, size)):
            yield part
            self._slots[self._at] += len(part)
            ended = perf_counter()
            # Double or halve the part, so that it takes about _PART_S.
            if ended - begun < _PART_S / 2:
                size *= 2
            elif ended - begun > _PART_S * 2:
                size = max(1, size // 2)
            begun = ended


# Depth of the queue: one batch per worker at first, the configured number once it matters.

_WHILE_FULL = 2
"""Batches that each worker is asked for while none was missed: torch's default. Source: our own
convention."""


class QueueDepth:
    """Keep the queue of a loader short until a batch that is not ready is asked for.

    A loader slower than training then queues few batches that have to be drained, even if the first
    steps are slow; a faster one does not need more. The queue has its configured length from the
    start if torch has other names for its parts, or if the loader has an iterator of its own kind.

    Args:
        is_shallow: Ask each worker for one batch in advance at first; else the queue has its
            configured length throughout.
    """

    def __init__(self, *, is_shallow: bool) -> None:
        self._is_shallow = is_shallow
        self.may_deepen = False
        """The queue is short, and gets its configured length as soon as it is found empty."""

    @contextmanager
    def applied(self, loader: Any) -> Iterator[None]:
        """Make iterators with a short queue within this context, if it can be deepened later."""
        if not self._is_shallow or not _can_deepen(loader):
            yield
            return
        configured = loader.prefetch_factor
        # the least that keeps a worker busy; the iterator keeps the value
        loader.prefetch_factor = 1
        try:
            yield
        finally:
            loader.prefetch_factor = configured

    def allow_full_queue(self, loader: Any, iterator: Any) -> None:
        """Allow the queue its configured length, from the first time it is empty.

        Until then each worker gets a second batch to make. Workers that finished their first one
        thus all work again, as they do in the long run if the loader is the bottleneck.
        """
        self.may_deepen = self._is_shallow
        if self._is_shallow:
            deepen(loader, iterator, _WHILE_FULL)

    def fill(self, loader: Any, iterator: Any) -> None:
        """Give a queue that was found empty its configured length, if that is allowed by now."""
        if self.may_deepen:
            self.end()
            deepen(loader, iterator)

    def end(self) -> None:
        """Stop keeping queues short; `settle` deepens iterators that were made before."""
        self._is_shallow = self.may_deepen = False

    def settle(self, loader: Any, iterator: Any) -> None:
        """Deepen an iterator that was made with a short queue, once queues are no longer kept short."""
        if not self._is_shallow:
            deepen(loader, iterator)


def deepen(loader: Any, iterator: Any, most: int | None = None) -> None:
    """Ask each worker for the configured number of batches in advance.

    Call it in the thread that takes the iterator's batches.

    Args:
        loader: The loader that made the iterator; any that can't be deepened is left alone.
        iterator: Torch's iterator.
        most: Upper limit of the batches that each worker is asked for; None: no limit.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter) or not _can_deepen(loader):
        return
    configured = loader.prefetch_factor or TORCH_PREFETCH_FACTOR
    depth = configured if most is None else min(most, configured)
    missing = (depth - iterator._prefetch_factor) * loader.num_workers
    if missing > 0:
        iterator._prefetch_factor = depth
    # a torch that keeps the depth elsewhere raises it: the queue stays short
    with suppress(AssertionError):
        for _ in range(missing):
            iterator._try_put_index()


def asked_of(iterator: Any) -> int | None:
    """Return the batches that an iterator's workers are asked for, ready ones included; None if unknown."""
    depth = getattr(iterator, "_prefetch_factor", None)
    workers = getattr(iterator, "_num_workers", None)
    if isinstance(depth, int) and isinstance(workers, int):
        return depth * workers
    return None


def pids_of(iterator: Any) -> tuple[int, ...]:
    """Return the process ids of an iterator's workers; () without workers."""
    return tuple(worker.pid for worker in getattr(iterator, "_workers", ()))


def _can_deepen(loader: Any) -> bool:
    """Return whether a loader has workers and iterators whose queue torch lets us deepen."""
    if not isinstance(loader, DataLoader):
        return False
    kind = type(loader)
    has_own_iterator = (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    )
    if has_own_iterator or not hasattr(_MultiProcessingDataLoaderIter, "_try_put_index"):
        return False
    names = _MultiProcessingDataLoaderIter.__init__.__code__.co_names
    return "_prefetch_factor" in names and loader.num_workers > 0


# The feed: iterates a loader epoch after epoch and times each wait.

_new = tuple.__new__  # takes half as long as a named tuple's own


class FeedEnded(Exception):  # noqa: N818 - an end, not an error
    """No further batch will come: the user's script has ended."""


class LoopMoved(Exception):  # noqa: N818 - an event, not an error of ours
    """The user's script trains on another loader now; what was measured belongs to the former one."""


class Delivery(NamedTuple):
    """A batch and what it took to get it; a tuple, since one is made for every batch."""

    batch: Any
    samples: int
    asked: float
    """Time of perf_counter when it was asked for."""
    wait_s: float
    """Seconds from asking for it to having it."""
    is_restart: bool
    """It is the first of an epoch: its wait holds the end of the old epoch and the start of the new
    one."""
    had_to_wait: bool
    """No batch was ready when it was asked for; False if that was not checked."""
    apart_s: float = 0.0
    """Seconds before it was asked for, at the end of an epoch, that are no training: a script's
    evaluation."""


class BatchFeed(Protocol):
    """Batches without end for the measuring loop: from a loader (`Feed`) or from the user's script."""

    watches_queue: bool
    """Check before each batch whether one is ready; off inside a window, where it would cost
    time."""
    epoch_batches: int | None
    """Batches per epoch; None if unknown."""

    @property
    def loader(self) -> Any:
        """The DataLoader; None if there is none."""

    @property
    def start_s(self) -> float:
        """Seconds of starting the loader."""

    @property
    def first_wait_s(self) -> float:
        """Seconds of waiting for its first batch."""

    @property
    def queue_capacity(self) -> int:
        """Most batches that workers hold ready."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the loader's workers that run now."""

    @property
    def is_iterable(self) -> bool:
        """Return whether only the dataset knows when an epoch ends."""

    def take(self) -> Delivery:
        """Return the next batch; at the end of an epoch, the first of the next one."""

    def take_apart_s(self) -> float:
        """Return the seconds of evaluation since the last batch, which belong to no block, and reset them."""

    def is_at_end(self) -> bool:
        """Return whether the next batch starts a new epoch, as far as the epoch's length is known."""

    def ready(self) -> int | None:
        """Return the batches that workers have finished and nobody has taken; None if unknown."""

    def asked_batches(self) -> int | None:
        """Return the batches that workers are asked for, ready ones included; None if unknown."""

    def made(self) -> int | None:
        """Return the samples that workers have made so far, taken or not; None if unknown."""

    def allow_full_queue(self) -> None:
        """Allow a queue that was kept short its configured length, from the first time it is empty."""

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers.

        Args:
            within_s: Seconds after which workers that hang are killed.
        """


class Feed:
    """Iterates a loader epoch after epoch; the length of epochs is counted as they end.

    Args:
        loader: The loader to iterate.
        is_shallow: Keep the queue short until it matters, see `QueueDepth`.
    """

    def __init__(self, loader: DataLoader[Any] | TfLoader, *, is_shallow: bool = False) -> None:
        self.loader = loader
        self._counter = ItemCounter()
        self._depth = QueueDepth(is_shallow=is_shallow)
        self._drawn = deque[int]()
        """Sizes of batches that were drawn and not yet delivered."""
        self._sized = size_counter(loader, self._drawn)
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._in_epoch = 0
        self.watches_queue = True
        self.epoch_batches: int | None = length_of(loader)
        self.start_s = 0.0
        self.first_wait_s = 0.0

    def start(self) -> Delivery:
        """Start the loader's workers and return the first batch.

        Raises:
            WorkloadFault: An epoch has no batch.
        """
        begun = perf_counter()
        self._begin_epoch()
        self.start_s = perf_counter() - begun
        delivery = self.take()
        self.first_wait_s = delivery.wait_s
        return delivery

    def take(self) -> Delivery:
        """Return the next batch; at the end of an epoch, the first of the next one.

        Raises:
            WorkloadFault: An epoch has no batch.
        """
        assert self._iterator is not None, "start() comes first"  # noqa: S101 - our own bug
        is_empty = (self.watches_queue or self._depth.may_deepen) and self.ready() == 0
        had_to_wait = is_empty and self.watches_queue
        begun = perf_counter()
        restarted = False
        if is_empty:
            self._depth.fill(self.loader, self._iterator)
        # Take a batch; at the end of an epoch, start the next one first.
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._in_epoch == 0:
                    raise _empty_epoch(self.loader) from None
                self.epoch_batches = self._in_epoch
                restarted = True
                self._begin_epoch()
                continue
            self._in_epoch += 1
            wait_s = perf_counter() - begun
            batch, samples = self._sized(batch)
            self._counter.add(samples)
            return _new(Delivery, (batch, samples, begun, wait_s, restarted, had_to_wait, 0.0))

    def take_apart_s(self) -> float:
        """Return 0: nothing but training happens between two batches."""
        return 0.0

    @property
    def queue_capacity(self) -> int:
        """Most batches that workers hold ready: prefetch_factor * num_workers, or an epoch's."""
        return queue_capacity(self.loader, self.epoch_batches)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the loader's workers that run now."""
        return pids_of(self._iterator)

    @property
    def is_iterable(self) -> bool:
        """Return whether only the dataset knows when an epoch ends; its length may be wrong."""
        return isinstance(self.loader.dataset, IterableDataset | TfData)

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers; kill those that hang, such as in a reader.

        No batch can be taken afterwards; batches taken before stay valid. Does nothing without
        workers, or if this torch has other names for its iterator's parts.

        Args:
            within_s: Seconds after which workers that hang are killed.
        """
        iterator = self._iterator
        self._iterator = None
        stop_iterator(self.loader, iterator, within_s)

    def is_at_end(self) -> bool:
        """Return whether the next batch starts a new epoch, as far as the epoch's length is known."""
        return self._in_epoch == self.epoch_batches

    def ready(self) -> int | None:
        """Return the batches that workers have finished and nobody has taken; None if unknown."""
        return ready_in(self.loader, self._iterator)

    def asked_batches(self) -> int | None:
        """Return the batches that workers are asked for, ready ones included; None if unknown."""
        return asked_of(_inner(self._iterator))

    def made(self) -> int | None:
        """Return the samples that workers have made so far, taken or not; None if unknown."""
        return self._counter.made()

    def allow_full_queue(self) -> None:
        """Allow a queue that was kept short its configured length, from the first time it is empty."""
        self._depth.allow_full_queue(self.loader, self._iterator)

    def _begin_epoch(self) -> None:
        """Pass the epoch's number to samplers and dataset, and start the loader's iterator."""
        self._in_epoch = 0
        for part in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            set_sampler_epoch(part, self._epoch)
        self._epoch += 1
        self._drawn.clear()
        if not isinstance(self.loader, DataLoader):
            self._iterator = iter(self.loader)
            return
        self._counter.begin(self.loader)
        with self._depth.applied(self.loader):
            self._iterator = iter(self.loader)
        self._counter.end(self.loader)


def queue_capacity(loader: DataLoader[Any] | TfLoader, epoch_batches: int | None) -> int:
    """Return the most batches that a loader's workers hold ready.

    Args:
        loader: The loader.
        epoch_batches: Batches per epoch, which is an upper limit; None if unknown.
    """
    if isinstance(loader, TfLoader):
        capacity = loader.queue_capacity
    else:
        capacity = (loader.prefetch_factor or TORCH_PREFETCH_FACTOR) * loader.num_workers
    if epoch_batches is None:
        return capacity
    return min(capacity, epoch_batches)


def ready_in(loader: DataLoader[Any] | TfLoader, iterator: Any) -> int | None:
    """Return the batches that workers have finished and nobody has taken; None if unknown.

    Reads torch's iterator from outside: its queue of results, the queue of the pin-memory thread,
    and batches that arrived out of order. None if this torch has other names for these.
    """
    if loader.num_workers == 0:
        return 0
    if isinstance(iterator, TfBatches):
        return iterator.ready()
    iterator = _inner(iterator)
    with suppress(AttributeError, NotImplementedError, OSError):
        count = int(iterator._data_queue.qsize())
        if isinstance(iterator._data_queue, queue.Queue):  # filled by the pin-memory thread
            count += int(iterator._worker_result_queue.qsize())
        early = sum(len(info) == 2 for info in list(iterator._task_info.values()))
        return count + early
    return None


def stop_iterator(loader: DataLoader[Any] | TfLoader, iterator: Any, within_s: float) -> None:
    """End a loader's workers; kill those that hang, such as in a reader.

    Threads of a tf.data pipeline can't be killed: those that hang end with the process.

    Args:
        loader: The loader.
        iterator: Its current iterator.
        within_s: Seconds after which workers that hang are killed.
    """
    if isinstance(loader, TfLoader):
        if isinstance(iterator, TfBatches):
            closing = Thread(target=iterator.close, daemon=True)
            closing.start()
            closing.join(within_s)
        return
    loader._iterator = None
    iterator = _inner(iterator)
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None:
        return
    ending = Thread(target=_shut_down_quietly, args=(shut_down,), daemon=True)
    # torch would wait up to 5 s for each worker in turn
    ending.start()
    ending.join(within_s)
    if ending.is_alive():
        # else torch's handler takes the kill for an accident, and raises
        with suppress(ValueError):
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        for worker in iterator._workers:
            worker.kill()
        ending.join(within_s)


def _inner(iterator: Any) -> Any:
    """Return torch's own iterator, unwrapped from a loader class such as torch_geometric's."""
    return getattr(iterator, "iterator", iterator)


def _shut_down_quietly(shut_down: Callable[[], None]) -> None:
    """Shut workers down, ignoring errors for workers that were killed meanwhile."""
    with suppress(ValueError, OSError):
        shut_down()


def _empty_epoch(loader: DataLoader[Any] | TfLoader) -> WorkloadFault:
    """Return the fault of an epoch without batches."""
    if isinstance(loader, TfLoader):
        values = f"batch_size={loader.batch_size}"
        remedy = "batch without drop_remainder"
    else:
        values = f"batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        remedy = "drop_last: false"
    return WorkloadFault(
        "an epoch must hold at least one batch, but the loader came to its end without any "
        f"({values}); use a smaller micro_batch_size, or {remedy}"
    )
