"""How many batches a loader's workers make in advance: one each at first, the configured number once it matters.

Comes in: the DataLoader that is measured, and its iterators. Goes out: the same iterators, whose queue a slow first
step can't fill, so that little has to be drained; later with a deeper queue. Where torch names these parts otherwise,
or a loader has an iterator of its own kind, the queue is the configured one from the start.
"""

# ruff: noqa: SLF001 - torch has no public way to ask for more batches
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from autotune.settings.training_config import TORCH_PREFETCH_FACTOR

__all__ = ["QueueDepth", "asked_of", "deepen"]

_WHILE_FULL = 2
"""Batches that each worker is asked for while none has been missed: our own convention, and torch's usual number."""


class QueueDepth:
    """Keep the queue of the loader that is measured short, until a batch is asked for that is not ready.

    A loader that is slower than training so piles up few batches, and one that is faster does not need more.

    Args:
        is_shallow: Ask each worker for one batch in advance at first; else the queue is the configured one throughout.
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

        Until then each worker gets a second batch to make. Workers that had come to the end of their first one so work
        all at once again, as they do in the long run where the loader is the limit.
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
    with suppress(AssertionError):  # of a torch that knows the depth elsewhere: the queue stays short
        for _ in range(missing):
            iterator._try_put_index()


def asked_of(iterator: Any) -> int | None:
    """Return the batches that an iterator's workers are asked for at present; None where that is not known.

    Batches that lie ready are among them.
    """
    depth, workers = (getattr(iterator, name, None) for name in ("_prefetch_factor", "_num_workers"))
    return depth * workers if isinstance(depth, int) and isinstance(workers, int) else None


def _can_deepen(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    plain = type(loader).__iter__ is DataLoader.__iter__ and type(loader)._get_iterator is DataLoader._get_iterator
    is_known = (
        hasattr(_MultiProcessingDataLoaderIter, "_try_put_index")
        and "_prefetch_factor" in _MultiProcessingDataLoaderIter.__init__.__code__.co_names
    )
    return plain and is_known and loader.num_workers > 0
