"""The measuring loop: warm-up, then a window of blocks timed at their edges, by the rules of measuring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf, isfinite, log2
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from autotune.models.statistics import BATCH_MEANS, window_rate
from autotune.policy import WindowRules
from autotune.records.measurement import Block, Restart, Window
from autotune.worker.batch import TokenCount
from autotune.worker.device import Device
from autotune.worker.feed import BatchFeed, Delivery, FeedEnded
from autotune.worker.group import ALONE, Group
from autotune.worker.step import StepTrainer

# The edges of the measuring loop's blocks: when a block's work is done on the device, and how long
# it took.
#
# Takes blocks as the loop has launched them; hands on Stretches, once their edges have passed.
# `DrainedEdges` waits for the device at each edge, and only then is more launched: on the CPU,
# which is its own device, that costs nothing. An accelerator would be idle until the host has
# fetched, copied and launched again, at every edge. `TimedEdges` therefore records an event in the
# device's queue, and waits for it once the next block is queued behind it: the host is at most a
# block ahead, and the device never waits for an edge.


_LEAST_S = 1e-9  # of a block, so that a rate exists


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A block as the host has launched it: its work may not be done yet."""

    samples: int
    batches: int
    data_wait_s: float
    """Seconds in which the host waited for the loader, restarts that are split off left out."""
    waits_in_a_row: int
    """Batches up to the last one for which the queue was empty."""
    starved_s: float
    """The part of `data_wait_s` in which no batch lay ready."""
    ready_at_end: int | None
    """Batches that lay ready once the last one was launched; None where that is not known."""
    begun: float
    """Time of perf_counter at which the first batch was asked for."""
    came: float
    """Time of perf_counter at which the first batch had come."""
    apart_s: float
    """Seconds of restarts that are split off; the device has nothing else to do at both of their
    ends."""
    loss: Any
    """Loss of the last batch, on the device."""
    made: MadeReadings | None = None
    """The loader's count of samples made; None where it has none."""


@dataclass(frozen=True, slots=True)
class MadeReadings:
    """How many samples a loader's workers had made, read by the host."""

    begun: float
    """Time of perf_counter of the first reading, before the block's first batch was asked for."""
    at_begin: int
    ended: float
    """Time of perf_counter of the last one, after the block's last batch was launched."""
    at_end: int
    apart: int = 0
    """Samples made between the two in restarts that are split off."""

    def since(self, before: MadeReadings | None) -> MadeReadings:
        """Return these readings from the end of the block before on, where there was one."""
        return self if before is None else replace(self, begun=before.ended, at_begin=before.at_end)

    def within(self, seconds: float, apart_s: float) -> float | None:
        """Return the samples made in a block of some seconds, at the rate seen by the host, restarts left out.

        None where a script has made its loader anew, which begins to count again.
        """
        host_s = self.ended - self.begun - apart_s
        made = self.at_end - self.at_begin - self.apart
        return made * seconds / host_s if host_s > 0 and made >= 0 else None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A block that is done, and what the loop checks in it."""

    block: Block
    waits_in_a_row: int
    spent_s: float
    """Its seconds with the restarts that are split off."""
    loss: float
    """Loss of the last batch."""
    host_ahead_s: float | None = None
    """Seconds of work that the device had left when the next block's first batch had come; None
    where not known."""

    @property
    def compute_s(self) -> float:
        """Seconds of a batch, waits left out."""
        return (self.block.seconds - self.block.waited_s) / self.block.batches


@dataclass(frozen=True, slots=True)
class DrainedEdges:
    """The device has done all when a block ends. Its seconds are the host's, from its first batch on."""

    device: Device

    def begin(self) -> None:
        """Nothing to record: each block has a beginning of its own."""

    def end_block(self, launched: Launched) -> Stretch:
        """Wait for the device; hands on this block."""
        self.device.synchronize()
        spent_s = perf_counter() - launched.begun
        seconds = max(spent_s - launched.apart_s, _LEAST_S)
        return _stretch(
            launched, launched.made, seconds, spent_s, float(launched.loss), most_wait_s=seconds
        )

    def under_way(self) -> tuple[int, float]:
        """No batch, which is done now."""
        return 0, perf_counter()

    def finish(self) -> None:
        """No block is left."""


class TimedEdges:
    """Edges are events in the device's queue, each waited for when the next block is launched behind it.

    A block's seconds lie between its two events, by the device's clock: its own work and the time
    in which the device had none, whatever the host does meanwhile. The last block gets what is left
    of the host's time between the first edge and the last, at which the device is waited for: so
    the sum is that of the wall. Waits for the loader are the host's, which may be a block ahead: a
    single block's may be longer than the block, their sum is never too long.

    What the loop does between blocks (intervals, agreeing with other ranks) is done while a block
    is under way, and belongs to the time as everything does.
    """

    def __init__(self, device: Device, new_event: Callable[[], Any]) -> None:
        self._device = device
        self._new_event = new_event
        self._losses = [
            _landing_place(),
            _landing_place(),
        ]  # one is read while the other is written
        self._begun = 0.0
        self._passed_s = 0.0
        self._passed_batches = 0
        self._edge: Any = None
        self._ahead: tuple[Launched, Any, Tensor] | None = None
        self._made: MadeReadings | None = None

    def begin(self) -> None:
        """The first event, which has passed as soon as it is recorded."""
        self._begun, self._edge = perf_counter(), self._recorded()

    def end_block(self, launched: Launched) -> Stretch | None:
        """Mark this block's end; waits for the end of the one before, and hands that on."""
        before = self._ahead
        loss = self._losses[0]
        self._losses.reverse()
        loss.copy_(
            self._on_own_device(launched.loss.reshape(())), non_blocking=True
        )  # it has come when the event has
        self._ahead = launched, self._recorded(), loss
        if before is None:
            return None
        _, edge, _ = before
        edge.synchronize()
        spent_s = self._edge.elapsed_time(edge) * 1e-3
        self._edge = edge
        stretch = self._passed(before, spent_s)
        return replace(stretch, host_ahead_s=max(0.0, self._begun + self._passed_s - launched.came))

    def under_way(self) -> tuple[int, float]:
        """Batches of the block under way, and when they will be done, at the speed of those before; never past."""
        batches = 0 if self._ahead is None else self._ahead[0].batches
        left_s = batches * self._passed_s / max(1, self._passed_batches)
        return batches, max(perf_counter(), self._begun + self._passed_s + left_s)

    def finish(self) -> Stretch | None:
        """Wait for the device; the block that was under way gets the time that is left."""
        self._device.synchronize()
        last = self._ahead
        self._ahead = None
        return (
            None
            if last is None
            else self._passed(last, perf_counter() - self._begun - self._passed_s)
        )

    def _on_own_device(self, loss: Tensor) -> Tensor:
        """Return a loss on the device whose queue the events are in.

        A script may have split its model, so that its loss lies on another device, whose queue the
        event says nothing of. torch has the receiving device's stream wait for a copy between two
        devices, so what follows there, the copy to the host and the event, comes after it. A copy
        straight to the host would run on the loss's device. Source:
        aten/src/ATen/native/cuda/Copy.cu, copy_device_to_device and copy_kernel_cuda.
        """
        own = self._device.torch_device
        return loss if loss.device.type != own.type else loss.to(own, non_blocking=True)

    def _recorded(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def _passed(self, block: tuple[Launched, Any, Tensor], spent_s: float) -> Stretch:
        launched, _, loss = block
        self._passed_s = self._passed_s + spent_s
        self._passed_batches = self._passed_batches + launched.batches
        seconds = max(spent_s - launched.apart_s, _LEAST_S)
        # Between two blocks the host waits for the device, and workers go on.
        made = launched.made and launched.made.since(self._made)
        self._made = launched.made
        return _stretch(launched, made, seconds, spent_s, float(loss))


Edges: TypeAlias = DrainedEdges | TimedEdges
"""Ends blocks. Between `begin` and `finish` the blocks' `spent_s` leave out no time that belongs to
a block."""


class Mark:
    """A place in the device's queue, and when the device came to it, by the host's clock."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._place, self._now = new_event(), new_event()

    def set(self) -> None:
        """Put the mark behind what was launched so far."""
        self._place.record()

    def passed_at(self) -> float:
        """Time of perf_counter at which all before the mark was done; waits for what was launched since."""
        self._now.record()
        self._now.synchronize()
        return perf_counter() - float(self._place.elapsed_time(self._now)) * 1e-3


def open_mark(device: Device) -> Mark | None:
    """A mark; None where the device can't time events: there, work that it did during a restart counts as restart."""
    new_event = timed_events(device)
    return None if new_event is None else Mark(new_event)


def open_edges(device: Device, group: Group, *, drains: bool = False) -> Edges:
    """The edges for a window: timed where the devices of all ranks can time events, else drained, or if asked for."""
    new_event = None if drains else timed_events(device)
    if group.all(new_event is not None) and new_event is not None:
        return TimedEdges(device, new_event)
    return DrainedEdges(device)


def _stretch(
    launched: Launched,
    made: MadeReadings | None,
    seconds: float,
    spent_s: float,
    loss: float,
    *,
    most_wait_s: float = inf,
) -> Stretch:
    block = Block(
        samples=launched.samples,
        batches=launched.batches,
        seconds=seconds,
        data_wait_s=min(launched.data_wait_s, most_wait_s),
        starved_s=min(launched.starved_s, most_wait_s),
        ready_at_end=launched.ready_at_end,
        made=made and made.within(seconds, launched.apart_s),
    )
    return Stretch(block, launched.waits_in_a_row, spent_s, loss)


def timed_events(device: Device) -> Callable[[], Any] | None:
    """A maker of events that give the time between two of them; None where the device has none.

    It is tried, since some backends have the class and refuse to time. Not on MPS: an event with
    timing commits the queue's command buffer there, which costs as much as waiting, and has not
    been tried. Source: torch/cuda/streams.py (Event, whose class torch.xpu has as well);
    aten/src/ATen/mps/MPSEvent.mm.
    """
    if device.kind in {"cpu", "mps"}:
        return None
    with suppress(
        AttributeError, RuntimeError, TypeError, ValueError
    ):  # what breaks a device shows again
        new_event = partial(device.module.Event, enable_timing=True)
        first = new_event()
        second = new_event()
        first.record()
        second.record()
        second.synchronize()
        return new_event if first.elapsed_time(second) >= 0 else None
    return None


def _landing_place() -> Tensor:
    """Where a loss is copied to on the host: the copy blocks the host only where the memory is not page-locked.

    Source: "Asynchronous" in CUDA's runtime API: a copy to pageable memory returns when it is done.
    """
    with suppress(
        RuntimeError
    ):  # so is what a device without page-locked memory raises, NotImplementedError
        return torch.empty(
            (), pin_memory=True, device="cpu"
        )  # whatever torch.set_default_device says
    return torch.empty((), device="cpu")


# The measuring loop: warm-up, then a window of blocks, by the rules of measuring.
#
# Takes a started Feed and a Trainer (or none); hands on the raw Window. The clock covers the whole
# loop, loader included, and the device is waited for at block edges alone (see edges.py for how).
# The window ends when its own interval, by batch means, is narrow enough, or when its time is over;
# the interval that is reported includes the spread between runs as well. Longer than other files:
# the warm-up and the window are one loop over one state, and are read together.


# What names no source is our own convention.
FIRST_STEPS = 3
"""Optimizer steps of a process that are waited for one by one: compilation, cuDNN's search, first
allocations."""
_LONGEST_BLOCK = 5.0  # times its own seconds that a block may take, with what belongs to none
_SHORT_EPOCH_QUEUES = (
    4  # so are epochs of so few queues that little would be left of them without the restart
)
_REFILL_SHARE = 4  # at most a quarter of an epoch counts as its start
_MIN_BLOCKS = 3  # fewer have no spread to judge by
_MIN_EPOCH_BLOCKS = (
    5  # blocks of whole epochs are independent: fewer are needed than by batch means
)
_HARDLY_WAITED = (
    0.1  # of a block's time: beyond it a block of the warm-up depends on how far the workers are
)
_STARVED_FROM = (
    1.5  # times the usual taking of a ready batch, from which on the loop has waited for one
)
_OVERTIME = 2.0  # how far past its time a window goes on until it has used up the queue twice

_Verdict = Literal["precision", "time", "deadline"]
_VERDICTS: tuple[_Verdict | None, ...] = (None, "precision", "time", "deadline")  # by urgency


class Diverged(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The loss is not finite, or every step is skipped for its gradients; the message says which."""


@dataclass(slots=True)
class Run:
    """A trial's training under way: what the loop needs, and what it counts."""

    feed: BatchFeed
    trainer: StepTrainer
    queue_capacity: int
    ends_at: float
    """Time of perf_counter at which the deadline is too near to go on."""
    loss: Any = None
    scale: float = 1.0
    skipped_steps: int = 0
    splits_restarts: bool = False
    """Take restarts out of the blocks: in a window whose blocks do not cover whole epochs."""
    pause_at: float = inf
    """Time of perf_counter at which a block ends after its next optimizer step, however few batches
    it has."""
    refill_left: int = 0
    """Batches still to come that belong to the last restart."""
    mark: Mark | None = None
    """Where an epoch may end unforeseen: set before each batch is asked for."""
    restarts: list[Restart] = field(default_factory=list)
    """Restarts so far; where `splits_restarts` holds, they are taken out of the blocks."""
    group: Group = ALONE
    """The ranks that train in step: they take the same batches, and end together."""
    tokens: TokenCount | None = None
    """Counts the tokens of its batches; None where they have no lengths."""
    longest_s: float = 0.0
    """Seconds of the longest block so far, restarts included."""
    first_steps: int = FIRST_STEPS
    """Optimizer steps that are waited for one by one, before any counts as steady."""
    takes_s: list[float] = field(default_factory=list)
    """Seconds of taking each batch of the warm-up that lay ready."""
    take_s: float | None = None
    """Their median, once the warm-up is over; None where too few lay ready."""

    @property
    def learns_takes(self) -> bool:
        """Return True where taking a ready batch is a host's work; a processor that is its own device has none."""
        return self.trainer.config.num_workers > 0 and self.trainer.device.kind != "cpu"

    @property
    def knows_made(self) -> bool:
        """Return True where the loader's workers count what they make."""
        return self.feed.made() is not None

    def is_late(self) -> bool:
        """Whether the deadline is near, for any rank; every rank must ask."""
        return self.group.any(perf_counter() > self.ends_at)


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """What the warm-up has found; without arguments, that there was none to speak of."""

    batches: int = 0
    seconds: float = 0.0
    is_drained: bool = True
    is_steady: bool = True
    batch_s: float = 0.0
    """Seconds of a batch, waits included."""
    pace_s: float = 0.0
    """Seconds of a batch by which blocks are sized."""


def warm_up(
    run: Run,
    rules: WindowRules,
    first: Delivery,
    on_block: Callable[[Block], None] = lambda _: None,
) -> WarmUpResult:
    """Train until steps are steady and, where it matters, what piled up during slow first steps is used up.

    It does not matter where the loader's workers count what they make: their rate is right while a
    queue is used up. Elsewhere as many batches as the queue holds must have been taken since the
    last slow step, or, sooner, the loop must have found the queue empty as many times in a row as
    there are workers. Gives up after 8 s, or twice the window's time where that is shorter; the
    result says so.

    Args:
        run: The run; its loader gets its whole queue after the first steps, once it needs it.
        rules: Those of the window that follows.
        first: The loader's first batch.
        on_block: Called with each block in which training cannot have been faster than it seems,
            see `_can_tell`.
    """
    begun = perf_counter()
    longest_s = min(rules.warm_up_max_s, rules.warm_up_windows * rules.max_s)
    config = run.trainer.config
    stretches = [train_block(run, config.grad_accum_steps, first)]
    while len(stretches) < run.first_steps and not run.is_late():
        stretches.append(train_block(run, config.grad_accum_steps))
    run.feed.allow_full_queue()
    # Again: by now most of what lies outside the allocator has come.
    run.trainer.device.cap_memory()
    begun_steady = perf_counter()
    first_steady = len(stretches) - 1
    since_slow = list[Stretch]()
    waits = 0
    run.pause_at = begun_steady + longest_s
    while True:
        took = perf_counter() - begun_steady
        taken = sum(stretch.block.batches for stretch in since_slow)
        is_drained = taken >= run.queue_capacity or waits >= max(1, config.num_workers)
        is_ready = (
            len(since_slow) >= 2 and (is_drained or run.knows_made) and took >= rules.warm_up_min_s
        )
        if run.group.all(is_ready) or run.group.any(took >= longest_s) or run.is_late():
            break
        size = run.group.most(
            batches_in(rules.warm_up_block_s, _pace_s(stretches[-1:]), config.grad_accum_steps)
        )
        stretch = train_block(run, int(size))
        stretches.append(stretch)
        usual_s = median(stretch.compute_s for stretch in stretches[first_steady:])
        is_slow = stretch.compute_s > rules.slow_factor * usual_s or _skips(run) > 0
        since_slow = [] if is_slow else [*since_slow, stretch]
        if run.group.all(not is_slow and _can_tell(run, stretches)):
            on_block(stretch.block.model_copy(update={"is_warm_up": True}))
        all_waited = stretch.waits_in_a_row == stretch.block.batches
        waits = stretch.waits_in_a_row + (waits if all_waited else 0)
    run.take_s = median(run.takes_s) if len(run.takes_s) >= 3 else None
    return WarmUpResult(
        batches=sum(stretch.block.batches for stretch in stretches),
        seconds=perf_counter() - begun,
        is_drained=is_drained,
        is_steady=len(since_slow) >= 2,
        batch_s=_long_run_batch_s(stretches[run.first_steps :] or stretches),
        pace_s=_pace_s(stretches[run.first_steps :] or stretches),
    )


def _can_tell(run: Run, stretches: Sequence[Stretch]) -> bool:
    """Return whether the last block of a warm-up shows no less than the rate that training has in the long run.

    Until each worker has had its turn, the loop may have waited for one that had yet to start.
    """
    block = stretches[-1].block
    has_waited = block.waited_s > _HARDLY_WAITED * block.seconds
    before = sum(stretch.block.batches for stretch in stretches[:-1])
    return not has_waited or before >= run.trainer.config.num_workers


def measure_window(
    run: Run,
    rules: WindowRules,
    warm: WarmUpResult,
    at_edge: Callable[[], None],
    on_block: Callable[[Block], None] = lambda _: None,
) -> Window:
    """Train for a timed window.

    `at_edge` is called right before the clock starts (passive probes begin there), `on_block` after
    each block: outside its time where the device is drained at edges, else while the next block is
    under way.
    """
    is_even = run.group.is_equal(run.feed.epoch_batches or 0)
    whole = is_even and run.group.all(_covers_whole_epochs(run, rules, warm.batch_s))
    run.splits_restarts = not whole and (
        run.group.size == 1 or (is_even and not run.feed.is_iterable)
    )
    run.refill_left = 0
    run.pause_at = inf
    run.restarts.clear()
    knows_made = run.group.all(run.knows_made)
    size = run.group.most(_block_batches(run, rules, warm.pace_s, whole=whole))
    edges = open_edges(run.trainer.device, run.group, drains=rules.drains_at_edges)
    # a restart that is split off may show as one only once it is over
    is_unforeseen = run.splits_restarts and (run.feed.epoch_batches is None or run.feed.is_iterable)
    run.mark = open_mark(run.trainer.device) if is_unforeseen else None
    run.trainer.device.synchronize()
    at_edge()
    run.group.wait()  # after the probes, whose time differs between ranks: all begin together
    queue_at_start = run.feed.ready()  # last: while the probes read, the queue fills
    run.feed.watches_queue = False
    stretches = list[Stretch]()

    def add(stretch: Stretch) -> Window:
        stretches.append(_checked(run, stretch))
        on_block(stretch.block)
        return window_of(run, stretches, warm, queue_at_start, whole_epochs=whole)

    begun = perf_counter()
    stopped_by = None
    if (
        knows_made and not whole
    ):  # else a block may hold the end of one queue and outlast the window
        run.pause_at = begun + rules.max_s
    edges.begin()
    while stopped_by is None:
        launched = _launch(run, int(size))
        if launched.batches == 0:
            if not stretches:
                raise FeedEnded
            stopped_by = "deadline"
            break
        stretch = edges.end_block(launched)
        if stretch is None:
            continue
        window = add(stretch)
        stopped_by = _agreed(run.group, _verdict(run, rules, window, edges, begun))
        if stopped_by is None and not whole:
            size = run.group.most(
                max(size, _block_batches(run, rules, _pace_s(stretches), whole=False))
            )
    last = edges.finish()
    if last is not None:
        window = add(last)
    _refuse_skipping(run, stretches)
    return window.model_copy(update={"stopped_by": stopped_by})


def _agreed(group: Group, verdict: _Verdict | None) -> _Verdict | None:
    """One verdict for all ranks: precision once all have it, the time or the deadline for all when it is up for one."""
    urgency = int(group.most(_VERDICTS.index(verdict)))
    if _VERDICTS[urgency] == "precision" and not group.all(verdict is not None):
        return None
    return _VERDICTS[urgency]


def _verdict(
    run: Run, rules: WindowRules, window: Window, edges: Edges, begun: float
) -> _Verdict | None:
    """Why the window should end, for this rank: by all that is launched, and when that will be done."""
    ahead, done_at = edges.under_way()
    if len(window.blocks) + (ahead > 0) < _MIN_BLOCKS:
        return None
    if done_at > run.ends_at:
        return "deadline"
    batches = sum(block.batches for block in window.blocks) + ahead
    elapsed_s = done_at - begun
    has_used_queue = (
        bool(window.made) or batches >= 2 * run.queue_capacity
    )  # twice (CONTRIBUTING, Rules of measuring)
    enough = _MIN_EPOCH_BLOCKS if window.whole_epochs else BATCH_MEANS
    if (
        has_used_queue
        and len(window.blocks) >= enough
        and window_rate(window).relative_half_width <= rules.precision
    ):
        return "precision"
    if elapsed_s >= rules.max_s and (has_used_queue or elapsed_s >= _OVERTIME * rules.max_s):
        return "time"
    return None


def train_block(run: Run, batches: int, first: Delivery | None = None) -> Stretch:
    """Train on so many batches, then synchronise. What belongs to a restart is taken out where it is split off.

    Raises:
        FeedEnded: no batch has come.
    """
    launched = _launch(run, batches, first)
    if launched.batches == 0:
        raise FeedEnded
    return _checked(run, DrainedEdges(run.trainer.device).end_block(launched))


def _launch(run: Run, batches: int, first: Delivery | None = None) -> Launched:
    """Take so many batches and train on them; nothing here waits for the device, except at a restart."""
    feed = run.feed
    trainer = run.trainer
    samples = 0
    taken = 0
    wait_s = 0.0
    starved_s = 0.0
    waits_in_a_row = 0
    apart_s = 0.0
    take_s = run.take_s or 0.0
    may_end_at = min(run.ends_at, run.pause_at)
    made = feed.made()
    made_apart = 0
    begun = perf_counter()
    came_at = inf
    while taken < batches and not (taken and perf_counter() > may_end_at and _must_end(run)):
        made_before = feed.made() if run.splits_restarts else None
        if run.splits_restarts and feed.is_at_end():
            # What was asked of the device belongs to the block, not to the restart.
            trainer.device.synchronize()
        delivery = _next_delivery(run, first, begun)
        if delivery is None:
            break
        first = None
        came_at = min(came_at, perf_counter())
        batch, came, _, waited_s, is_restart, had_to_wait, outside_s = delivery
        waits_in_a_row = waits_in_a_row + 1 if had_to_wait else 0
        apart_s += outside_s
        if run.tokens is not None:
            run.tokens.add(batch, came)
        try:
            run.loss = trainer.train(batch)
        except FeedEnded:  # it may have trained on this batch, or not
            run.ends_at = -inf
            break
        evaluated_s = feed.take_apart_s()
        apart_s += evaluated_s
        restart_s = (
            _note_restart(run, delivery, came, evaluated_s)
            if is_restart or run.refill_left
            else None
        )
        if run.splits_restarts and restart_s is not None:
            apart_s += restart_s
            made_apart += (feed.made() or 0) - (made_before or 0)
        else:
            samples = samples + came
            taken = taken + 1
            wait_s = wait_s + waited_s
            if waited_s > _STARVED_FROM * take_s:
                starved_s += waited_s - take_s
    return Launched(
        samples=samples,
        batches=taken,
        data_wait_s=wait_s,
        waits_in_a_row=waits_in_a_row,
        starved_s=starved_s,
        ready_at_end=feed.ready(),
        begun=begun,
        came=came_at,
        apart_s=apart_s,
        loss=run.loss,
        made=_readings(begun, made, feed.made(), made_apart),
    )


def _readings(
    begun: float, at_begin: int | None, at_end: int | None, apart: int
) -> MadeReadings | None:
    if at_begin is None or at_end is None:
        return None
    return MadeReadings(
        begun=begun, at_begin=at_begin, ended=perf_counter(), at_end=at_end, apart=apart
    )


def _next_delivery(run: Run, first: Delivery | None, begun: float) -> Delivery | None:
    """Take a batch, or return a first one that was taken before the clock started; None where none comes any more."""
    if run.mark is not None:
        run.mark.set()
    if first is not None:
        delivery = first._replace(asked=begun, wait_s=0.0)
    else:
        may_learn = run.feed.watches_queue and run.learns_takes
        has_ready = may_learn and (run.feed.ready() or 0) > 0
        try:
            delivery = run.feed.take()
        except FeedEnded:
            run.ends_at = -inf
            return None
        if has_ready and not delivery.is_restart:
            run.takes_s.append(delivery.wait_s)
    if (
        run.mark is not None and delivery.is_restart
    ):  # until then the device worked on what belongs to the block
        delivery = delivery._replace(asked=max(delivery.asked, run.mark.passed_at()))
    return delivery


def _checked(run: Run, stretch: Stretch) -> Stretch:
    """Record a block that is done.

    Raises:
        Diverged: its loss is not finite.
    """
    run.longest_s = max(run.longest_s, stretch.spent_s)
    if not isfinite(stretch.loss):
        raise Diverged(
            f"the loss became {stretch.loss} at the baseline's learning rate of "
            f"{run.trainer.config.lr:g}"
        )
    return stretch


def _must_end(run: Run) -> bool:
    """Whether a block ends before it is full: near the deadline at once, at a pause after a whole optimizer step.

    Ranks in step must take the same batches: there a block is never cut.
    """
    now = perf_counter()
    is_pausing = now > run.pause_at and run.trainer.accumulated == 0
    return run.group.size == 1 and (now > run.ends_at or is_pausing)


def _note_restart(run: Run, delivery: Delivery, samples: int, evaluated_s: float) -> float:
    """Add a batch to the restart it belongs to; returns its seconds, from when it was asked for, of training alone."""
    if delivery.is_restart:
        share = _REFILL_SHARE if run.splits_restarts else 2
        longest = max(1, (run.feed.epoch_batches or 1) // share)
        run.refill_left = max(1, min(run.queue_capacity, longest))
        run.restarts.append(Restart(seconds=0.0, samples=0))
    run.refill_left -= 1
    if run.splits_restarts and run.refill_left == 0:
        run.trainer.device.synchronize()
    seconds = perf_counter() - delivery.asked - evaluated_s
    last = run.restarts[-1]
    run.restarts[-1] = Restart(seconds=last.seconds + seconds, samples=last.samples + samples)
    return seconds


def _covers_whole_epochs(run: Run, rules: WindowRules, batch_s: float) -> bool:
    """Whether the window is made of whole epochs: where they are short, or hold only a few queues."""
    batches = inf if run.feed.epoch_batches is None else run.feed.epoch_batches
    epoch_s = batches * batch_s
    is_few = (
        batches <= _SHORT_EPOCH_QUEUES * run.queue_capacity and epoch_s <= rules.max_s / _MIN_BLOCKS
    )
    return is_few or epoch_s <= rules.whole_epochs_up_to_s or batches < _REFILL_SHARE


def window_of(
    run: Run,
    stretches: list[Stretch],
    warm: WarmUpResult,
    queue_at_start: int | None,
    *,
    whole_epochs: bool,
) -> Window:
    """The raw record of some stretches, as if the time had ended the window there."""
    blocks = tuple(stretch.block for stretch in stretches)
    batches = sum(block.batches for block in blocks)
    epoch_batches = run.feed.epoch_batches
    is_uneven = (
        not whole_epochs and not run.splits_restarts
    )  # ranks whose epochs differ: restarts fall where they do
    samples_per_batch = sum(block.samples for block in blocks) / batches
    return Window(
        blocks=blocks,
        restarts=tuple(run.restarts) if run.splits_restarts else (),
        whole_epochs=whole_epochs,
        epoch_samples=None
        if epoch_batches is None or is_uneven
        else round(epoch_batches * samples_per_batch),
        expected_restart_s=_expected_restart_s(run, stretches),
        queue_capacity=run.queue_capacity,
        workers=run.trainer.config.num_workers,
        asked=run.feed.asked_batches(),
        queue_at_start=queue_at_start,
        queue_at_end=blocks[-1].ready_at_end,
        take_s=run.take_s,
        host_ahead_s=_host_ahead_s(stretches),
        warm_up_batches=warm.batches,
        warm_up_s=warm.seconds,
        is_drained=warm.is_drained,
        is_steady=warm.is_steady,
        stopped_by="time",
    )


def _host_ahead_s(stretches: Sequence[Stretch]) -> float | None:
    """Return the median of what the device had left to do at blocks' ends; None where that was not timed."""
    ahead = [stretch.host_ahead_s for stretch in stretches if stretch.host_ahead_s is not None]
    return median(ahead) if ahead else None


def _expected_restart_s(run: Run, stretches: list[Stretch]) -> float:
    """What a restart should cost where none was measured, from the loader's first start.

    The first wait includes what workers do first (imports, worker_init_fn). Persistent workers
    don't do it again; an iterable is begun anew in them as well, which may take long: there this is
    an upper bound.
    """
    config = run.trainer.config
    feed = run.feed
    if config.persistent_workers and not feed.is_iterable:
        return 0.0
    # each worker's first batch comes while the loop waits
    filling_s = max(1, config.num_workers) * mean_batch_s(stretches)
    start_s = 0.0 if config.persistent_workers else feed.start_s
    return start_s + max(0.0, feed.first_wait_s - filling_s)


def _block_batches(run: Run, rules: WindowRules, pace_s: float, *, whole: bool) -> int:
    """Batches of a block: at least 0.2 s of them; whole epochs, or whole optimizer steps.

    Workers may come to the end of their batches at the same time. Where these alone are counted, a
    block has one of each.
    """
    unit = (
        run.feed.epoch_batches
        if whole and run.feed.epoch_batches
        else run.trainer.config.grad_accum_steps
    )
    return batches_in(
        rules.block_s, pace_s, unit, least=1 if run.knows_made else run.trainer.config.num_workers
    )


def batches_in(seconds: float, batch_s: float, unit: int, least: int = 1) -> int:
    """Batches that take at least so many seconds, in whole units, and at least so many."""
    return ceil(max(ceil(seconds / max(batch_s, 1e-6)), least, 1) / unit) * unit


def mean_batch_s(stretches: Sequence[Stretch]) -> float:
    """Seconds of a batch in some stretches, waits included."""
    return sum(stretch.block.seconds for stretch in stretches) / sum(
        stretch.block.batches for stretch in stretches
    )


def _long_run_batch_s(stretches: Sequence[Stretch]) -> float:
    """Return the seconds of a batch once the queue is used up, where the loader makes fewer than it gives out."""
    samples = sum(stretch.block.samples for stretch in stretches)
    counts = [stretch.block.made for stretch in stretches if stretch.block.made is not None]
    is_falling = len(counts) == len(stretches) and 0 < sum(counts) < samples
    return mean_batch_s(stretches) * (samples / sum(counts) if is_falling else 1.0)


def _pace_s(stretches: Sequence[Stretch]) -> float:
    """Seconds of a batch; more where most of the time passes beside training, lest a block of it take minutes."""
    passed_s = sum(stretch.spent_s for stretch in stretches) / sum(
        stretch.block.batches for stretch in stretches
    )
    return max(_long_run_batch_s(stretches), passed_s / _LONGEST_BLOCK)


def _skips(run: Run) -> int:
    """Steps that the GradScaler has skipped since the last call: its scale is halved each time."""
    if run.trainer.config.amp_dtype != "float16":
        return 0
    scale = run.trainer.scaler.get_scale()
    if (
        scale == 0
    ):  # halved by every step until nothing was left; from here on skipping can't be counted
        raise Diverged(
            "float16 must train, but the GradScaler skipped every step: the gradients are never "
            "finite"
        )
    skipped = max(0, round(log2(run.scale / scale)))
    run.scale, run.skipped_steps = scale, run.skipped_steps + skipped
    return skipped


def _refuse_skipping(run: Run, stretches: list[Stretch]) -> None:
    steps = (
        sum(stretch.block.batches for stretch in stretches) / run.trainer.config.grad_accum_steps
    )
    skipped = _skips(run)
    if skipped > steps / 2:
        raise Diverged(
            f"float16 must train, but the GradScaler skipped {skipped} of the window's "
            f"{steps:.0f} optimizer steps for gradients that were not finite"
        )
