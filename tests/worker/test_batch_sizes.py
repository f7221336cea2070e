"""Count the samples of a batch where it is put together, whatever its tensors look like."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Iterator
from os import sched_yield
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autotune.config.training_config import TrainingConfig
from autotune.worker.batch import size_counter, unwrapped
from autotune.worker.feed import Feed
from tests.factories.loops import make_feed


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def joined(items: list[int]) -> torch.Tensor:
    """One row, whatever the number of samples."""
    return torch.tensor([items])


def ragged(*_: Any) -> list[list[int]]:
    return [[0, 1, 2], [3], [4, 5]]


def sizes(
    dataset: Any, taken: int, workers: int = 0, *, persistent: bool = False, **parts: Any
) -> list[int]:
    config = TrainingConfig(micro_batch_size=4, num_workers=workers, persistent_workers=persistent)
    feed = make_feed(dataset, config, collate_fn=joined, **parts)
    deliveries = [feed.start(), *(feed.take() for _ in range(taken - 1))]
    feed.stop()
    assert all(delivery.batch.shape == (1, delivery.samples) for delivery in deliveries)
    return [delivery.samples for delivery in deliveries]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "parts", "expected"),
    [
        (Numbers(), {"drop_last": True}, [4, 4, 4, 4, 4]),
        (Numbers(), {"drop_last": False}, [4, 4, 2, 4, 4]),
        (Numbers(), {"batch_sampler": ragged}, [3, 1, 2, 3, 1]),
        (Numbers(), {"sampler": [3, 1, 2, 0, 5], "drop_last": False}, [4, 1, 4, 1, 4]),
        (Stream(), {"drop_last": True}, [4, 4, 4, 4, 4]),
        (Stream(), {"drop_last": False}, [4, 4, 2, 4, 4]),
    ],
)
def test_samples_of_each_batch(
    dataset: Any, parts: dict[str, Any], expected: list[int], workers: int
) -> None:
    assert sizes(dataset, 5, workers, persistent=workers > 0, **parts) == expected


def test_counting_loader_can_be_copied() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(9)), batch_size=4)
    size_counter(loader, deque())
    for one in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [len(batch[0]) for batch in one] == [4, 4, 1]
    own = unwrapped(loader).batch_sampler
    assert loader.batch_sampler is not None
    loader.batch_sampler.drop_last = True  # type: ignore[attr-defined] # the sampler's own
    assert own.drop_last


def test_samples_without_batches() -> None:
    feed = Feed(DataLoader(Numbers(), batch_size=None))
    assert [feed.start().samples, feed.take().samples] == [1, 1]


class Gated(Dataset[int]):
    """Ten items; the first batch's wait until a later one has been delivered."""

    def __init__(self, gate: Path, first: int) -> None:
        self.gate, self.first = gate, first

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        while index == self.first and not self.gate.exists():
            sched_yield()
        return index


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"batch_sampler": [[0, 1, 2], [3], [4, 5]]}, {0: 3, 3: 1, 4: 2}),
        ({"batch_size": 4, "drop_last": False}, {0: 4, 4: 4, 8: 2}),
        ({"batch_size": 4, "drop_last": True}, {0: 4, 4: 4}),
    ],
)
def test_batches_out_of_order(
    tmp_path: Path, parts: dict[str, Any], expected: dict[int, int]
) -> None:
    gate = tmp_path / "gate"
    feed = Feed(
        DataLoader(Gated(gate, first=0), num_workers=2, collate_fn=joined, in_order=False, **parts)
    )
    came = [feed.start()]
    gate.touch()
    came += [feed.take() for _ in expected][:-1]
    feed.stop()
    # the first batch waits for a later one
    assert came[0].batch[0, 0] > 0
    assert {int(delivery.batch[0, 0]): delivery.samples for delivery in came} == expected
