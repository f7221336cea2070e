"""How many samples each batch of a loader holds: counted where the loader puts the batch together, never guessed.

Takes a DataLoader whose iteration has not begun. A map-style dataset's batch has as many samples as the sampler drew
indices for it. A stream's has the loader's batch size where short batches are dropped; else a wrapper around
`collate_fn` counts them in the worker, and sends the number along with the batch. So it does where workers deliver
batches in the order in which they are ready, which is not that of the sampler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from autotune.worker.measure.batch import Held

__all__ = ["BatchSizes"]


class BatchSizes:
    """The sizes of a loader's batches, as they are delivered.

    Of a dataset with `__getitems__`, which may hand anything to `collate_fn`, the sizes are those that were drawn: with
    `in_order=False` an epoch's sum is right, each alone may not be.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._drawn = deque[int]()
        self._collates = False
        self._fixed: int | None = None
        if loader.batch_sampler is None:  # no batches are put together: each sample comes alone
            self._fixed = 1
        elif not isinstance(loader.dataset, IterableDataset) and not _is_counted_by_collating(loader):
            # torch refuses another sampler once a loader is made, since its iterator might hold the old one
            vars(loader)["batch_sampler"] = _Counted(loader.batch_sampler, self._drawn)
        elif loader.drop_last:
            self._fixed = loader.batch_size
        else:
            loader.collate_fn, self._collates = _CountingCollate(loader.collate_fn), True

    def begin_epoch(self) -> None:
        """Forget what was drawn and never delivered; to be called before the loader is iterated."""
        self._drawn.clear()

    def of(self, delivered: Any) -> Held:
        """What the loader has delivered next, with its number of samples."""
        if self._collates:
            return Held(*delivered)
        return Held(delivered, self._drawn.popleft() if self._fixed is None else self._fixed)


def _is_counted_by_collating(loader: DataLoader[Any]) -> bool:
    """Whether batches may come in another order than they are drawn, and torch itself lists a batch's items."""
    return loader.num_workers > 0 and not loader.in_order and not hasattr(loader.dataset, "__getitems__")


class _Counted:
    """A batch sampler that notes the size of each batch as the loader draws it; all else is the sampler's own."""

    def __init__(self, sampler: Any, drawn: deque[int]) -> None:
        self._sampler, self._drawn = sampler, drawn

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sampler:
            self._drawn.append(len(batch) if isinstance(batch, Sized) else 1)
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _CountingCollate:
    """A collate function that hands on how many samples it was given, beside the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Held:
        return Held(self._collate(samples), len(samples))
