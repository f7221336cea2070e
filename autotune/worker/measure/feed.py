"""Batches without end: iterates the loader epoch after epoch, times each wait, and counts the batches that lie ready.

`Feed.stop` ends the loader's workers, also such that hang, so that what is measured next has the machine to itself.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from autotune.settings.applied.tf_data import TfBatches, TfData, TfLoader
from autotune.settings.training_config import TORCH_PREFETCH_FACTOR
from autotune.worker.measure.batch_sizes import size_counter
from autotune.worker.measure.items_made import ItemCounter
from autotune.worker.measure.queue_depth import QueueDepth, asked_of
from autotune.worker.setup.build import WorkloadFault, length_of
from autotune.worker.setup.loader import tell_epoch

__all__ = ["BatchFeed", "Delivery", "Feed", "FeedEnded", "LoopMoved", "queue_capacity", "ready_in", "stop_iterator"]

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
    """It is the first of a new epoch: the wait holds the end of the old one and the start of the new one."""
    had_to_wait: bool
    """No batch lay ready when it was asked for; False where that was not checked."""
    apart_s: float = 0.0
    """Seconds at the epoch's end before it was asked for that are no training: a script's evaluation."""


class BatchFeed(Protocol):
    """Batches without end, as the measuring loop takes them: a loader's (Feed), or those of somebody else's script."""

    watches_queue: bool
    """Check before each batch whether one lies ready; off inside a window, where it would cost time."""
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
        """Check before each batch whether one lies ready; off inside a window, where it would cost time."""
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
        begun, restarted = perf_counter(), False
        if is_empty:
            self._depth.fill(self.loader, self._iterator)
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._in_epoch == 0:
                    raise _empty_epoch(self.loader) from None
                self.epoch_batches, restarted = self._in_epoch, True
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

        Nothing can be taken afterwards. Batches that were taken stay as they are. Does nothing without workers, and
        where another torch names its iterator's parts otherwise.
        """
        iterator, self._iterator = self._iterator, None
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

    Reads the iterator of torch.utils.data.dataloader from outside: its queue of results, the queue behind the
    pinning thread, and what came out of order. None where another torch names these otherwise.
    """
    if loader.num_workers == 0:
        return 0
    if isinstance(iterator, TfBatches):
        return iterator.ready()
    iterator = _inner(iterator)
    with suppress(AttributeError, NotImplementedError, OSError):
        count = int(iterator._data_queue.qsize())  # noqa: SLF001 - no public way to ask
        if isinstance(iterator._data_queue, queue.Queue):  # noqa: SLF001 - filled by the pinning thread
            count += int(iterator._worker_result_queue.qsize())  # noqa: SLF001 - as above
        early = sum(len(info) == 2 for info in list(iterator._task_info.values()))  # noqa: SLF001 - as above
        return count + early
    return None


def stop_iterator(loader: DataLoader[Any] | TfLoader, iterator: Any, within_s: float) -> None:
    """End a loader's workers; what does not end by itself in time, such as a reader that hangs, is killed.

    Threads of a tf.data pipeline can't be killed: such that hang are left behind, and end with the process.
    """
    if isinstance(loader, TfLoader):
        if isinstance(iterator, TfBatches):
            closing = Thread(target=iterator.close, daemon=True)
            closing.start()
            closing.join(within_s)
        return
    loader._iterator = None  # noqa: SLF001 - there persistent workers are kept
    iterator = _inner(iterator)
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None:
        return
    ending = Thread(target=_ignoring_what_is_gone, args=(shut_down,), daemon=True)
    ending.start()  # torch would wait for each worker in turn, 5 s
    ending.join(within_s)
    if ending.is_alive():
        with suppress(ValueError):  # else torch's handler takes the kill for an accident, and raises
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined] # noqa: SLF001 - as torch does
        for worker in iterator._workers:  # noqa: SLF001 - no public way to them
            worker.kill()
        ending.join(within_s)


def _inner(iterator: Any) -> Any:
    """Torch's iterator inside of what a loader's class puts around it, as torch_geometric's do."""
    return getattr(iterator, "iterator", iterator)


def _ignoring_what_is_gone(shut_down: Callable[[], None]) -> None:
    with suppress(ValueError, OSError):  # the workers were killed meanwhile, and torch no longer knows them
        shut_down()


def _empty_epoch(loader: DataLoader[Any] | TfLoader) -> WorkloadFault:
    if isinstance(loader, TfLoader):
        return WorkloadFault(
            "an epoch must hold at least one batch, but the tf.data pipeline came to its end without any (batch_size="
            f"{loader.batch_size}); use a smaller micro_batch_size, or batch without drop_remainder"
        )
    return WorkloadFault(
        f"an epoch must hold at least one batch, but the loader came to its end without any (batch_size="
        f"{loader.batch_size}, drop_last={loader.drop_last}); use a smaller micro_batch_size or drop_last: false"
    )
