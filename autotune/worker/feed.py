# ruff: noqa: SLF001 - torch has no public way to ask for more batches
"""Batches without end for the measuring loop: waits, ready batches, items made, the length of the queue."""

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
from autotune.worker.loader import tell_epoch

# Counts the items that a loader's workers have made, while they make them: the loader's own rate,
# whatever is queued.
#
# Comes in: a DataLoader that is about to be iterated, and the batches that are taken of it. Goes
# out: items made so far. The count lies in shared memory, a slot for each worker, so that no lock
# is needed. Workers count inside torch's fetcher, which is patched in their processes alone, by the
# `worker_init_fn` that they are started with: dataset, sampler and collate function stay as they
# are, and so does the loader once its iterator is made.
#
# Where torch names these parts otherwise, where a loader has workers of its own kind, or where the
# counts do not fit the batches that came, nothing is known.


_STRIDE = 8
"""Numbers of 8 bytes from one slot to the next: a cache line, lest workers on several cores wait
for one another."""
_PART_S = 1e-3
"""Seconds of making the items that are counted at once, within a factor of 2: our own convention.
Counting them takes half a microsecond; items that are slower are counted one by one."""


@dataclass(slots=True)
class ItemCounter:
    """The items that the workers of a loader have made, and the samples that were taken of it."""

    _slots: Any = None
    _size: int = 0
    _given: Callable[[int], None] | None = None
    """The loader's own worker_init_fn, while ours stands in its place."""
    _came: int = 0
    _largest: int = 0
    """Samples of the largest batch."""
    _most_batches: int = 0
    """Batches that workers hold at most, unfinished ones included."""
    _is_known: bool = True

    def begin(self, loader: DataLoader[Any]) -> None:
        """Have the workers count that the loader starts until `end`; it is about to be iterated."""
        if loader.num_workers == 0 or not self._is_known:
            return
        if self._slots is None:
            self._size = loader.num_workers
            self._slots = RawArray(ctypes.c_longlong, self._size * _STRIDE)
        if self._size != loader.num_workers:
            self._is_known = False
            return
        self._most_batches = (loader.prefetch_factor or TORCH_PREFETCH_FACTOR) * loader.num_workers
        self.end(loader)  # where its iterator could not be made
        self._given = loader.worker_init_fn
        loader.worker_init_fn = _Counting(self._slots, self._given)

    def end(self, loader: DataLoader[Any]) -> None:
        """Give the loader its own worker_init_fn back: its iterator is made."""
        if isinstance(loader.worker_init_fn, _Counting):
            loader.worker_init_fn = self._given
        self._given = None

    def add(self, samples: int) -> None:
        """Note a batch that was taken."""
        self._came += samples
        self._largest = max(self._largest, samples)

    def made(self) -> int | None:
        """Return the items made so far; None where that is not known.

        Since each is made before it comes, and workers hold few batches, the counts of another way
        of loading do not fit.
        """
        if not self._is_known or self._slots is None or self._came == 0:
            return None
        made = sum(self._slots[::_STRIDE])
        self._is_known = self._came <= made <= self._came + self._most_batches * self._largest
        return made if self._is_known else None


@dataclass(frozen=True, slots=True)
class _Counting:
    """A worker_init_fn that has its worker count, after the loader's own."""

    slots: Any
    then: Callable[[int], None] | None
    pid: int = field(default_factory=os.getpid)
    """The process that starts the workers."""

    def __call__(self, worker_id: int) -> None:
        """Called by torch in each worker as it starts, before it makes its fetcher."""
        if self.then is not None:
            self.then(worker_id)
        if os.getpid() != self.pid:  # else workers are threads
            _count_in_fetchers(self.slots, worker_id * _STRIDE)


def _count_in_fetchers(slots: Any, at: int) -> None:
    """Count the items of this worker's dataset in a slot."""
    fetch = getattr(torch.utils.data._utils, "fetch", None)
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        kind: Any = getattr(fetch, name, None)
        if hasattr(kind, "fetch"):
            kind.fetch = _counted(kind.fetch, slots, at)


def _counted(plain: Callable[[Any, Any], Any], slots: Any, at: int) -> Callable[[Any, Any], Any]:
    def fetch(self: Any, indices: Any) -> Any:
        info = get_worker_info()
        if info is None or self.dataset is not info.dataset:  # a loader that the dataset itself has
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
    """Return whether torch alone iterates the indices of a batch: no `__getitems__` of the user's is given them."""
    if isinstance(dataset, IterableDataset):
        return True
    if type(dataset) is Subset:
        dataset = dataset.dataset
    return not getattr(dataset, "__getitems__", None)


class _Counted(Sequence[Any]):
    """The indices of a batch; a part of them is counted when the next one is asked for."""

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
        indices = iter(self._indices)
        size = 1
        begun = perf_counter()
        while part := tuple(islice(indices, size)):
            yield part
            self._slots[self._at] += len(part)
            ended = perf_counter()
            if ended - begun < _PART_S / 2:
                size *= 2
            elif ended - begun > _PART_S * 2:
                size = max(1, size // 2)
            begun = ended


# How many batches a loader's workers make in advance: one each at first, the configured number once
# it matters.
#
# Comes in: the DataLoader that is measured, and its iterators. Goes out: the same iterators, whose
# queue a slow first step can't fill, so that little has to be drained; later with a deeper queue.
# Where torch names these parts otherwise, or a loader has an iterator of its own kind, the queue is
# the configured one from the start.


_WHILE_FULL = 2
"""Batches that each worker is asked for while none has been missed: our own convention, and torch's
usual number."""


class QueueDepth:
    """Keep the queue of the loader that is measured short, until a batch is asked for that is not ready.

    A loader that is slower than training so piles up few batches, and one that is faster does not
    need more.

    Args:
        is_shallow: Ask each worker for one batch in advance at first; else the queue is the
            configured one throughout.
    """

    def __init__(self, *, is_shallow: bool) -> None:
        self._is_shallow = is_shallow
        self.may_deepen = False
        """The queue is short, and is to be the configured one as soon as it is found empty."""

    @contextmanager
    def applied(self, loader: Any) -> Iterator[None]:
        """Within this context a loader's iterator is made with a short queue, where that can be changed later."""
        if not self._is_shallow or not _can_deepen(loader):
            yield
            return
        configured = loader.prefetch_factor
        # with fewer a worker would have nothing to do
        loader.prefetch_factor = 1  # the iterator keeps it
        try:
            yield
        finally:
            loader.prefetch_factor = configured

    def allow_full_queue(self, loader: Any, iterator: Any) -> None:
        """Let the queue become as long as it is configured: when it is empty for once.

        Until then each worker gets a second batch to make. Workers that had come to the end of
        their first one so work all at once again, as they do in the long run where the loader is
        the limit.
        """
        self.may_deepen = self._is_shallow
        if self._is_shallow:
            deepen(loader, iterator, _WHILE_FULL)

    def fill(self, loader: Any, iterator: Any) -> None:
        """Let the queue, which was found empty, become as long as it is configured, where that is allowed by now."""
        if self.may_deepen:
            self.end()
            deepen(loader, iterator)

    def end(self) -> None:
        """Keep no queue short any more; iterators that were made before are deepened by `settle`."""
        self._is_shallow = self.may_deepen = False

    def settle(self, loader: Any, iterator: Any) -> None:
        """Deepen an iterator that was made with a short queue and is asked for batches after that has ended."""
        if not self._is_shallow:
            deepen(loader, iterator)


def deepen(loader: Any, iterator: Any, most: int | None = None) -> None:
    """Ask each worker for the configured number of batches in advance, or for `most` where that is fewer.

    Call it in the thread that takes the iterator's batches.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter) or not _can_deepen(loader):
        return
    configured = loader.prefetch_factor or TORCH_PREFETCH_FACTOR
    depth = configured if most is None else min(most, configured)
    missing = (depth - iterator._prefetch_factor) * loader.num_workers
    if missing > 0:
        iterator._prefetch_factor = depth
    with suppress(
        AssertionError
    ):  # of a torch that knows the depth elsewhere: the queue stays short
        for _ in range(missing):
            iterator._try_put_index()


def asked_of(iterator: Any) -> int | None:
    """Return the batches that an iterator's workers are asked for at present; None where that is not known.

    Batches that lie ready are among them.
    """
    depth, workers = (
        getattr(iterator, name, None) for name in ("_prefetch_factor", "_num_workers")
    )
    return depth * workers if isinstance(depth, int) and isinstance(workers, int) else None


def _can_deepen(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    plain = (
        type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )
    is_known = (
        hasattr(_MultiProcessingDataLoaderIter, "_try_put_index")
        and "_prefetch_factor" in _MultiProcessingDataLoaderIter.__init__.__code__.co_names
    )
    return plain and is_known and loader.num_workers > 0


# Batches without end: iterates the loader epoch after epoch, times each wait, and counts the
# batches that lie ready.
#
# `Feed.stop` ends the loader's workers, also such that hang, so that what is measured next has the
# machine to itself.


_new = tuple.__new__  # a named tuple's own takes twice as long, once a batch


class FeedEnded(Exception):  # noqa: N818 - an end, not an error
    """No further batch will come: somebody else's script has come to its end."""


class LoopMoved(Exception):  # noqa: N818 - an event, not an error of ours
    """Somebody else's script trains on another loader by now: what was measured so far belongs to the former one."""


class Delivery(NamedTuple):
    """A batch, and what it took to get it. Made for every batch of a window: a tuple costs least."""

    batch: Any
    samples: int
    asked: float
    """Time of perf_counter when it was asked for."""
    wait_s: float
    """Seconds from asking to having it."""
    is_restart: bool
    """It is the first of a new epoch: the wait holds the end of the old one and the start of the
    new one."""
    had_to_wait: bool
    """No batch lay ready when it was asked for; False where that was not checked."""
    apart_s: float = 0.0
    """Seconds at the epoch's end before it was asked for that are no training: a script's
    evaluation."""


class BatchFeed(Protocol):
    """Batches without end, as the measuring loop takes them: a loader's (Feed), or those of somebody else's script."""

    watches_queue: bool
    """Check before each batch whether one lies ready; off inside a window, where it would cost
    time."""
    epoch_batches: int | None
    """Batches of an epoch; None where that is not known."""

    @property
    def loader(self) -> Any:
        """The DataLoader; None where there is none."""
        ...

    @property
    def start_s(self) -> float:
        """Seconds of starting the loader."""
        ...

    @property
    def first_wait_s(self) -> float:
        """Seconds of waiting for its first batch."""
        ...

    @property
    def queue_capacity(self) -> int:
        """Batches that workers hold ready at most."""
        ...

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset alone says when an epoch ends."""
        ...

    def take(self) -> Delivery:
        """The next batch; at an epoch's end the first of the next epoch."""
        ...

    def take_apart_s(self) -> float:
        """Seconds since the last batch that were no training: a script's evaluation. They belong to no block."""
        ...

    def is_at_end(self) -> bool:
        """Whether the next batch is the first of a new epoch, as far as the epoch's length is known."""
        ...

    def ready(self) -> int | None:
        """Batches that workers have finished and nobody has taken; None where that is not known."""
        ...

    def asked_batches(self) -> int | None:
        """Return the batches that workers are asked for at present, those that lie ready included; None: not known."""
        ...

    def made(self) -> int | None:
        """Return the samples that workers have made so far, taken or not; None where that is not known."""
        ...

    def allow_full_queue(self) -> None:
        """Let the queue become as long as it is configured, where it was kept short: when it is empty for once."""
        ...

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers."""
        ...


class Feed:
    """Holds the loader's iterator. Epoch lengths are counted as they come.

    Args:
        loader: What is iterated.
        is_shallow: Keep the queue short until it matters, see QueueDepth.
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
        """Check before each batch whether one lies ready; off inside a window, where it would cost
        time."""
        self.epoch_batches: int | None = length_of(loader)
        self.start_s = 0.0
        self.first_wait_s = 0.0

    def start(self) -> Delivery:
        """Start the loader's workers and take the first batch."""
        begun = perf_counter()
        self._begin_epoch()
        self.start_s = perf_counter() - begun
        delivery = self.take()
        self.first_wait_s = delivery.wait_s
        return delivery

    def take(self) -> Delivery:
        """The next batch; at an epoch's end the first of the next epoch.

        Raises:
            WorkloadFault: an epoch has no batch at all.
        """
        assert self._iterator is not None, "start() comes first"  # noqa: S101 - our own bug
        is_empty = (self.watches_queue or self._depth.may_deepen) and self.ready() == 0
        had_to_wait = is_empty and self.watches_queue
        begun = perf_counter()
        restarted = False
        if is_empty:
            self._depth.fill(self.loader, self._iterator)
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
        """None: between two batches it is trained."""
        return 0.0

    @property
    def queue_capacity(self) -> int:
        """Batches that workers hold ready at most: prefetch_factor * num_workers, or an epoch's."""
        return queue_capacity(self.loader, self.epoch_batches)

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset alone says when an epoch ends: a length that it promises may not be what comes."""
        return isinstance(self.loader.dataset, IterableDataset | TfData)

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers; what does not end by itself in time, such as a reader that hangs, is killed.

        Nothing can be taken afterwards. Batches that were taken stay as they are. Does nothing
        without workers, and where another torch names its iterator's parts otherwise.
        """
        iterator = self._iterator
        self._iterator = None
        stop_iterator(self.loader, iterator, within_s)

    def is_at_end(self) -> bool:
        """Whether the next batch is the first of a new epoch, as far as the epoch's length is known."""
        return self._in_epoch == self.epoch_batches

    def ready(self) -> int | None:
        """Batches that workers have finished and the loop has not taken; None where that is not known."""
        return ready_in(self.loader, self._iterator)

    def asked_batches(self) -> int | None:
        """Return the batches that workers are asked for at present, those that lie ready included; None: not known."""
        return asked_of(_inner(self._iterator))

    def made(self) -> int | None:
        """Return the samples that workers have made so far, taken or not; None where that is not known."""
        return self._counter.made()

    def allow_full_queue(self) -> None:
        """Let the queue become as long as it is configured, where it was kept short: when it is empty for once."""
        self._depth.allow_full_queue(self.loader, self._iterator)

    def _begin_epoch(self) -> None:
        self._in_epoch = 0
        for part in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            tell_epoch(part, self._epoch)
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
    """Batches that a loader's workers hold ready at most: prefetch_factor * num_workers, or an epoch's."""
    if isinstance(loader, TfLoader):
        capacity = loader.queue_capacity
    else:
        capacity = (loader.prefetch_factor or TORCH_PREFETCH_FACTOR) * loader.num_workers
    return capacity if epoch_batches is None else min(capacity, epoch_batches)


def ready_in(loader: DataLoader[Any] | TfLoader, iterator: Any) -> int | None:
    """Batches that workers have finished and nobody has taken; None where that is not known.

    Reads the iterator of torch.utils.data.dataloader from outside: its queue of results, the queue
    behind the pinning thread, and what came out of order. None where another torch names these
    otherwise.
    """
    if loader.num_workers == 0:
        return 0
    if isinstance(iterator, TfBatches):
        return iterator.ready()
    iterator = _inner(iterator)
    with suppress(AttributeError, NotImplementedError, OSError):
        count = int(iterator._data_queue.qsize())
        if isinstance(iterator._data_queue, queue.Queue):
            count += int(iterator._worker_result_queue.qsize())
        early = sum(len(info) == 2 for info in list(iterator._task_info.values()))
        return count + early
    return None


def stop_iterator(loader: DataLoader[Any] | TfLoader, iterator: Any, within_s: float) -> None:
    """End a loader's workers; what does not end by itself in time, such as a reader that hangs, is killed.

    Threads of a tf.data pipeline can't be killed: such that hang are left behind, and end with the
    process.
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
    ending = Thread(target=_ignoring_what_is_gone, args=(shut_down,), daemon=True)
    ending.start()  # torch would wait for each worker in turn, 5 s
    ending.join(within_s)
    if ending.is_alive():
        with suppress(
            ValueError
        ):  # else torch's handler takes the kill for an accident, and raises
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        for worker in iterator._workers:
            worker.kill()
        ending.join(within_s)


def _inner(iterator: Any) -> Any:
    """Torch's iterator inside of what a loader's class puts around it, as torch_geometric's do."""
    return getattr(iterator, "iterator", iterator)


def _ignoring_what_is_gone(shut_down: Callable[[], None]) -> None:
    with suppress(
        ValueError, OSError
    ):  # the workers were killed meanwhile, and torch no longer knows them
        shut_down()


def _empty_epoch(loader: DataLoader[Any] | TfLoader) -> WorkloadFault:
    if isinstance(loader, TfLoader):
        return WorkloadFault(
            "an epoch must hold at least one batch, but the tf.data pipeline came to its end "
            "without any (batch_size="
            f"{loader.batch_size}); use a smaller micro_batch_size, or batch without drop_remainder"
        )
    return WorkloadFault(
        f"an epoch must hold at least one batch, but the loader came to its end without any "
        f"(batch_size="
        f"{loader.batch_size}, drop_last={loader.drop_last}); use a smaller micro_batch_size or "
        f"drop_last: false"
    )
