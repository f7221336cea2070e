"""Counts the items that a loader's workers have made, while they make them: the loader's own rate, whatever is queued.

Comes in: a DataLoader that is about to be iterated, and the batches that are taken of it. Goes out: items made so far.
The count lies in shared memory, a slot for each worker, so that no lock is needed. Workers count inside torch's
fetcher, which is patched in their processes alone, by the `worker_init_fn` that they are started with: dataset, sampler
and collate function stay as they are, and so does the loader once its iterator is made.

Where torch names these parts otherwise, where a loader has workers of its own kind, or where the counts do not fit the
batches that came, nothing is known.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.sharedctypes import RawArray
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from autotune.settings.training_config import TORCH_PREFETCH_FACTOR
from autotune.worker.measure.batch_sizes import length_of_batch

__all__ = ["ItemCounter"]

_STRIDE = 8
"""Numbers of 8 bytes from one slot to the next: a cache line, lest workers on several cores wait for one another."""
_PART_S = 1e-3
"""Seconds of making the items that are counted at once, within a factor of 2: our own convention. Counting them takes
half a microsecond; items that are slower are counted one by one."""


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

        Since each is made before it comes, and workers hold few batches, the counts of another way of loading do not
        fit.
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
    fetch = getattr(torch.utils.data._utils, "fetch", None)  # noqa: SLF001 - no public way to see items being made
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
        self._indices, self._slots, self._at = indices, slots, at

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return self._indices[at]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterable[Any]]:
        indices, size, begun = iter(self._indices), 1, perf_counter()
        while part := tuple(islice(indices, size)):
            yield part
            self._slots[self._at] += len(part)
            ended = perf_counter()
            if ended - begun < _PART_S / 2:
                size *= 2
            elif ended - begun > _PART_S * 2:
                size = max(1, size // 2)
            begun = ended
