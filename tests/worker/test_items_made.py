"""Count items where they are made; a count that does not fit the batches is dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, _utils

from autotune.config.training_config import TrainingConfig
from autotune.worker import feed as items_made
from autotune.worker.feed import ItemCounter
from tests.factories.loops import make_feed


class Watched(Dataset[int]):
    """Notes what is counted whenever an item is made."""

    def __init__(self, slots: Any) -> None:
        self.slots, self.seen = slots, list[int]()

    def __getitem__(self, index: int) -> int:
        self.seen.append(self.slots[0])
        return index

    def __len__(self) -> int:
        return 8


class Whole(Watched):
    """Makes a batch's items at once."""

    def __getitems__(self, indices: Any) -> list[int]:
        # the user's code is given what torch gives it
        assert type(indices) is list
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    def __init__(self, slots: Any) -> None:
        self.slots, self.seen = slots, list[int]()

    def __iter__(self) -> Any:
        for index in range(8):
            self.seen.append(self.slots[0])
            yield index


class WholeBatches(Stream):
    def __iter__(self) -> Any:
        for _ in range(2):
            self.seen.append(self.slots[0])
            yield torch.zeros(4)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A worker's slot, in this process as if it were the worker."""
    counts = [0]
    monkeypatch.setattr(items_made, "_PART_S", 0.0)  # each item takes longer: counted one by one
    for kind in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
        monkeypatch.setattr(kind, "fetch", items_made._counted(kind.fetch, counts, 0))
    return counts


def part_of_watched(slots: list[int]) -> Subset[int]:
    return Subset(Watched(slots), range(8))


@pytest.mark.parametrize(
    ("make", "size", "seen"),
    [
        (Watched, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (part_of_watched, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Whole, 4, [0, 0, 0, 0, 4, 4, 4, 4]),
        (Stream, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (WholeBatches, None, [0, 4]),
    ],
)
def test_items_are_counted_as_they_are_made(
    make: Any, size: int | None, seen: list[int], slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(slots)
    monkeypatch.setattr(items_made, "get_worker_info", lambda: SimpleNamespace(dataset=data))
    batches = list(DataLoader(data, batch_size=size))
    assert getattr(data, "dataset", data).seen == seen
    assert slots == [8]
    assert sum(len(batch) for batch in batches) == 8


def test_inner_loader_is_not_counted(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_made, "get_worker_info", lambda: SimpleNamespace(dataset=None))
    list(DataLoader(Watched(slots), batch_size=4))
    assert slots == [0]


def test_threads_do_not_count() -> None:
    plain = _utils.fetch._MapDatasetFetcher.fetch
    items_made._Counting([0], None)(0)
    assert _utils.fetch._MapDatasetFetcher.fetch is plain


def test_loader_is_restored() -> None:
    calls = list[int]()
    loader = DataLoader(TensorDataset(torch.zeros(8)), num_workers=2, worker_init_fn=calls.append)
    own, counter = loader.worker_init_fn, ItemCounter()
    counter.begin(loader)
    counter.begin(loader)  # its iterator could not be made
    given = loader.worker_init_fn
    counter.end(loader)
    assert loader.worker_init_fn is own
    assert given is not None
    given(1)
    assert calls == [1]


@pytest.mark.parametrize(
    ("made", "is_known"), [(7, False), (8, True), (8 + 2 * 3 * 4, True), (8 + 2 * 3 * 4 + 1, False)]
)
def test_impossible_counts(made: int, is_known: bool) -> None:
    loader = DataLoader(
        TensorDataset(torch.zeros(64)), batch_size=4, num_workers=2, prefetch_factor=3
    )
    counter = ItemCounter()
    counter.begin(loader)
    counter.end(loader)
    counter.add(4)
    counter.add(4)
    counter._slots[0] = made
    assert counter.made() == (made if is_known else None)
    counter._slots[0] = 8
    assert counter.made() == (8 if is_known else None)


def test_no_workers() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8)))
    counter = ItemCounter()
    counter.begin(loader)
    counter.end(loader)
    assert counter.made() is None


def test_counts_over_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = TensorDataset(torch.arange(64))
    config = TrainingConfig(micro_batch_size=4, num_workers=2, prefetch_factor=4)
    feed = make_feed(data, config, is_shallow=True)
    feed.start()
    iterator: Any = feed._iterator
    assert iterator._send_idx - iterator._rcvd_idx == 2
    feed.allow_full_queue()
    assert iterator._send_idx - iterator._rcvd_idx == 4
    monkeypatch.setattr(feed, "ready", lambda: 0)
    feed.take()
    assert iterator._send_idx - iterator._rcvd_idx == 8
    while not feed.take().is_restart:
        pass
    made = feed.made()
    assert made is not None
    assert 68 <= made <= 68 + 8 * 4
    assert feed.loader.prefetch_factor == 4
    feed.stop()
