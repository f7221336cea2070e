"""Loader workers that are no processes: they note how many batches they are asked for; a test says what is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

__all__ = ["PaperIterator", "use_paper_workers"]


class PaperIterator(_MultiProcessingDataLoaderIter):
    """Makes a batch when it is asked for."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._prefetch_factor: int = loader.prefetch_factor or 0
        self._profile_name, self._dataset_kind, self._task_info = "paper", loader._dataset_kind, {}
        self.ready = 0
        """Batches that lie ready."""
        self._data_queue: Any = SimpleNamespace(qsize=lambda: self.ready)
        self._reset(loader)

    @property
    def depth(self) -> int:
        """Batches that each worker was asked for in advance."""
        # the next epoch begins with as many
        assert self.asked == self._prefetch_factor * self._loader.num_workers
        return self._prefetch_factor

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self.asked, self._sampler_iter, self._num_yielded = 0, iter(loader._index_sampler), 0
        for _ in range(self._prefetch_factor * loader.num_workers):
            self._try_put_index()

    def _try_put_index(self) -> None:
        self.asked += 1

    def _next_data(self) -> Any:
        indices = next(self._sampler_iter)
        return self._loader.collate_fn([self._loader.dataset[index] for index in indices])

    def _shutdown_workers(self) -> None:
        """There are none."""


def use_paper_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every loader's workers be such ones."""

    def iterator_of(
        loader: DataLoader[Any],
    ) -> PaperIterator:  # unlike a class, a function becomes a method
        return PaperIterator(loader)

    monkeypatch.setattr(DataLoader, "_get_iterator", iterator_of)
