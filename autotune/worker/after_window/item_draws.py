"""Ways to make a loader's next items in this process, as one of its workers would: by index, in batches, from a stream.

Takes a DataLoader, which is not iterated; hands on functions without end, each of which makes some items.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, count, islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, Subset

from autotune.worker.setup.build import is_stream

__all__ = ["draws_of"]

_FEW_ITEMS = 5  # at once, where the loader's batch size is not known: our own convention


def draws_of(loader: DataLoader[Any]) -> Iterator[Callable[[], list[Any]]]:
    """Functions that make the next item, or the next few where the dataset makes whole batches; without end."""
    dataset: Any = loader.dataset
    if is_stream(dataset):
        return _stream_draws(dataset)
    indices = _indices(loader)
    if _makes_batches(dataset):
        size = loader.batch_size or _FEW_ITEMS
        return (partial(dataset.__getitems__, list(islice(indices, size))) for _ in count())
    return (partial(_item, dataset, index) for index in indices)


def _item(dataset: Any, index: Any) -> list[Any]:
    return [dataset[index]]


def _stream_draws(dataset: Any) -> Iterator[Callable[[], list[Any]]]:
    """Items of an iterable, begun anew at its end; the new start belongs to the item that needs it."""
    streams = [iter(dataset)]

    def draw() -> list[Any]:
        for _ in range(2):
            with suppress(StopIteration):
                return [next(streams[0])]
            streams[0] = iter(dataset)
        raise RuntimeError("an iterable dataset must give an item each time it is begun, but gave none")

    return (draw for _ in count())


def _makes_batches(dataset: Any) -> bool:
    """Whether the loader asks for whole batches; a Subset does so for what it holds, in a plain loop where need be."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Indices as the loader draws them, without end; at random without a permutation of them all where it shuffles."""
    if type(loader.sampler) is RandomSampler and loader.batch_size is not None:
        size = len(loader.sampler.data_source)
        return (random.randrange(size) for _ in count())  # noqa: S311 - no secret
    source = loader.batch_sampler
    if source is None:
        return chain.from_iterable(iter(loader.sampler) for _ in count())
    return chain.from_iterable(chain.from_iterable(iter(source) for _ in count()))
