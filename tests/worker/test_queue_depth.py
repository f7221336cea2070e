"""Keep a loader's queue short until a batch is missed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

from autotune.worker.feed import QueueDepth, deepen
from tests.worker.paper_workers import PaperIterator, use_paper_workers


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_paper_workers(monkeypatch)


def loader_of(**settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(64)), batch_size=4, num_workers=2, **settings)


def made_by(depth: QueueDepth, loader: DataLoader[Any]) -> PaperIterator:
    with depth.applied(loader):
        iterator = iter(loader)
    assert isinstance(iterator, PaperIterator)
    return iterator


def test_depths_in_turn() -> None:
    loader, depth = loader_of(prefetch_factor=5), QueueDepth(is_shallow=True)
    iterator = made_by(depth, loader)
    depth.fill(loader, iterator)  # the first steps find it empty, too
    assert iterator.depth == 1
    depth.allow_full_queue(loader, iterator)
    assert (iterator.depth, depth.may_deepen) == (2, True)
    depth.fill(loader, iterator)
    assert (iterator.depth, depth.may_deepen) == (5, False)
    assert made_by(depth, loader).depth == 5
    assert loader.prefetch_factor == 5


@pytest.mark.parametrize("configured", [1, 2, None])
def test_configured_depth_is_the_limit(configured: int | None) -> None:
    loader, depth = loader_of(prefetch_factor=configured), QueueDepth(is_shallow=True)
    iterator = made_by(depth, loader)
    depth.allow_full_queue(loader, iterator)
    depth.fill(loader, iterator)
    depth.settle(loader, iterator)
    assert iterator.depth == (configured or 2)


def test_not_shallow() -> None:
    loader, depth = loader_of(prefetch_factor=5), QueueDepth(is_shallow=False)
    iterator = made_by(depth, loader)
    depth.allow_full_queue(loader, iterator)
    assert (iterator.depth, depth.may_deepen) == (5, False)


def test_persistent_workers() -> None:
    loader, depth = (
        loader_of(prefetch_factor=5, persistent_workers=True),
        QueueDepth(is_shallow=True),
    )
    iterator = made_by(depth, loader)
    assert made_by(depth, loader) is iterator
    assert iterator.depth == 1
    depth.allow_full_queue(loader, iterator)
    depth.fill(loader, iterator)
    assert made_by(depth, loader) is iterator
    assert iterator.depth == 5


def test_settle() -> None:
    loader, depth = loader_of(prefetch_factor=5), QueueDepth(is_shallow=True)
    iterator = made_by(depth, loader)
    depth.settle(loader, iterator)
    assert iterator.depth == 1
    depth.end()
    depth.settle(loader, iterator)
    assert iterator.depth == 5


def test_iterator_that_cannot_be_made() -> None:
    loader = loader_of(prefetch_factor=5)
    with (
        pytest.raises(OSError, match="no more processes"),
        QueueDepth(is_shallow=True).applied(loader),
    ):
        raise OSError("no more processes")
    assert loader.prefetch_factor == 5


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return super()._get_iterator()


@pytest.mark.parametrize(
    "kind", [OwnIteration, OwnIterator, None], ids=["__iter__", "_get_iterator", "another torch"]
)
def test_queue_that_cannot_be_deepened(
    kind: type[DataLoader[Any]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is None:
        monkeypatch.delattr(dataloader._MultiProcessingDataLoaderIter, "_try_put_index")
    loader = (kind or DataLoader)(TensorDataset(torch.zeros(8)), num_workers=1, prefetch_factor=4)
    depth = QueueDepth(is_shallow=True)
    iterator = made_by(depth, loader)
    assert iterator.depth == 4
    depth.allow_full_queue(loader, iterator)
    deepen(loader, iterator)
    assert iterator.depth == 4


@pytest.mark.parametrize("other", [None, object(), DataLoader(TensorDataset(torch.zeros(8)))])
def test_no_workers(other: Any) -> None:
    depth = QueueDepth(is_shallow=True)
    with depth.applied(other):
        pass
    depth.allow_full_queue(other, None)
    depth.fill(other, None)
