"""Measure the long-run throughput in short windows over deep queues, with simulated loaders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any

import pytest
from torch import Tensor, zeros

from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import PruningThreshold, behind_threshold
from autotune.models.statistics import wait_fraction, window_rate
from autotune.policy import POLICY, WindowRules
from autotune.records.measurement import Block, Window
from autotune.worker import window as edges
from autotune.worker import window as loop
from autotune.worker.feed import Delivery
from autotune.worker.step import NoTrainer
from autotune.worker.window import Run, measure_window, warm_up

WORKERS, PREFETCH, BATCH = 8, 8, 256
STALL_S = 3.0
"""The first step's, in which workers fill the queue."""
PARTS = 256
SHORT = WindowRules(max_s=1.5, precision=0.0)


@dataclass
class Clock:
    """Stands still unless it is moved."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class SimulatedFeed:
    """Workers that make items of known cost, each for its own batches, and a queue between them and the loop."""

    clock: Clock
    item_s: Callable[[int], float]
    """Seconds of an item by its number."""
    is_counted: bool = True
    depth: int = 1
    """Batches that each worker is asked for in advance."""
    watches_queue: bool = True
    epoch_batches: int | None = None
    loader: Any = None
    start_s: float = 0.0
    first_wait_s: float = 0.0
    queue_capacity: int = WORKERS * PREFETCH
    worker_pids: tuple[int, ...] = ()
    is_iterable: bool = False
    taken: int = 0
    asked: int = 0
    may_deepen: bool = False
    items: list[list[float]] = field(default_factory=list)
    """When each part of each batch is done."""
    free: list[float] = field(default_factory=lambda: [0.0] * WORKERS)
    """When each worker has done all that it was asked for."""

    def __post_init__(self) -> None:
        self._ask()

    def _ask(self) -> None:
        while len(self.items) < self.taken + self.depth * WORKERS:
            batch, worker = len(self.items), len(self.items) % WORKERS
            first, size = batch * BATCH, BATCH // PARTS
            parts = (
                sum(map(self.item_s, range(first + at * size, first + (at + 1) * size)))
                for at in range(PARTS)
            )
            begun = max(self.clock.time, self.free[worker])
            self.items.append([begun + spent_s for spent_s in accumulate(parts)])
            self.free[worker] = self.items[-1][-1]

    def take(self) -> Delivery:
        had_to_wait, asked = self.ready() == 0, self.clock.time
        if had_to_wait and self.may_deepen:
            self.depth = PREFETCH
            self._ask()
        self.clock.time = max(self.clock.time, self.items[self.taken][-1])
        self.taken += 1
        self._ask()
        return Delivery(
            None, BATCH, asked, self.clock.time - asked, is_restart=False, had_to_wait=had_to_wait
        )

    def take_apart_s(self) -> float:
        return 0.0

    def is_at_end(self) -> bool:
        return False

    def ready(self) -> int | None:
        return sum(parts[-1] <= self.clock.time for parts in self.items[self.taken :])

    def asked_batches(self) -> int | None:
        return None

    def made(self) -> int | None:
        done = sum(bisect_right(parts, self.clock.time) for parts in self.items[self.taken :])
        return self.taken * BATCH + done * (BATCH // PARTS) if self.is_counted else None

    def allow_full_queue(self) -> None:
        self.may_deepen, self.depth = True, max(2, self.depth)
        self._ask()

    def stop(self, within_s: float = 1.0) -> None:
        """It has no processes."""


@dataclass(slots=True)
class Device(NoTrainer):
    """Takes a known time for a batch; the first takes longer."""

    clock: Clock = field(default_factory=Clock)
    batch_s: float = 0.05
    steps: int = 0

    def train(self, batch: Any) -> Tensor:  # type: ignore[override] # a loss on a device, as a Trainer's is
        self.clock.time += self.batch_s + (0.0 if self.steps else STALL_S)
        self.steps += 1
        return zeros(())


@dataclass
class Job:
    """A loader and a device, by their rates alone in samples/s."""

    loader: float
    device: float
    is_counted: bool = True
    is_shallow: bool = True
    slow_every: int = 0
    """Of a worker's items each so many-th takes as long as 30 others."""
    told: list[Block] = field(default_factory=list)

    def _feed(self, clock: Clock) -> SimulatedFeed:
        usual_s = WORKERS / self.loader
        if self.slow_every:
            usual_s /= (self.slow_every + 29) / self.slow_every
        item_s = partial(_item_s, usual_s=usual_s, slow_every=self.slow_every)
        return SimulatedFeed(clock, item_s, self.is_counted, 1 if self.is_shallow else PREFETCH)

    def measure(self, monkeypatch: pytest.MonkeyPatch, rules: WindowRules = SHORT) -> Window:
        """Return the window of a trial."""
        clock = Clock()
        for module in (loop, edges):
            monkeypatch.setattr(module, "perf_counter", clock.now)
        config = TrainingConfig(
            micro_batch_size=BATCH, lr=1.0, num_workers=WORKERS, prefetch_factor=PREFETCH
        )
        feed = self._feed(clock)
        run = Run(
            feed, Device(config, clock=clock, batch_s=BATCH / self.device), feed.queue_capacity, inf
        )
        warmth = warm_up(run, rules, feed.take(), self.told.append)
        return measure_window(run, rules, warmth, lambda: None)

    def long_run(self) -> float:
        """Return the rate of a plain loop of 1,000 batches, after 500."""
        clock = Clock()
        feed, begun = self._feed(clock), 0.0
        feed.depth = PREFETCH
        for number in range(1500):
            feed.take()
            clock.time += BATCH / self.device
            if number == 499:
                begun = clock.time
        return 1000 * BATCH / (clock.time - begun)


def _item_s(number: int, usual_s: float, slow_every: int) -> float:
    is_slow = slow_every > 0 and number % slow_every == slow_every // 2
    return usual_s * (30 if is_slow else 1)


LIMITED = pytest.mark.parametrize(
    ("loader", "device"),
    [(600, 5000), (600, 1200), (1900, 2000), (2000, 1000), (20_000, 1000), (2000, 1950)],
)


@LIMITED
@pytest.mark.parametrize("is_shallow", [True, False])
def test_short_window_has_the_long_run_rate(
    loader: float, device: float, is_shallow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(loader, device, is_shallow=is_shallow)
    window = job.measure(monkeypatch)
    rate, truth = window_rate(window), job.long_run()
    assert truth == pytest.approx(min(loader, device), rel=0.01)
    assert rate.value == pytest.approx(truth, rel=0.02)
    assert rate.low <= truth * 1.001
    assert truth <= rate.high * 1.001
    assert wait_fraction(window) == pytest.approx(max(0.0, 1 - loader / device), abs=0.03)


@pytest.mark.parametrize("slow_every", [64, 300])
@pytest.mark.parametrize(("loader", "device"), [(2000, 5000), (2000, 1500)])
def test_slow_items_within_a_batch_count(
    loader: float, device: float, slow_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(loader, device, slow_every=slow_every)
    assert window_rate(job.measure(monkeypatch)).value == pytest.approx(job.long_run(), rel=0.02)


def test_queue_is_used_up_without_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Job(2000, 1950, is_counted=False, is_shallow=False).measure(
        monkeypatch, WindowRules(precision=0.0)
    )
    assert window.made is None
    assert (
        window.warm_up_batches + sum(block.batches for block in window.blocks) >= WORKERS * PREFETCH
    )


@pytest.mark.parametrize(("loader", "device"), [(400, 5000), (5000, 400)])
def test_hopeless_trial_ends_in_its_warm_up(
    loader: float, device: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, bar = Job(loader, device), PruningThreshold(number=1, low_samples_per_s=2_000.0)
    job.measure(monkeypatch)
    assert all(block.is_warm_up for block in job.told)
    assert behind_threshold(job.told, bar, POLICY.stopping) is not None


@pytest.mark.parametrize(("loader", "device"), [(1500, 5000), (5000, 1500)])
def test_trial_near_the_threshold_gets_its_window(
    loader: float, device: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, bar = Job(loader, device), PruningThreshold(number=1, low_samples_per_s=2_000.0)
    job.measure(monkeypatch)
    assert all(
        behind_threshold(job.told[:count], bar, POLICY.stopping) is None
        for count in range(len(job.told) + 1)
    )
    assert job.told
