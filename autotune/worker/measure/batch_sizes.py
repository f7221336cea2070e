"""How many samples a batch holds: counted where the loader puts it together, never guessed.

Comes in: a loader. Goes out: what makes a batch and its size from each delivery. A map-style dataset's batch has as
many as the sampler drew indices for it. A stream's has the loader's batch size where short batches are dropped; else a
wrapper around `collate_fn` counts them in the worker, and sends the number along with the batch. A tf.data pipeline
makes whole batches: their tensors' first dimension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from autotune.settings.applied.tf_data import TfLoader
from autotune.worker.measure.batch import tensors_of

__all__ = ["CountedBatch", "Parts", "size_counter", "unwrapped"]


def size_counter(loader: DataLoader[Any] | TfLoader, drawn: deque[int]) -> Callable[[Any], tuple[Any, int]]:
    """What makes a batch and its number of samples from each delivery of a loader, whose sizes are noted in `drawn`.

    It raises IndexError for a batch that was begun before this was called.

    Workers that deliver batches in the order in which they are ready have them counted where they are collated. Of a
    dataset with `__getitems__`, which may hand anything to `collate_fn`, the sizes are those that were drawn: with
    `in_order=False` an epoch's sum is right, each alone may not be.
    """
    if isinstance(loader, TfLoader):
        return lambda batch: (batch, _first_dimension(batch))
    if loader.batch_sampler is None:  # no batches are put together: each sample comes alone
        return lambda batch: (batch, 1)
    is_out_of_order = loader.num_workers > 0 and not loader.in_order
    is_counted_as_drawn = not is_out_of_order or hasattr(loader.dataset, "__getitems__")
    if is_counted_as_drawn and not isinstance(loader.dataset, IterableDataset):
        # torch refuses another sampler once a loader is made, since its iterator might hold the old one
        vars(loader)["batch_sampler"] = _Counted(loader.batch_sampler, drawn)
        return lambda batch: (batch, drawn.popleft())
    size = loader.batch_size
    if loader.drop_last and size is not None:
        return lambda batch: (batch, size)
    loader.collate_fn = partial(_with_count, loader.collate_fn)
    return _apart


def _first_dimension(batch: Any) -> int:
    return int(next(tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim))


class CountedBatch(NamedTuple):
    """A batch with its number of samples, as a worker sends both; a tuple, so that torch pins what is in it."""

    batch: Any
    samples: int


class Parts(NamedTuple):
    """What puts a loader's batches together."""

    batch_sampler: Any
    collate_fn: Callable[[Any], Any]


def unwrapped(loader: DataLoader[Any]) -> Parts:
    """A loader's own batch sampler and collate function, without what `size_counter` has put around them."""
    sampler, collate = loader.batch_sampler, loader.collate_fn
    if isinstance(sampler, _Counted):
        sampler = sampler.counted
    if isinstance(collate, partial) and collate.func is _with_count:
        collate = collate.args[0]
    return Parts(sampler, collate)


class _Counted:
    """A batch sampler that notes the size of each batch as the loader draws it; all else is the sampler's own."""

    def __init__(self, sampler: Any, drawn: deque[int]) -> None:
        self.counted, self._drawn = sampler, drawn

    def __iter__(self) -> Iterator[Any]:
        for batch in self.counted:
            self._drawn.append(len(batch) if isinstance(batch, Sized) else 1)
            yield batch

    def __len__(self) -> int:
        return len(self.counted)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet: it is being copied, or unpickled
            raise AttributeError(name)
        return getattr(self.counted, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.counted, name, value)


_OWN = frozenset({"counted", "_drawn"})


def _with_count(collate: Callable[[Any], Any], samples: Any) -> CountedBatch:
    """A batch, and how many samples the collate function was given for it."""
    return CountedBatch(collate(samples), len(samples))


def _apart(counted: Any) -> tuple[Any, int]:
    """A batch and its samples.

    Raises:
        IndexError: it was collated before anybody counted.
    """
    if type(counted) is not CountedBatch:
        raise IndexError
    return counted.batch, counted.samples
