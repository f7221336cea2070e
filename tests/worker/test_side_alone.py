"""Measure each side alone: what is counted, where a stretch ends, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from autotune.config.training_config import TrainingConfig
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Block
from autotune.worker import batch as reuse
from autotune.worker import side_alone as alone
from autotune.worker.batch import Held
from autotune.worker.device import Device, open_device
from autotune.worker.feed import Feed
from autotune.worker.side_alone import collect, copy_alone, device_alone, loader_alone, resident
from autotune.worker.step import Step, Trainer, make_trainer
from tests import accelerator
from tests.accelerator import CALLS, DEVICES, NAME, on_simulated_device
from tests.factories import make_window
from tests.factories.loops import make_feed

SHORT_S = 0.02
BATCH = (torch.zeros(8, 4),)
HELD = [Held(BATCH, 8)]
LONG = 10**4
"""Rows that no stretch uses up."""


class Varying(IterableDataset[Tensor]):
    """Rows of growing length."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.zeros(length) for length in range(1, 40))


def rows(length: int) -> TensorDataset:
    return TensorDataset(torch.zeros(length, 4))


def config_of(**settings: Any) -> TrainingConfig:
    return TrainingConfig(**({"micro_batch_size": 8} | settings))


PLAIN = config_of()


def started(dataset: Any, config: TrainingConfig, **parts: Any) -> Feed:
    feed = make_feed(dataset, config, **parts)
    feed.start()
    return feed


def trainer_of(config: TrainingConfig, seen: list[Any] | None = None) -> Trainer:
    model = nn.Linear(4, 2)

    def step(model: nn.Module, batch: Any) -> Tensor:
        if seen is not None:
            seen.append(batch)
        outputs: Tensor = model(batch[0])
        return outputs.sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return make_trainer(model, optimizer, Step(step, "made up"), config, open_device("cpu"))


def loaded(length: int, *, seconds: float = SHORT_S, ends_at: float = inf) -> Ceiling:
    """Measure a loader of batches of 8 alone."""
    return loader_alone(started(rows(length), PLAIN), PLAIN, seconds=seconds, ends_at=ends_at)


@pytest.mark.parametrize("batches", [1, 3, 4, 1000])
def test_loader_samples_across_epochs(batches: int) -> None:
    ceiling = loaded(8 * batches)
    assert ceiling.samples == 8 * ceiling.batches
    assert ceiling.samples_per_s == pytest.approx(ceiling.samples / ceiling.seconds, rel=0.5)


def test_short_last_batches() -> None:
    ceiling = loader_alone(started(rows(8 * 2 + 4), PLAIN, drop_last=False), PLAIN, seconds=0.2)
    assert ceiling.batches % 3 == 0  # whole epochs
    assert ceiling.samples * 3 == ceiling.batches * 20


def test_stretch_uses_up_the_queue_twice() -> None:
    config = config_of(num_workers=1, prefetch_factor=3)
    feed = started(rows(LONG), config)
    ceiling = loader_alone(feed, config, seconds=0.2)
    assert ceiling.batches >= 2 * feed.queue_capacity
    assert len(feed.take().batch[0]) == 8
    assert feed.watches_queue
    feed.stop()


def test_relative_sd_of_a_loader_that_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = Block(samples=100, batches=10, seconds=0.1, data_wait_s=0.1)
    pause = steady.model_copy(update={"seconds": 0.6})
    expected = [
        ((steady,) * 8, pytest.approx(0.0, abs=1e-9)),
        ((*(steady,) * 7, pause), pytest.approx(0.46, abs=0.01)),
        ((pause,), None),
    ]
    for blocks, relative_sd in expected:
        window = make_window(blocks=blocks)
        monkeypatch.setattr(alone, "window_of", lambda *_, window=window, **__: window)
        assert loaded(LONG).relative_sd == relative_sd


def test_loader_stretch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(LONG, seconds=1e6, ends_at=0.0).batches == 1
    monkeypatch.setattr(alone, "_LONGEST", 0.0)
    assert loaded(LONG, seconds=1e6).batches == 1


def test_unseen_restart_is_added_in_proportion() -> None:
    feed = started(rows(8 * 10**5), PLAIN)
    dear = loader_alone(feed, PLAIN, seconds=SHORT_S, restart_s=1e6)
    assert dear.samples_per_s == pytest.approx(8 * 10**5 / 1e6, rel=0.1)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_device_trains_in_whole_steps(accumulation: int) -> None:
    trainer = trainer_of(config_of(grad_accum_steps=accumulation))
    trainer.train(BATCH)
    ceiling = device_alone(trainer, HELD, seconds=0.3)  # of which three steps never take twice
    assert trainer.accumulated == 0
    assert ceiling.batches % accumulation == 0
    assert ceiling.batches >= 3 * accumulation
    assert ceiling.samples == 8 * ceiling.batches
    assert ceiling.samples_per_s == pytest.approx(ceiling.samples / ceiling.seconds)
    assert ceiling.host_s is None  # the CPU is its own device


def test_batches_of_several_sizes() -> None:
    seen: list[Any] = []
    batches = [Held((torch.zeros(size, 4),), size) for size in (8, 2)]
    ceiling = device_alone(trainer_of(PLAIN, seen), batches, seconds=SHORT_S)
    assert [len(batch[0]) for batch in seen[:4]] == [8, 2, 8, 2]
    assert ceiling.samples == sum(len(batch[0]) for batch in seen[-ceiling.batches :])


@pytest.mark.parametrize(("seconds", "ends_at"), [(SHORT_S, -inf), (0.0, inf)])
def test_one_step_to_warm_up_and_one_that_counts(seconds: float, ends_at: float) -> None:
    seen: list[Any] = []
    ceiling = device_alone(trainer_of(PLAIN, seen), HELD, seconds=seconds, ends_at=ends_at)
    assert (ceiling.batches, len(seen)) == (1, 2)


class Scaler:
    """A GradScaler that skips its first steps, each time with half the scale."""

    def __init__(self, skips: int) -> None:
        self.skips, self.factor = skips, 65536.0

    def get_scale(self) -> float:
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.skips <= 0:
            optimizer.step()

    def update(self) -> None:
        self.factor /= 2 if self.skips > 0 else 1
        self.skips -= 1


def test_skipped_steps_are_warm_up() -> None:
    seen: list[Any] = []
    trainer: Any = trainer_of(config_of(amp_dtype="float16"), seen)
    trainer.accumulator.scaler = Scaler(skips=9)
    ceiling = device_alone(trainer, HELD, seconds=0.0)
    assert (len(seen) - ceiling.batches, trainer.scaler.skips) == (10, -2)
    trainer.accumulator.scaler = Scaler(skips=10**6)
    with pytest.raises(RuntimeError, match="float16"):
        device_alone(trainer, HELD, seconds=SHORT_S)


def test_loss_must_be_finite() -> None:
    broken = Held((torch.full((8, 4), float("nan")),), 8)
    with pytest.raises(RuntimeError, match="nan"):
        device_alone(trainer_of(PLAIN), [broken], seconds=SHORT_S)


def doubling(seen: list[Any]) -> Step:
    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append(float(batch[0].mul_(2.0).sum()))
        outputs: Tensor = model(batch[0])
        return outputs.sum()

    return Step(step, "changes its batch")


@pytest.mark.parametrize(("cloned_bytes", "at_once"), [(4 * 128, 4), (1, 2)])
def test_step_that_changes_its_batch(
    cloned_bytes: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    def cloned(batch: Any) -> Any:
        events.append("clone")
        return deepcopy(batch)

    monkeypatch.setattr(reuse, "_CLONED_BYTES", cloned_bytes)
    monkeypatch.setattr(reuse, "copied", cloned)
    monkeypatch.setattr(alone, "perf_counter", count(0.0, 0.5).__next__)
    trainer, batch = trainer_of(config_of(grad_accum_steps=2)), (torch.ones(8, 4),)
    trainer.step = doubling(events)
    monkeypatch.setattr(Device, "synchronize", lambda _: events.append("edge"))
    ceiling = device_alone(trainer, [Held(batch, 8)], seconds=1.0)
    assert events[12:] == [*["clone"] * at_once, "edge", *[64.0] * at_once, "edge"] * (
        ceiling.batches // at_once
    )
    assert set(events) == {"clone", "edge", 64.0}
    assert float(batch[0].sum()) == 32


def test_three_steps_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_CLONED_BYTES", 1)
    monkeypatch.setattr(alone, "perf_counter", count(0.0, 0.5).__next__)
    trainer = trainer_of(PLAIN)
    trainer.step = doubling([])
    assert device_alone(trainer, [Held((torch.ones(8, 4),), 8)], seconds=0.75).batches == 3


@pytest.mark.parametrize("channels_last", [False, True])
def test_resident_batch_is_not_copied_again(channels_last: bool) -> None:
    trainer = trainer_of(config_of(channels_last=channels_last))
    held = resident(trainer, [Held([torch.randn(8, 3, 5, 5), torch.zeros(8)], 8)])[0].batch
    again = trainer.to_device(held)
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in held]


def test_equal_batches_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_HELD_BYTES", 10**9)
    config = config_of(micro_batch_size=1)
    for dataset, held in ((rows(100), 1), (Varying(), 8)):
        batches = collect(started(dataset, config), count=8, seconds=inf)
        assert len(resident(trainer_of(config), batches)) == held


@on_simulated_device
def test_copies_are_waited_for_once_a_stretch() -> None:
    sim, queue = open_device(NAME), DEVICES[0].queue
    config = config_of(micro_batch_size=4, pin_memory=True)
    trainer = replace(trainer_of(config_of(micro_batch_size=4)), config=config, device=sim)
    held = [Held((torch.randn(size, 8), torch.zeros(size)), size) for size in (4, 8)]
    queue.kernel_s, begun, waits = 1e-3, queue.kernels, CALLS["synchronize 0"]
    ceiling = copy_alone(trainer, held, seconds=0.1)
    moved = (queue.kernels - begun) / 2 - 2  # of two tensors a batch, less the warm-up
    assert ceiling.batches == moved >= 3
    assert ceiling.samples == sum((4, 8)[index % 2] for index in range(ceiling.batches))
    assert ceiling.samples_per_s == pytest.approx(ceiling.samples / ceiling.seconds)
    assert ceiling.seconds >= 2e-3 * ceiling.batches
    stretches = (CALLS["synchronize 0"] - waits) / 2 - 2
    assert stretches < ceiling.batches
    assert copy_alone(trainer, held, seconds=10.0, ends_at=0.0).batches == 1


def test_batch_that_moves_in_place() -> None:
    class Moving:
        """Moves its tensor, and returns nothing."""

        def __init__(self) -> None:
            self.rows, self.was_moved = torch.randn(4, 8), False

        def to(self, device: Any, **_: Any) -> None:
            assert not self.was_moved
            self.was_moved = True

    assert copy_alone(trainer_of(PLAIN), [Held(Moving(), 4)], seconds=0.001).batches > 1


@pytest.mark.parametrize(
    ("limit_bytes", "seconds", "count"),
    [(10**9, inf, 5), (3 * 128, inf, 3), (1, inf, 1), (10**9, -1.0, 1)],
)
def test_collect(
    limit_bytes: int, seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "_HELD_BYTES", limit_bytes)
    batches = collect(started(rows(400), PLAIN), count=5, seconds=seconds)
    assert len(batches) == count


class Launching:
    """A step that the host launches in 1 ms, in 3 ms right after a pause, and the device works on for 20 ms."""

    def __init__(self) -> None:
        self.clock, self.is_cold = accelerator.use_still_clock(), False
        alone.perf_counter = self.clock.now  # type: ignore[attr-defined] # in a process of its own
        alone.sleep = self.pause  # type: ignore[attr-defined,assignment] # as above

    def pause(self, seconds: float) -> None:
        self.clock.time += seconds
        self.is_cold = True

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.clock.time += 0.003 if self.is_cold else 0.001
        self.is_cold = False
        DEVICES[0].queue.launch(0.02)
        return model(batch[0]).sum() * 0.0  # type: ignore[no-any-return] # torch has not typed it


@pytest.mark.parametrize(("pause_s", "host_s"), [(0.0, 0.001), (0.01, 0.003)])
@on_simulated_device
def test_launches_are_timed_on_an_idle_device(pause_s: float, host_s: float) -> None:
    step, sim, model = Launching(), open_device("sim:0"), nn.Linear(4, 2).to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = make_trainer(model, optimizer, Step(step, "made up"), PLAIN, sim)
    ceiling = device_alone(trainer, resident(trainer, HELD), seconds=1.0, pause_s=pause_s)
    assert ceiling.samples_per_s == pytest.approx(8 / 0.02, rel=0.01)
    assert ceiling.host_s == pytest.approx(host_s)
