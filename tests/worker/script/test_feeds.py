"""A script's batches are taken once each, with their samples, whoever iterates its loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from autotune.config.training_config import TrainingConfig
from autotune.worker.device import open_device
from autotune.worker.feed import Delivery, FeedEnded, QueueDepth
from autotune.worker.script.feeds import (
    Conductor,
    CountedLoader,
    ScriptFeed,
    ScriptTrainer,
    StepFeed,
)
from autotune.worker.script.sightings import SideBatches


class Script:
    """A script's loop over a loader, as the session leads it."""

    def __init__(
        self, loader: DataLoader[object], work: Callable[[ScriptFeed, ScriptTrainer], None]
    ) -> None:
        self.counted, self.trained = CountedLoader(loader), list[object]()
        self.conductor = Conductor(lambda: work(self.feed, self.trainer))
        self.feed = ScriptFeed(
            self.conductor, self.counted, loader, QueueDepth(is_shallow=False), ranks=2
        )
        parameter = torch.zeros(1, requires_grad=True)
        config, device = TrainingConfig(micro_batch_size=4), open_device("cpu")
        self.trainer = ScriptTrainer(config, device, self.conductor, torch.optim.SGD([parameter]))

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            self.counted.begin_epoch()
            iterator = iter(self.counted.loader)
            self.feed.began_epoch(iterator, 0.0)
            with suppress(StopIteration):
                while True:
                    self.trained.append(self.conductor.ask())
        self.conductor.end()


def until_it_ends(taken: list[Delivery]) -> Callable[[ScriptFeed, ScriptTrainer], None]:
    def work(feed: ScriptFeed, trainer: ScriptTrainer) -> None:
        with suppress(FeedEnded):
            while True:
                taken.append(feed.take())
                trainer.train(taken[-1].batch)

    return work


def pairs(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


@given(
    length=st.integers(1, 20), size=st.integers(1, 8), drops=st.booleans(), epochs=st.integers(1, 3)
)
def test_every_batch_is_counted_once(length: int, size: int, drops: bool, epochs: int) -> None:
    taken: list[Delivery] = []
    loader: DataLoader[object] = DataLoader(
        pairs(length), batch_size=min(size, length), drop_last=drops, shuffle=True
    )
    script = Script(loader, until_it_ends(taken))
    script.run(epochs)
    sizes = [len(batch[0]) for batch in loader]
    assert [one.samples for one in taken] == [2 * each for each in sizes] * epochs  # of two ranks
    restarts = [number for number, one in enumerate(taken) if one.is_restart]
    assert restarts == [number * len(sizes) for number in range(1, epochs)]
    assert len(script.trained) == len(taken)
    assert script.feed.epoch_batches == len(sizes)
    assert (script.feed.epochs, script.feed.is_at_end()) == (epochs, False)


def test_workers_started_for_each_step_are_waited_for() -> None:
    """The script says `next(iter(loader))` in each step."""
    taken: list[Delivery] = []
    script = Script(DataLoader(pairs(4), batch_size=4), until_it_ends(taken))
    for _ in range(2):
        script.counted.begin_epoch()
        iterator = iter(script.counted.loader)
        script.feed.began_epoch(iterator, perf_counter() - 60.0)
        script.trained.append(script.conductor.ask())
    script.conductor.end()
    assert [one.wait_s > 60 for one in taken] == [True, True]
    assert not any(one.is_restart for one in taken)


class Broken(Dataset[int]):
    """Some of its items can't be read."""

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index in self.broken:
            raise OSError(f"{index} is truncated")
        return index


def test_script_may_skip_a_broken_batch() -> None:
    taken, failed = list[Delivery](), list[str]()
    loader: DataLoader[object] = DataLoader(Broken({5, 6}), batch_size=3)
    script = Script(loader, until_it_ends(taken))
    script.counted.begin_epoch()
    iterator = iter(loader)
    script.feed.began_epoch(iterator, 0.0)
    while len(failed) < 4:
        try:
            script.trained.append(script.conductor.ask())
        except OSError as error:
            failed.append(str(error))
        except StopIteration:
            break
    script.conductor.end()
    assert failed == ["5 is truncated", "6 is truncated"]
    assert [batch.tolist() for batch in script.trained] == [[0, 1, 2], [9, 10, 11]]  # type: ignore[attr-defined]
    assert [one.samples for one in taken] == [2 * 3] * 2


@pytest.mark.parametrize(
    ("broken", "is_passed_over"), [({5}, True), ({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, False)]
)
def test_some_broken_samples_are_passed_over(broken: set[int], is_passed_over: bool) -> None:
    taken, raised = list[Delivery](), list[OSError]()

    def work(feed: ScriptFeed, trainer: ScriptTrainer) -> None:
        feed.take_over()
        try:
            taken.extend(feed.take() for _ in range(6))
        except OSError as error:
            raised.append(error)

    loader: DataLoader[object] = DataLoader(Broken(broken), batch_size=2)
    script, iterator = Script(loader, work), iter(loader)
    script.feed.began_epoch(iterator, 0.0)
    script.conductor.ask()  # until work returns
    assert (len(taken), len(raised)) == ((6, 0) if is_passed_over else (0, 1))


def test_own_loader_is_iterated_without_the_script() -> None:
    taken: list[Delivery] = []

    def work(feed: ScriptFeed, trainer: ScriptTrainer) -> None:
        feed.take_over()
        taken.extend(feed.take() for _ in range(7))
        with suppress(FeedEnded):
            trainer.conductor.give_error(StopIteration)

    script = Script(DataLoader(pairs(12), batch_size=4), work)
    script.run(1)
    assert script.trained == []
    assert [one.is_restart for one in taken] == [False, False, False, True, False, False, True]


def test_stream_that_can_be_read_once() -> None:
    taken: list[Delivery] = []
    numbers = iter(range(8))

    class Once(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return numbers

    def work(feed: ScriptFeed, trainer: ScriptTrainer) -> None:
        feed.take_over()
        taken.extend(feed.take() for _ in range(2))
        with pytest.raises(FeedEnded):
            feed.take()
        with suppress(FeedEnded):
            trainer.conductor.give_error(StopIteration)

    stream: Dataset[int] = Once()
    Script(DataLoader(stream, batch_size=4), work).run(1)
    assert [one.samples for one in taken] == [8, 8]  # of two ranks


def test_epoch_left_early_ends_its_workers() -> None:
    loader: DataLoader[object] = DataLoader(pairs(64), batch_size=4, num_workers=1)
    conductor = Conductor(lambda: None)
    iterator = iter(loader)
    feed = ScriptFeed(conductor, CountedLoader(loader), iterator, QueueDepth(is_shallow=False))
    (worker,) = iterator._workers  # type: ignore[attr-defined] # of an iterator with workers
    del iterator
    worker.join(30)
    assert not worker.is_alive()
    assert feed.ready() is None


class Stream(torch.utils.data.IterableDataset[int]):
    """Nine numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


STREAM: Dataset[int] = Stream()
OWN_BATCHES = BatchSampler(RandomSampler(pairs(8)), 3, drop_last=True)
MADE_BATCHES = [(torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(5, 2), torch.zeros(5))]


@pytest.mark.parametrize(
    ("data", "arguments", "is_early", "sizes"),
    [
        (STREAM, {"batch_size": 4}, False, [4, 4, 1]),
        (MADE_BATCHES, {"batch_size": None}, False, [3, 5]),
        # The loader began before it was counted.
        (STREAM, {"batch_size": 4}, True, [4]),
        (pairs(8), {"batch_size": 4}, True, [4]),
        (pairs(8), {"batch_sampler": OWN_BATCHES}, True, [3]),
    ],
)
def test_samples_of_a_batch(
    data: Any, arguments: dict[str, Any], is_early: bool, sizes: list[int]
) -> None:
    loader: DataLoader[object] = DataLoader(data, **arguments)
    early = iter(loader)
    counted = CountedLoader(loader)
    iterator = early if is_early else iter(loader)
    assert [counted.fetch(iterator)[1] for _ in sizes] == sizes


def test_forward_pass_counts_as_a_batch() -> None:
    feed = StepFeed(24)
    found = (feed.take().samples, feed.ready(), feed.is_at_end(), feed.loader)
    assert found == (24, 0, False, None)
    feed.stop()


def test_time_from_step_to_forward_pass_is_waiting() -> None:
    feed = StepFeed(24, is_timed=True)
    assert feed.take().wait_s == 0, "nothing has stepped yet"
    feed.has_trained()
    assert feed.take().wait_s > 0
    feed.has_trained()
    feed.computes()  # another model of the script's, or an evaluation
    assert feed.take().wait_s == 0
    assert not feed.knows_waits, "of one batch in three"
    of_accelerator = StepFeed(24)
    of_accelerator.has_trained()
    assert of_accelerator.take().wait_s == 0, "it may still be at work on the step"
    assert not of_accelerator.knows_waits


def test_loss_is_that_of_the_last_backward_pass() -> None:
    losses: list[float] = []

    def work(_: ScriptFeed, trainer: ScriptTrainer) -> None:
        losses.extend(float(trainer.train(None)) for _ in range(2))

    script = Script(DataLoader(pairs(4)), work)
    script.conductor.ask()
    script.trainer.loss = torch.tensor(3.0)
    script.conductor.ask()
    script.trainer.loss = torch.tensor(2.0)
    script.conductor.ask()
    assert losses == [3.0, 2.0]
    assert script.trainer.accumulated == 2


def test_only_evaluations_are_left_out() -> None:
    beside = SideBatches()
    beside.begin()
    beside.on_batch(0.0)
    beside.on_training()  # one batch beside each training batch: in step with it
    beside.on_batch(0.0)
    beside.on_batch(0.0)
    beside.end()
    assert beside.take() == 0
    beside.begin()
    beside.on_batch(0.0)
    beside.on_batch(0.0)
    beside.on_training()
    assert beside.take() > 0
    beside.begin()
    beside.end()
    assert beside.take() > 0
    assert beside.take() == 0


def test_steps_on_another_loader_are_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("autotune.worker.script.sightings.perf_counter", lambda: now[0])
    beside = SideBatches()
    for trains in (False, True):  # an evaluation, then a turn of another task
        beside.on_training()
        beside.begin()
        beside.on_step()  # of the training loader's last batch
        for _ in range(3):
            now[0] += 1.0
            beside.on_batch(0.75)
            if trains:
                beside.on_step()
        beside.end()
        assert (beside.steps, beside.turn_s) == ((3, 2.0) if trains else (0, 0.0))
    assert (beside.trained_s, beside.waited_s, beside.take()) == (3.0, 2.25, 6.0)
    beside.on_training()
    assert (beside.steps, beside.turn_s) == (0, 0.0)
