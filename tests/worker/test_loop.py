"""Run the measuring loop: what it counts, where its windows end, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.policy import WindowRules
from autotune.records.measurement import Block, Window
from autotune.worker import window as loop
from autotune.worker.device import open_device
from autotune.worker.feed import Delivery, Feed
from autotune.worker.step import NoTrainer, open_trainer
from autotune.worker.window import Diverged, Run, Stretch, measure_window, train_block, warm_up
from tests.factories.loops import make_feed

RULES = WindowRules(max_s=0.3, precision=0.5, block_s=0.01, warm_up_min_s=0.0)
LONG_EPOCHS = RULES.model_copy(update={"whole_epochs_up_to_s": 0.0})


def measured(
    length: int = 64,
    lr: float = 1e-3,
    rules: WindowRules = RULES,
    ends_in_s: float = 60,
    first_steps: int = loop.FIRST_STEPS,
    loss: Any = None,
    **settings: Any,
) -> tuple[Window, Run]:
    """A window over a small linear model; a dataset of some length, the last batch kept."""
    config = TrainingConfig(lr=lr, **({"micro_batch_size": 8} | settings))
    data = TensorDataset(torch.randn(length, 4), torch.randint(0, 2, (length,)))
    feed = make_feed(data, config, drop_last=False)
    first = feed.start()
    workload = Workload(model=None, dataset=data, loss=loss)
    trainer = open_trainer(workload, nn.Linear(4, 2), first.batch, config, open_device("cpu"))
    capacity = 2 * config.num_workers
    scale = trainer.scaler.get_scale()
    run = Run(
        feed, trainer, capacity, perf_counter() + ends_in_s, scale=scale, first_steps=first_steps
    )
    edges: list[str] = []
    window = measure_window(run, rules, warm_up(run, rules, first), lambda: edges.append("edge"))
    assert edges == ["edge"]
    return window, run


def test_first_steps_of_a_used_process() -> None:
    # blocks of an optimizer step each
    rules = RULES.model_copy(update={"warm_up_block_s": 0.0, "slow_factor": math.inf})
    usual, _ = measured(rules=rules, grad_accum_steps=2)
    shared, _ = measured(rules=rules, grad_accum_steps=2, first_steps=1)
    assert (usual.warm_up_batches, shared.warm_up_batches) == (10, 6)
    assert shared.is_steady


def test_short_epochs_are_measured_whole() -> None:
    window, run = measured(length=20)
    assert run.feed.epoch_batches == 3
    assert window.whole_epochs
    for block in window.blocks:
        assert block.batches % 3 == 0
        assert block.samples * 3 == block.batches * 20
    assert not window.restarts
    # the blocks hold them, and yet they are recorded
    batches = sum(block.batches for block in window.blocks)
    assert len(run.restarts) in {batches // 3, batches // 3 + 1}


@pytest.mark.parametrize("batches", [1, 3])
def test_epochs_of_few_batches_are_measured_whole(batches: int) -> None:
    window, _ = measured(length=8 * batches, rules=LONG_EPOCHS)
    assert window.whole_epochs


def test_refill_belongs_to_the_restart() -> None:
    window, _ = measured(
        length=8 * 6, rules=LONG_EPOCHS.model_copy(update={"max_s": 1.5, "precision": 0.0})
    )
    assert not window.whole_epochs
    assert window.restarts
    # without a queue the first batch alone
    assert all(restart.samples == 8 for restart in window.restarts)


def test_blocks_hold_whole_optimizer_steps() -> None:
    short = RULES.model_copy(update={"warm_up_max_s": 0.0})
    window, run = measured(rules=short, grad_accum_steps=3, length=10**6)
    assert not window.whole_epochs
    assert all(
        batches % 3 == 0
        for batches in (window.warm_up_batches, *(block.batches for block in window.blocks))
    )
    assert run.trainer.accumulated == 0
    run.pause_at = 0.0
    assert train_block(run, 30).block.batches == 3
    assert run.trainer.accumulated == 0


@pytest.mark.parametrize(
    ("is_persistent", "is_iterable", "restart_s"),
    [(False, False, 3.3), (False, True, 3.3), (True, False, 0.0), (True, True, 2.8)],
)
def test_expected_restart(
    is_persistent: bool, is_iterable: bool, restart_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = measured(length=8 * 6)
    changed = {"num_workers": 2, "persistent_workers": is_persistent}
    run.trainer.config = run.trainer.config.model_copy(update=changed)
    assert isinstance(run.feed, Feed)
    run.feed.start_s, run.feed.first_wait_s = 0.5, 3.0
    monkeypatch.setattr(Feed, "is_iterable", is_iterable)
    stretch = Stretch(Block(samples=80, batches=10, seconds=1.0, data_wait_s=0.0), 0, 1.0, 0.0)
    assert loop._expected_restart_s(run, [stretch]) == pytest.approx(restart_s)


@pytest.mark.parametrize(
    ("max_s", "ends_in_s", "stopped_by"), [(0.2, 60, "time"), (60.0, 0, "deadline")]
)
def test_stopped_by(max_s: float, ends_in_s: float, stopped_by: str) -> None:
    rules = RULES.model_copy(update={"max_s": max_s, "precision": 0.0})
    window, _ = measured(rules=rules, ends_in_s=ends_in_s)
    assert window.stopped_by == stopped_by
    assert len(window.blocks) >= 3


def test_queue_is_read_and_used_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "made", lambda _: None)  # a count would do instead
    window, run = measured(num_workers=1, length=10**5)
    assert window.queue_at_start is not None
    assert window.queue_at_end is not None
    assert sum(block.batches for block in window.blocks) >= 2 * run.queue_capacity
    assert not run.feed.watches_queue


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_loss_must_be_finite(value: str) -> None:
    with pytest.raises(Diverged, match=rf"{value}.*\b0\.001\b"):
        measured(loss=lambda outputs, _: outputs.sum() + float(value))


def test_float16_that_skips_steps_diverges() -> None:
    def overflowing(outputs: Tensor, _: Tensor) -> Tensor:
        return OverflowingGradient.apply(outputs.float().sum())  # type: ignore[no-any-return, no-untyped-call] # torch's

    with pytest.raises(Diverged):
        measured(loss=overflowing, amp_dtype="float16")


class OverflowingGradient(torch.autograd.Function):
    """A finite loss whose gradient is not."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


@dataclass
class ScriptedFeed:
    """A feed whose batches take what a test says, in turns: seconds, and whether none lay ready."""

    takes: Sequence[tuple[float, bool]]
    watches_queue: bool = True
    epoch_batches: int | None = None
    loader: Any = None
    start_s: float = 0.0
    first_wait_s: float = 0.0
    queue_capacity: int = 2
    worker_pids: tuple[int, ...] = ()
    is_iterable: bool = False
    taken: int = 0
    queued: int | None = 2
    batch: object = "batch"
    """None: the script holds it."""

    def take(self) -> Delivery:
        wait_s, had_to_wait = self.takes[self.taken % len(self.takes)]
        self.taken += 1
        return Delivery(self.batch, 1, perf_counter(), wait_s, False, had_to_wait)

    def take_apart_s(self) -> float:
        return 0.0

    def is_at_end(self) -> bool:
        return False

    def ready(self) -> int | None:
        return self.queued

    def asked_batches(self) -> int | None:
        return None

    def made(self) -> int | None:
        return None

    def allow_full_queue(self) -> None:
        """Its queue is as it is."""

    def stop(self, within_s: float = 1.0) -> None:
        """It has no workers."""


@pytest.mark.parametrize(
    ("learns", "ready", "take_s"), [(True, 2, 1e-9), (True, None, None), (False, 2, None)]
)
def test_warm_up_learns_the_time_of_a_take(
    learns: bool, ready: int | None, take_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "learns_takes", learns)  # as on an accelerator
    feed = ScriptedFeed([(1e-9, False)], queued=ready)
    run = Run(feed, NoTrainer(TrainingConfig(num_workers=2)), 2, math.inf)
    warm_up(run, RULES, feed.take())
    assert run.take_s == take_s


def test_batches_that_a_script_holds_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "learns_takes", True)
    feed = ScriptedFeed([(0.0, False)], queued=0, batch=None)
    run = Run(feed, NoTrainer(TrainingConfig(num_workers=2)), 2, math.inf)
    warm_up(run, RULES, feed.take())
    assert run.take_s is None


def test_take_of_a_ready_batch_is_no_wait() -> None:
    feed = ScriptedFeed([(1.4e-9, False), (1e-9, False), (9e-9, True)])
    run = Run(feed, NoTrainer(TrainingConfig(num_workers=2)), 2, math.inf, take_s=1e-9)
    block = train_block(run, 6).block
    assert block.data_wait_s == pytest.approx(22.8e-9)
    assert block.starved_s == pytest.approx(16e-9)
    assert block.waited_s == block.starved_s
    assert block.ready_at_end == 2
