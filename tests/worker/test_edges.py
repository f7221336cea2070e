"""Time the edges of a window's blocks on a slow device that works behind the host.

The device is simulated (see accelerator.py), and its clock moves only when somebody waits: every time here is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autotune.config.training_config import TrainingConfig
from autotune.models.statistics import window_rate
from autotune.policy import WindowRules
from autotune.records.measurement import Block, Window
from autotune.worker import feed
from autotune.worker import window as edges
from autotune.worker.device import open_device
from autotune.worker.group import ALONE, Group
from autotune.worker.step import Step, make_trainer
from autotune.worker.window import (
    Diverged,
    DrainedEdges,
    Launched,
    Run,
    TimedEdges,
    measure_window,
    open_edges,
    warm_up,
)
from tests import accelerator
from tests.accelerator import CALLS, DEVICES, StillClock, on_simulated_device
from tests.factories.loops import make_feed

BATCH_S = 0.01
"""What a batch takes on the device."""
RULES = WindowRules(max_s=0.8, precision=0.0, block_s=0.04)


@dataclass
class SlowItems(Dataset[Tensor]):
    """Items that take their time to fetch, and epochs that take theirs to begin; in batches of one."""

    clock: StillClock
    fetch_s: float
    restart_s: float = 0.0
    length: int = 10**6
    paused: int = -1
    """The item, by the order of coming, that takes a second longer."""
    epochs: int = 0
    came: int = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.clock.time += self.fetch_s + (self.came == self.paused)
        self.came += 1
        return torch.ones(1)

    def set_epoch(self, _: int) -> None:
        """Begin an epoch."""
        self.clock.time += self.restart_s if self.epochs else 0.0
        self.epochs += 1


@dataclass
class _Endings:
    """A sampler that does not tell its length."""

    items: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.items))


@dataclass
class Measured:
    """A window, and what was seen from outside."""

    rules: WindowRules = RULES
    fetch_s: float = 0.0
    batch_s: float = BATCH_S
    launch_s: float = 0.0
    """What the host takes to launch a batch's work."""
    ends_at: float = inf
    loss_of: Callable[[int], float] = lambda _: 0.0
    """The loss of each batch, counted from the window's first."""
    tells_length: bool = True
    """The loader knows how many batches an epoch has."""
    items: dict[str, Any] = field(default_factory=dict)
    told: list[Block] = field(default_factory=list)
    ahead_s: list[float] = field(default_factory=list)
    """How far the host was ahead of the device whenever it came back from an edge."""
    losses: int = 0
    """Batches trained on, warm-up included."""
    before: int = 0
    """Those before the window."""

    def run(self) -> Window:
        """Measure."""
        self.clock, DEVICES[0].queue.ends_at = accelerator.use_still_clock(), 0.0
        for module in (edges, feed):
            module.perf_counter = self.clock.now  # type: ignore[attr-defined] # they go by the device's clock
        self.device = open_device("sim:0")
        config = TrainingConfig(micro_batch_size=1)
        data = SlowItems(self.clock, self.fetch_s, **self.items)
        sampler = None if self.tells_length else _Endings(len(data))
        supply = make_feed(data, config, sampler=sampler)
        model = nn.Linear(1, 1).to("sim:0")
        trainer = make_trainer(
            model,
            torch.optim.SGD(model.parameters(), 1e-3),
            Step(self._step, "made up"),
            config,
            self.device,
        )
        first = supply.start()
        self.course = Run(supply, trainer, 0, self.ends_at)
        warmth = warm_up(self.course, self.rules, first)
        window = measure_window(self.course, self.rules, warmth, self._at_edge, self._on_block)
        self.wall_s = self.clock.now() - self.begun
        return window

    def _step(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.clock.time += self.launch_s
        DEVICES[0].queue.launch(self.batch_s)
        self.losses += 1
        is_in_window = self.before and self.losses > self.before
        value = self.loss_of(self.losses - self.before - 1) if is_in_window else 0.0
        loss: Tensor = model(batch).sum() * 0.0 + value
        return loss

    def _on_block(self, block: Block) -> None:
        self.told.append(block)
        self.ahead_s.append(DEVICES[0].queue.ends_at - self.clock.now())

    def _at_edge(self) -> None:
        self.begun, self.before = self.clock.now(), self.losses
        CALLS.clear()
        DEVICES[0].queue.waits = 0


def _launched(batches: int, begun: float) -> Launched:
    return Launched(
        samples=batches,
        batches=batches,
        data_wait_s=0.0,
        waits_in_a_row=0,
        starved_s=0.0,
        ready_at_end=None,
        begun=begun,
        came=begun,
        apart_s=0.0,
        loss=torch.zeros(1),
    )


def batches_of(window: Window) -> int:
    return sum(block.batches for block in window.blocks)


def spent_s(window: Window) -> float:
    restarts_s = sum(restart.seconds for restart in window.restarts)
    return sum(block.seconds for block in window.blocks) + restarts_s


@on_simulated_device
def test_device_never_waits_at_an_edge() -> None:
    seen = Measured(fetch_s=BATCH_S / 2)
    window = seen.run()
    assert len(window.blocks) > 10
    assert CALLS["synchronize 0"] == 1  # at the last edge; the first lies before the clock
    assert DEVICES[0].queue.waits == len(window.blocks)
    # only the fetch of the first batch shows
    assert seen.wall_s == pytest.approx(BATCH_S * batches_of(window) + BATCH_S / 2)
    for block in window.blocks[1:]:
        assert block.seconds == pytest.approx(BATCH_S * block.batches)
    assert 0 < max(seen.ahead_s) <= max(block.seconds for block in window.blocks)


@pytest.mark.parametrize(
    ("fetch_s", "launch_s", "batch_s", "is_held"),
    [
        (0.0095, 0.0001, 0.010, True),
        (0.0, 0.005, 0.001, False),
        (0.008, 0.001, 0.006, False),
    ],
)
@on_simulated_device
def test_is_held_by_device(fetch_s: float, launch_s: float, batch_s: float, is_held: bool) -> None:
    window = Measured(fetch_s=fetch_s, launch_s=launch_s, batch_s=batch_s).run()
    assert window.is_held_by_device == is_held
    if is_held:
        full = window.model_copy(update={"queue_at_start": 16, "queue_at_end": 0})
        assert window_rate(full).value == pytest.approx(1 / batch_s, rel=0.05)


@on_simulated_device
def test_drained_edges_include_the_hosts_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "timed_events", lambda _: None)
    window = Measured(fetch_s=BATCH_S / 2).run()
    assert window.host_ahead_s is None
    assert not window.is_held_by_device
    assert CALLS["synchronize 0"] == len(window.blocks)
    for block in window.blocks:
        assert block.seconds == pytest.approx(BATCH_S * (block.batches + 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("fetch_s", [0.002, 0.013])
@on_simulated_device
def test_pause_lengthens_its_own_block(fetch_s: float) -> None:
    rules = RULES.model_copy(update={"max_s": 1.5})
    usual = Measured(fetch_s=fetch_s, rules=rules)
    usual.run()
    size = usual.told[0].batches
    seen = Measured(
        fetch_s=fetch_s, rules=rules, items={"paused": usual.before + 5 * size + size // 2}
    )
    blocks = seen.run().blocks
    assert max(blocks, key=lambda block: block.seconds) is blocks[5]
    waits_s = [block.data_wait_s for block in blocks]
    assert max(waits_s) == waits_s[5] == pytest.approx(1.0 + size * fetch_s)


@pytest.mark.parametrize("fetch_s", [0.0, 0.01, 0.013])
@on_simulated_device
def test_slower_side_sets_the_rate(fetch_s: float) -> None:
    seen = Measured(fetch_s=fetch_s)
    window = seen.run()
    slower, faster = max(fetch_s, BATCH_S), min(fetch_s, BATCH_S)
    batches = batches_of(window)
    # the faster side shows once, to fill the line
    assert window_rate(window).value == pytest.approx(batches / (slower * batches + faster))
    waits_s = sum(block.data_wait_s for block in window.blocks)
    assert waits_s == pytest.approx(fetch_s * batches)
    assert spent_s(window) == pytest.approx(seen.wall_s, rel=1e-12)
    assert tuple(seen.told) == window.blocks
    longest_s = max(block.seconds for block in window.blocks)
    assert seen.course.longest_s >= longest_s
    assert window.stopped_by == "time"
    assert RULES.max_s - 1e-9 <= seen.wall_s < RULES.max_s + longest_s


@pytest.mark.slow
@pytest.mark.parametrize(("length", "fetch_s"), [(157, 0.002), (150, 0.013)])
@on_simulated_device
def test_unforeseen_restarts(length: int, fetch_s: float) -> None:
    rules = RULES.model_copy(update={"max_s": 5})
    items = {"length": length, "restart_s": 0.4}
    seen = Measured(fetch_s=fetch_s, items=items, rules=rules, tells_length=False)
    window = seen.run()
    assert window.restarts
    assert spent_s(window) == pytest.approx(seen.wall_s, rel=1e-12)
    slower, faster = max(fetch_s, BATCH_S), min(fetch_s, BATCH_S)
    steady_s = sum(block.seconds for block in window.blocks) / batches_of(window)
    # what fills the line after each restart belongs to it
    assert steady_s == pytest.approx(slower, abs=faster / 20)
    for block in window.blocks:
        assert (
            slower * block.batches - faster <= block.seconds <= slower * block.batches + 2 * faster
        )


@on_simulated_device
def test_foreseen_restarts() -> None:
    seen = Measured(
        fetch_s=0.002,
        items={"length": 150, "restart_s": 0.3},
        rules=RULES.model_copy(update={"max_s": 5}),
    )
    window = seen.run()
    assert not window.whole_epochs
    assert len(window.restarts) > 1
    for restart in window.restarts:
        assert restart.seconds == pytest.approx(0.3 + 0.002 + BATCH_S)
    assert spent_s(window) == pytest.approx(seen.wall_s, rel=1e-12)


@on_simulated_device
def test_diverged_loss_is_found_a_block_later_at_most() -> None:
    window = Measured().run()
    block = window.blocks[0].batches
    for bad in (0, block - 1, 3 * block, batches_of(window) - 1):
        seen = Measured(loss_of=lambda index, bad=bad: inf if index >= bad else 0.0)  # type: ignore[misc] # mypy takes no defaults
        with pytest.raises(Diverged, match="inf"):
            seen.run()
        assert seen.losses - seen.before <= (bad // block + 2) * block


@on_simulated_device
def test_loss_on_another_device() -> None:
    clock = accelerator.use_still_clock()
    edges.perf_counter = clock.now  # type: ignore[attr-defined] # as above
    own, other = (simulated.queue for simulated in DEVICES)
    opened = open_edges(open_device("sim:0"), ALONE)
    opened.begin()
    for block in range(1, 4):
        own.launch(1.0)
        other.launch(5.0)
        launched = replace(_launched(1, begun=clock.now()), loss=torch.ones((), device="sim:1"))
        stretch = opened.end_block(launched)
        assert stretch is None or clock.now() >= 5.0 * (block - 1)


@pytest.mark.parametrize("fetch_s", [0.002, 1.3])
@on_simulated_device
def test_deadline_is_held(fetch_s: float) -> None:
    plain = Measured(batch_s=1.0, fetch_s=fetch_s, rules=WindowRules(max_s=60.0, precision=0.0))
    plain.run()
    ends_at = plain.begun + 10.5
    seen = Measured(batch_s=1.0, fetch_s=fetch_s, rules=plain.rules, ends_at=ends_at)
    window = seen.run()
    assert window.stopped_by == "deadline"
    assert (
        ends_at < seen.begun + seen.wall_s < ends_at + max(block.seconds for block in window.blocks)
    )


@on_simulated_device
def test_under_way() -> None:
    clock = accelerator.use_still_clock()
    edges.perf_counter = clock.now  # type: ignore[attr-defined] # as above
    queue, device = DEVICES[0].queue, open_device("sim:0")
    opened = open_edges(device, ALONE)
    assert isinstance(opened, TimedEdges)
    opened.begin()
    for batches, batch_s in ((4, 1.0), (2, 3.0)):
        queue.launch(batches * batch_s)
        opened.end_block(_launched(batches, begun=clock.now()))
    assert clock.now() == 4.0
    assert opened.under_way() == (2, 6.0)
    clock.time = 7.0
    assert opened.under_way() == (2, 7.0)


class SideBatches(Group):
    """A group in which another rank answers every question with yes."""

    def most(self, value: float) -> float:
        """At least the other rank's."""
        return max(value, 1.0)


@on_simulated_device
def test_open_edges() -> None:
    assert isinstance(open_edges(open_device("cpu"), ALONE), DrainedEdges)
    device = open_device("sim:0")
    assert isinstance(open_edges(device, ALONE), TimedEdges)
    assert isinstance(open_edges(device, SideBatches()), DrainedEdges)
    accelerator.Event.elapsed_time = refused  # type: ignore[assignment, method-assign] # in this process alone
    assert isinstance(open_edges(device, ALONE), DrainedEdges)


def refused(*_: object) -> float:
    raise RuntimeError("Backend doesn't support elapsedTime.")
