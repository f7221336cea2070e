"""Deliver batches epoch after epoch, and time each wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from autotune.config.training_config import TrainingConfig
from autotune.worker.build import WorkloadFault
from autotune.worker.feed import Feed
from tests.factories.loops import make_feed


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class Counted(Stream):
    def __len__(self) -> int:
        return self.length


class Untold(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


class Sampler:
    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def feed_of(
    dataset: Any, batch_size: int = 4, workers: int = 0, persistent: bool = False, **parts: Any
) -> Feed:
    config = TrainingConfig(
        micro_batch_size=batch_size, num_workers=workers, persistent_workers=persistent
    )
    return make_feed(dataset, config, **parts)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def test_is_restart() -> None:
    feed = feed_of(numbers(12))
    deliveries = [feed.start(), *(feed.take() for _ in range(6))]
    restarts = [at for at, delivery in enumerate(deliveries) if delivery.is_restart]
    assert restarts == [3, 6]
    assert feed.epoch_batches == 3
    # without workers no batch is ever ready
    assert deliveries[0].had_to_wait
    assert feed.ready() == 0


@pytest.mark.parametrize(
    ("dataset", "promised"), [(Counted(8), 2), (Stream(8), None), (Untold(8), None)]
)
def test_epoch_length_of_a_stream(dataset: Stream, promised: int | None) -> None:
    feed = feed_of(dataset)
    assert feed.epoch_batches == promised
    feed.start()
    feed.take()
    assert feed.take().is_restart
    assert feed.epoch_batches == 2


def test_epoch_without_a_batch() -> None:
    with pytest.raises(WorkloadFault, match="batch_size=16, drop_last=True"):
        feed_of(numbers(10), batch_size=16).start()


def test_samplers() -> None:
    sampler = Sampler(4)
    feed = feed_of(numbers(4), sampler=sampler)
    feed.start()
    feed.take()
    assert sampler.epochs == [0, 1]
    made = feed_of(numbers(8), sampler=lambda data: Sampler(len(data)))
    assert len(made.start().batch[0]) == 4


def test_stream_keeps_its_order() -> None:
    pipe = IterableWrapper(range(8)).shuffle()
    feed_of(pipe, sampler=(factory := Mock()))
    assert pipe._enabled
    assert not factory.called


def test_stream_takes_no_batch_sampler() -> None:
    with pytest.raises(WorkloadFault, match="Stream"):
        feed_of(Stream(8), batch_sampler=[[0]])


@pytest.mark.parametrize("part", ["sampler", "batch_sampler"])
def test_factory_gets_the_data_pipe_itself(part: str) -> None:
    pipe = SequenceWrapper(range(8))
    feed_of(pipe, **{part: (factory := Mock(return_value=[]))})
    assert factory.call_args.args[0] is pipe


def test_batch_sampler() -> None:
    feed = feed_of(numbers(9), batch_sampler=lambda data, size: [list(range(size - 1))] * 3)
    assert feed.start().batch[0].tolist() == [0, 1, 2]
    assert feed.epoch_batches == 3


def test_ready_batches() -> None:
    feed = feed_of(numbers(400), workers=1)
    feed.start()
    while feed.ready() != 2:  # two a worker, by torch's own prefetch factor
        pass
    delivery = feed.take()
    assert not delivery.had_to_wait
    feed.watches_queue = False
    assert not feed.take().had_to_wait


class Sleeper(TensorDataset):
    """Hangs at every item but those of its first batch."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index >= 4:
            signal.pause()
        return tuple(tensor[index] for tensor in self.tensors)


@pytest.mark.parametrize("persistent", [False, True])
def test_stop(persistent: bool) -> None:
    feed = feed_of(numbers(400), workers=2, shuffle=False, persistent=persistent)
    batch = feed.start().batch[0]
    workers = workers_of(feed)
    feed.stop()
    assert not any(worker.is_alive() for worker in workers)
    assert batch.tolist() == [0, 1, 2, 3]


def test_stop_kills_a_hanging_worker() -> None:
    feed = feed_of(Sleeper(torch.arange(400)), workers=1, shuffle=False)
    feed.start()
    workers = workers_of(feed)
    feed.stop(within_s=0.05)
    for worker in workers:
        worker.join(10)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL]


def test_stop_without_workers() -> None:
    feed = feed_of(numbers(8))
    feed.start()
    feed.stop()
    feed_of(numbers(8)).stop()


@pytest.mark.parametrize(("length", "workers", "capacity"), [(400, 2, 4), (12, 2, 3), (400, 0, 0)])
def test_queue_capacity(length: int, workers: int, capacity: int) -> None:
    assert feed_of(numbers(length), workers=workers).queue_capacity == capacity


def workers_of(feed: Feed) -> list[Any]:
    return list(feed._iterator._workers)  # type: ignore[union-attr]
