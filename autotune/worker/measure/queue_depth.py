"""How many batches a loader's workers make in advance: one each at first, the configured number once it matters.

Comes in: a DataLoader. Goes out: its iterator, whose queue a slow first step can't fill, so that little has to be
drained; later the same iterator with a deeper queue. Where torch names these parts otherwise, or a loader has an
iterator of its own kind, the queue is the configured one from the start.
"""

# ruff: noqa: SLF001 - torch has no public way to ask for more batches
from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from autotune.settings.training_config import TORCH_PREFETCH_FACTOR

__all__ = ["deepen", "shallow_iter"]

_SHALLOW = 1
"""Batches that each worker is asked for at first: with fewer it would have nothing to do."""


def shallow_iter(loader: DataLoader[Any]) -> Any:
    """Iterate a loader with a queue of one batch a worker, where that can be changed later; else as it is."""
    if not _can_deepen(loader):
        return iter(loader)
    configured = loader.prefetch_factor
    loader.prefetch_factor = _SHALLOW  # the iterator keeps it
    try:
        return iter(loader)
    finally:
        loader.prefetch_factor = configured


def deepen(loader: DataLoader[Any], iterator: Any, most: int | None = None) -> None:
    """Ask each worker for as many batches in advance as the loader is configured for, or for so many at most."""
    if not isinstance(iterator, _MultiProcessingDataLoaderIter) or not _can_deepen(loader):
        return
    configured = loader.prefetch_factor or TORCH_PREFETCH_FACTOR
    depth = configured if most is None else min(most, configured)
    missing = (depth - iterator._prefetch_factor) * loader.num_workers
    if missing > 0:
        iterator._prefetch_factor = depth
    with suppress(AssertionError):  # of a torch that knows the depth elsewhere: the queue stays short
        for _ in range(missing):
            iterator._try_put_index()


def _can_deepen(loader: DataLoader[Any]) -> bool:
    plain = type(loader).__iter__ is DataLoader.__iter__ and type(loader)._get_iterator is DataLoader._get_iterator
    is_known = (
        hasattr(_MultiProcessingDataLoaderIter, "_try_put_index")
        and "_prefetch_factor" in _MultiProcessingDataLoaderIter.__init__.__code__.co_names
    )
    return plain and is_known and loader.num_workers > 0
