"""Measure a trial's throughput: warm up, then train for a window of timed blocks.

Comes in: a started feed, a trainer (or none) and the rules of the window. Goes out: the raw
`Window`; statistics are derived from it elsewhere. The clock covers the whole loop, loader
included, and the device is waited for only at block edges. The window ends as soon as its
confidence interval (batch means) is narrow enough, or when its time is up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf, isfinite, log2
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

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

# Block edges: turn launched blocks into finished ones, with their seconds.

_LEAST_S = 1e-9  # of a block, so that it has a throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A block that the host has launched; the device may still be working on it."""

    samples: int
    batches: int
    data_wait_s: float
    """Seconds in which the host waited for the loader, without restarts that are split off."""
    waits_in_a_row: int
    """Batches for which the queue was empty, counted back from the last one."""
    starved_s: float
    """Part of `data_wait_s` in which no batch was ready."""
    ready_at_end: int | None
    """Batches ready when the last one was launched; None if unknown."""
    begun: float
    """Time of perf_counter when the first batch was asked for."""
    came: float
    """Time of perf_counter when the first batch arrived."""
    apart_s: float
    """Seconds of restarts that are split off; the device is idle at both of their ends."""
    loss: Any
    """Loss of the last batch, on the device."""
    made_before: MadeReading | None = None
    """The loader's count before the first batch was asked for; None if it has none."""
    made_after: MadeReading | None = None
    """The count after the last batch was launched."""
    made_apart: int = 0
    """Samples made in restarts that are split off."""

    def made(self, seconds: float) -> float | None:
        """Return the samples made in this block, at the throughput that the host saw without restarts.

        Args:
            seconds: Seconds of the block, without restarts.

        Returns:
            None if the loader has no count, or if a script has replaced its loader, whose count
                starts at 0 again.
        """
        if self.made_before is None or self.made_after is None:
            return None
        host_s = self.made_after.at - self.made_before.at - self.apart_s
        samples = self.made_after.samples - self.made_before.samples - self.made_apart
        if host_s <= 0 or samples < 0:
            return None
        return samples * seconds / host_s


class MadeReading(NamedTuple):
    """A reading of the samples that a loader's workers have made, taken by the host."""

    at: float
    """Time of perf_counter."""
    samples: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A finished block, with the values that the loop checks."""

    block: Block
    waits_in_a_row: int
    spent_s: float
    """Seconds of the block, including restarts that are split off."""
    loss: float
    """Loss of the last batch."""
    host_ahead_s: float | None = None
    """Seconds of work that the device had left when the next block's first batch arrived; None if
    unknown."""

    @property
    def compute_s(self) -> float:
        """Seconds per batch, without waits."""
        return (self.block.seconds - self.block.waited_s) / self.block.batches


@dataclass(frozen=True, slots=True)
class DrainedEdges:
    """Edges at which the device has finished all its work.

    A block's seconds are the host's, counted from its own first batch. On the CPU, which is its own
    device, waiting costs nothing.
    """

    device: Device

    def begin(self) -> None:
        """Do nothing: each block has its own start."""

    def end_block(self, launched: Launched) -> Stretch:
        """Wait for the device and return this block."""
        self.device.synchronize()
        spent_s = perf_counter() - launched.begun
        seconds = max(spent_s - launched.apart_s, _LEAST_S)
        return _stretch(launched, seconds, spent_s, float(launched.loss), most_wait_s=seconds)

    def under_way(self) -> tuple[int, float]:
        """Return no batches, done now."""
        return 0, perf_counter()

    def finish(self) -> None:
        """Do nothing: no block is left."""


class TimedEdges:
    """Edges that are events in the device's queue, so that an accelerator never idles at an edge.

    Each event is waited for once the next block is queued behind it: the host is at most one block
    ahead.

    A block's seconds lie between its two events, by the device's clock: its own work and any idle
    time in between. The last block gets the rest of the host's time from the first edge to the
    last, at which the device is waited for, so the sum equals wall time. Waits for the loader are
    the host's, which may be a block ahead: a single block's wait may exceed its seconds, their sum
    never does.

    The loop's own work between blocks (intervals, agreeing with other ranks) runs while a block is
    under way and counts as part of the window.
    """

    def __init__(self, device: Device, new_event: Callable[[], Any]) -> None:
        self._device = device
        self._new_event = new_event
        # one is read while the other is written
        self._losses = [_landing_place(), _landing_place()]
        self._begun = 0.0
        self._passed_s = 0.0
        self._passed_batches = 0
        self._edge: Any = None
        self._ahead: tuple[Launched, Any, Tensor] | None = None
        self._made: MadeReading | None = None

    def begin(self) -> None:
        """Record the first event, which passes at once."""
        self._begun = perf_counter()
        self._edge = self._recorded()

    def end_block(self, launched: Launched) -> Stretch | None:
        """Mark this block's end, wait for the end of the previous block, and return that one."""
        before = self._ahead
        loss = self._losses[0]
        self._losses.reverse()
        # the copy is done once the event behind it has passed
        loss.copy_(self._on_own_device(launched.loss.reshape(())), non_blocking=True)
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
        """Return the batches of the block under way and the time when they should be done.

        Returns:
            The batches, and a time of perf_counter estimated from earlier blocks, never in the
                past.
        """
        batches = self._ahead[0].batches if self._ahead else 0
        left_s = batches * self._passed_s / max(1, self._passed_batches)
        return batches, max(perf_counter(), self._begun + self._passed_s + left_s)

    def finish(self) -> Stretch | None:
        """Wait for the device and return the block that was under way, with the time that is left."""
        self._device.synchronize()
        last = self._ahead
        self._ahead = None
        if last is None:
            return None
        return self._passed(last, perf_counter() - self._begun - self._passed_s)

    def _on_own_device(self, loss: Tensor) -> Tensor:
        """Return a loss on the device whose queue holds the events.

        A script may have split its model, so that the loss lies on another device, whose queue
        these events do not cover. For a copy between two devices torch makes the receiving device's
        stream wait, so the copy to the host and the event come after it. A copy straight to the
        host would run on the loss's device. Source: aten/src/ATen/native/cuda/Copy.cu,
        copy_device_to_device and copy_kernel_cuda.
        """
        own = self._device.torch_device
        if loss.device.type != own.type:
            return loss
        return loss.to(own, non_blocking=True)

    def _recorded(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def _passed(self, block: tuple[Launched, Any, Tensor], spent_s: float) -> Stretch:
        launched, _, loss = block
        self._passed_s += spent_s
        self._passed_batches += launched.batches
        seconds = max(spent_s - launched.apart_s, _LEAST_S)
        # the workers go on while the host waits for the device between two blocks
        since_last = replace(launched, made_before=self._made or launched.made_before)
        self._made = launched.made_after
        return _stretch(since_last, seconds, spent_s, float(loss))


Edges: TypeAlias = DrainedEdges | TimedEdges
"""Ways to end blocks. Between `begin` and `finish` the blocks' `spent_s` cover all time that
belongs to blocks."""


class Mark:
    """A position in the device's queue whose passing is timed by the host's clock."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._place = new_event()
        self._now = new_event()

    def set(self) -> None:
        """Put the mark behind everything launched so far."""
        self._place.record()

    def passed_at(self) -> float:
        """Return the time of perf_counter when all work before the mark was done.

        Waits for everything launched since.
        """
        self._now.record()
        self._now.synchronize()
        return perf_counter() - float(self._place.elapsed_time(self._now)) * 1e-3


def open_mark(device: Device) -> Mark | None:
    """Return a mark, or None if the device can't time events.

    Without one, work that the device did during a restart counts as part of the restart.
    """
    new_event = timed_events(device)
    return None if new_event is None else Mark(new_event)


def open_edges(device: Device, group: Group) -> Edges:
    """Return the edges for a window.

    Args:
        device: The device of this rank.
        group: The ranks that train in step; all use the same kind of edges.

    Returns:
        Timed edges if the devices of all ranks can time events, else drained ones.
    """
    new_event = timed_events(device)
    if group.all(new_event is not None) and new_event is not None:
        return TimedEdges(device, new_event)
    return DrainedEdges(device)


def _stretch(
    launched: Launched, seconds: float, spent_s: float, loss: float, *, most_wait_s: float = inf
) -> Stretch:
    """Return a launched block as finished, with its waits limited to `most_wait_s`."""
    block = Block(
        samples=launched.samples,
        batches=launched.batches,
        seconds=seconds,
        data_wait_s=min(launched.data_wait_s, most_wait_s),
        starved_s=min(launched.starved_s, most_wait_s),
        ready_at_end=launched.ready_at_end,
        made=launched.made(seconds),
    )
    return Stretch(block, launched.waits_in_a_row, spent_s, loss)


def timed_events(device: Device) -> Callable[[], Any] | None:
    """Return a factory of events that can be timed; None if the device has none.

    A pair is tried first, since some backends have the class but refuse to time. MPS is left out:
    an event with timing commits the queue's command buffer there, which costs as much as waiting,
    and has not been tested. Source: torch/cuda/streams.py (Event; torch.xpu has the same class);
    aten/src/ATen/mps/MPSEvent.mm.
    """
    if device.kind in {"cpu", "mps"}:
        return None
    # a device that is broken will raise again when it is used
    with suppress(AttributeError, RuntimeError, TypeError, ValueError):
        new_event = partial(device.module.Event, enable_timing=True)
        first = new_event()
        second = new_event()
        first.record()
        second.record()
        second.synchronize()
        if first.elapsed_time(second) >= 0:
            return new_event
    return None


def _landing_place() -> Tensor:
    """Return a host tensor that a loss is copied to, page-locked if possible.

    A copy to pageable memory blocks the host until it is done. Source: CUDA Runtime API,
    "Asynchronous".
    """
    # NotImplementedError, raised without page-locked memory, is a RuntimeError
    with suppress(RuntimeError):
        # named, since the user may have called torch.set_default_device
        return torch.empty((), pin_memory=True, device="cpu")
    return torch.empty((), device="cpu")


# The loop itself. Constants without a source are our own convention.

FIRST_STEPS = 3
"""Optimizer steps of a process that are waited for one by one: they hold compilation, cuDNN's
benchmark and first allocations."""
_LONGEST_BLOCK = 5.0
"""Max ratio of wall time to training time in a block."""
_SHORT_EPOCH_QUEUES = 4
"""Epochs of up to this many queues are measured whole: little is left of them without the restart."""
_REFILL_SHARE = 4
"""At most one batch in this many of an epoch counts as part of its restart."""
_MIN_BLOCKS = 3
"""Fewest blocks whose variation can be judged."""
_MIN_EPOCH_BLOCKS = 5
"""Fewest blocks of whole epochs: these are independent, so fewer are needed than for batch means."""
_HARDLY_WAITED = 0.1
"""Share of a block's time; a warm-up block that waited longer depends on the workers' progress."""
_STARVED_FROM = 1.5
"""Ratio to the usual time of taking a ready batch; longer takes count as waits."""
_OVERTIME = 2.0
"""Max ratio of a window's seconds to its time, to use up the queue twice."""

_Verdict = Literal["precision", "time", "deadline"]
_VERDICTS: tuple[_Verdict | None, ...] = (None, "precision", "time", "deadline")  # by urgency


class Diverged(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The loss is not finite, or the GradScaler skips the steps; the message says which."""


@dataclass(slots=True)
class Run:
    """State of a trial's training loop: what it needs, and what it counts."""

    feed: BatchFeed
    trainer: StepTrainer
    queue_capacity: int
    ends_at: float
    """Time of perf_counter after which the deadline is too near to go on."""
    loss: Any = None
    scale: float = 1.0
    skipped_steps: int = 0
    splits_restarts: bool = False
    """Take restarts out of the blocks; used for windows whose blocks are not whole epochs."""
    pause_at: float = inf
    """Time of perf_counter after which a block ends at its next optimizer step, however few batches
    it has."""
    refill_left: int = 0
    """Batches still to come that belong to the last restart."""
    mark: Mark | None = None
    """Set before each batch is asked for, if an epoch may end without warning."""
    restarts: list[Restart] = field(default_factory=list)
    """Restarts so far; with `splits_restarts` they are taken out of the blocks."""
    group: Group = ALONE
    """The ranks that train in step: they take the same batches and end together."""
    tokens: TokenCount | None = None
    """Counts the tokens of the batches; None if they have no lengths."""
    longest_s: float = 0.0
    """Seconds of the longest block so far, restarts included."""
    first_steps: int = FIRST_STEPS
    """Optimizer steps that are waited for one by one before any counts as steady."""
    takes_s: list[float] = field(default_factory=list)
    """Seconds of taking each batch of the warm-up that was ready."""
    take_s: float | None = None
    """Their median, set after the warm-up; None if too few were ready."""

    @property
    def learns_takes(self) -> bool:
        """True if taking a ready batch is the host's work alone, on a device that is not the CPU."""
        return self.trainer.config.has_workers and self.trainer.device.kind != "cpu"

    def learn_take(self, delivery: Delivery) -> None:
        """Record the time of taking a batch that was ready; not of one that a script holds (None)."""
        was_ready = delivery.batch is not None and not delivery.had_to_wait
        if was_ready and not delivery.is_restart:
            self.takes_s.append(delivery.wait_s)

    @property
    def knows_made(self) -> bool:
        """Return whether the loader's workers count what they make."""
        return self.feed.made() is not None

    def is_late(self) -> bool:
        """Return whether the deadline is near for any rank. Every rank must call it."""
        return self.group.any(perf_counter() > self.ends_at)


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """Result of the warm-up; the defaults stand for one that was too short to matter."""

    batches: int = 0
    seconds: float = 0.0
    is_drained: bool = True
    is_steady: bool = True
    batch_s: float = 0.0
    """Seconds per batch, waits included."""
    pace_s: float = 0.0
    """Seconds per batch by which blocks are sized."""


def warm_up(
    run: Run,
    rules: WindowRules,
    first: Delivery,
    on_block: Callable[[Block], None] = lambda _: None,
) -> WarmUpResult:
    """Train until steps are steady and batches queued during slow first steps are used up.

    The queue does not matter if the loader's workers count what they make: their throughput is
    right even while a queue is used up. Otherwise either as many batches as the queue holds must
    have been taken since the last slow step, or the queue must have been empty as many times in a
    row as there are workers. Gives up after `warm_up_max_s`, or `warm_up_windows` times the
    window's time if that is shorter; the result says so.

    Args:
        run: The run; its loader may fill its whole queue after the first steps, once it needs it.
        rules: The rules of the window that follows.
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
    # again: most memory outside the allocator is in use by now
    run.trainer.device.cap_memory()

    # Train in short blocks until all ranks are ready, or one runs out of time.
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
        batches = batches_in(
            rules.warm_up_block_s, _pace_s(stretches[-1:]), config.grad_accum_steps
        )
        stretch = train_block(run, int(run.group.most(batches)))
        stretches.append(stretch)

        # A slow block, or a skipped step, starts the count of steady blocks again.
        usual_s = median(stretch.compute_s for stretch in stretches[first_steady:])
        is_slow = stretch.compute_s > rules.slow_factor * usual_s or _skips(run) > 0
        if is_slow:
            since_slow = []
        else:
            since_slow.append(stretch)
        if run.group.all(not is_slow and _can_tell(run, stretches)):
            on_block(stretch.block.model_copy(update={"is_warm_up": True}))
        all_waited = stretch.waits_in_a_row == stretch.block.batches
        if not all_waited:
            waits = 0
        waits += stretch.waits_in_a_row

    if len(run.takes_s) >= 3:
        run.take_s = median(run.takes_s)
    else:
        run.take_s = None
    steady = stretches[run.first_steps :] or stretches
    return WarmUpResult(
        batches=sum(stretch.block.batches for stretch in stretches),
        seconds=perf_counter() - begun,
        is_drained=is_drained,
        is_steady=len(since_slow) >= 2,
        batch_s=_long_run_batch_s(steady),
        pace_s=_pace_s(steady),
    )


def _can_tell(run: Run, stretches: Sequence[Stretch]) -> bool:
    """Return whether the last warm-up block shows no less than the long-run throughput.

    Until each worker has delivered a batch, the loop may have waited for one that was still
    starting.
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
    """Train for a timed window and return its raw record.

    Args:
        run: The run, warmed up.
        rules: Length, precision and block size of the window.
        warm: Result of the warm-up.
        at_edge: Called right before the clock starts; passive probes begin there.
        on_block: Called after each block: outside its time if the device is drained at edges, else
            while the next block is under way.

    Raises:
        FeedEnded: The feed ended before the window's first batch.
        Diverged: The loss is not finite, or most optimizer steps were skipped.
    """
    # Decide with the other ranks which blocks the window has, and whether restarts are split off.
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
    edges = open_edges(run.trainer.device, run.group)
    # a restart of unknown time is recognized only once it is over
    is_unforeseen = run.splits_restarts and (run.feed.epoch_batches is None or run.feed.is_iterable)
    run.mark = open_mark(run.trainer.device) if is_unforeseen else None

    # Start the probes, then the clock, on all ranks together.
    run.trainer.device.synchronize()
    at_edge()
    run.group.wait()  # after the probes, whose time differs between ranks
    queue_at_start = run.feed.ready()  # last, since the queue fills while the probes read
    run.feed.watches_queue = False
    stretches = list[Stretch]()

    def add(stretch: Stretch) -> Window:
        stretches.append(_checked(run, stretch))
        on_block(stretch.block)
        return window_of(run, stretches, warm, queue_at_start, whole_epochs=whole)

    begun = perf_counter()
    stopped_by = None
    if knows_made and not whole:
        # else a block that holds the end of the queue could outlast the window
        run.pause_at = begun + rules.max_s

    # Train block by block. With timed edges a block is returned once the next one is launched.
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
            needed = _block_batches(run, rules, _pace_s(stretches), whole=False)
            size = run.group.most(max(size, needed))

    # Add the block that was still under way.
    last = edges.finish()
    if last is not None:
        window = add(last)

    # Skipped steps cost less than real ones: a window of them is no training.
    skipped = _skips(run)
    steps = sum(block.batches for block in window.blocks) / run.trainer.config.grad_accum_steps
    if skipped > steps / 2:
        raise Diverged(
            f"float16 must train, but the GradScaler skipped {skipped} of the window's "
            f"{steps:.0f} optimizer steps for gradients that were not finite"
        )
    return window.model_copy(update={"stopped_by": stopped_by})


def _agreed(group: Group, verdict: _Verdict | None) -> _Verdict | None:
    """Return one verdict for all ranks.

    Time and deadline end the window as soon as one rank reports them; precision needs all ranks.
    """
    urgency = int(group.most(_VERDICTS.index(verdict)))
    if _VERDICTS[urgency] == "precision" and not group.all(verdict is not None):
        return None
    return _VERDICTS[urgency]


def _verdict(
    run: Run, rules: WindowRules, window: Window, edges: Edges, begun: float
) -> _Verdict | None:
    """Return this rank's reason to end the window; None to go on.

    Counts all launched batches and estimates when they will be done.
    """
    ahead, done_at = edges.under_way()
    if len(window.blocks) + (ahead > 0) < _MIN_BLOCKS:
        return None
    if done_at > run.ends_at:
        return "deadline"
    batches = sum(block.batches for block in window.blocks) + ahead
    elapsed_s = done_at - begun
    # the queue has to be used up twice (CONTRIBUTING, Rules of measuring)
    has_used_queue = bool(window.made) or batches >= 2 * run.queue_capacity
    enough = _MIN_EPOCH_BLOCKS if window.whole_epochs else BATCH_MEANS
    may_judge = has_used_queue and len(window.blocks) >= enough
    if may_judge and window_rate(window, rules).relative_half_width <= rules.precision:
        return "precision"
    if elapsed_s >= rules.max_s and (has_used_queue or elapsed_s >= _OVERTIME * rules.max_s):
        return "time"
    return None


def train_block(run: Run, batches: int, first: Delivery | None = None) -> Stretch:
    """Train on a number of batches, wait for the device, and return the block.

    Restarts are taken out of the block if the run splits them off.

    Args:
        run: The run.
        batches: Batches to train on; fewer near the deadline.
        first: A batch that was taken before, used as the first.

    Raises:
        FeedEnded: No batch came.
        Diverged: The loss is not finite.
    """
    if first is not None:  # it was waited for before the block
        first = first._replace(asked=perf_counter(), wait_s=0.0)
    launched = _launch(run, batches, first)
    if launched.batches == 0:
        raise FeedEnded
    return _checked(run, DrainedEdges(run.trainer.device).end_block(launched))


def _launch(run: Run, batches: int, first: Delivery | None = None) -> Launched:
    """Take a number of batches and train on them, without waiting for the device except at restarts."""
    feed = run.feed
    trainer = run.trainer
    samples = 0
    taken = 0
    wait_s = 0.0
    starved_s = 0.0
    waits_in_a_row = 0
    apart_s = 0.0
    take_s = run.take_s or 0.0
    learns_takes = feed.watches_queue and run.learns_takes and feed.ready() is not None
    may_end_at = min(run.ends_at, run.pause_at)
    made = feed.made()
    made_apart = 0
    begun = perf_counter()
    made_before = None if made is None else MadeReading(begun, made)
    came_at = inf
    # a block that ends early still has one batch
    while taken < batches and not (taken and perf_counter() > may_end_at and _must_end(run)):
        if run.splits_restarts:
            made = feed.made()
            _close_before_restart(run)
        try:
            # Take a batch.
            delivery = first or feed.take()
            if learns_takes and first is None:
                run.learn_take(delivery)
            if run.mark is not None and delivery.is_restart:
                # until the mark the device worked on the block
                delivery = delivery._replace(asked=max(delivery.asked, run.mark.passed_at()))
            first = None
            came_at = min(came_at, perf_counter())
            batch, batch_samples, _, waited_s, is_restart, had_to_wait, outside_s = delivery
            waits_in_a_row = waits_in_a_row + 1 if had_to_wait else 0
            apart_s += outside_s
            if run.tokens is not None:
                run.tokens.add(batch, batch_samples)

            # Train on it.
            run.loss = trainer.train(batch)
        except FeedEnded:  # no further batch, or the script has ended within this one
            run.ends_at = -inf
            break
        evaluated_s = feed.take_apart_s()
        apart_s += evaluated_s

        # Count it as part of a restart that is split off, or of the block.
        restart_s = None
        if is_restart or run.refill_left:
            restart_s = _note_restart(run, delivery, batch_samples, evaluated_s)
        if run.splits_restarts and restart_s is not None:
            apart_s += restart_s
            made_apart += (feed.made() or 0) - (made or 0)
        else:
            samples += batch_samples
            taken += 1
            wait_s += waited_s
            if waited_s > _STARVED_FROM * take_s:
                starved_s += waited_s - take_s

    ready = feed.ready()
    made = feed.made()
    return Launched(
        samples=samples,
        batches=taken,
        data_wait_s=wait_s,
        waits_in_a_row=waits_in_a_row,
        starved_s=starved_s,
        ready_at_end=ready,
        begun=begun,
        came=came_at,
        apart_s=apart_s,
        loss=run.loss,
        made_before=made_before,
        made_after=None if made is None else MadeReading(perf_counter(), made),
        made_apart=made_apart,
    )


def _close_before_restart(run: Run) -> None:
    """Mark the end of the work launched so far; wait for it if the next batch begins a new epoch.

    That work belongs to the block, and the restart does not.
    """
    if run.feed.is_at_end():
        run.trainer.device.synchronize()
    if run.mark is not None:
        run.mark.set()


def _checked(run: Run, stretch: Stretch) -> Stretch:
    """Return a finished block after recording its length.

    Raises:
        Diverged: Its loss is not finite.
    """
    run.longest_s = max(run.longest_s, stretch.spent_s)
    if not isfinite(stretch.loss):
        raise Diverged(
            f"the loss became {stretch.loss} at the baseline's learning rate of "
            f"{run.trainer.config.lr:g}"
        )
    return stretch


def _must_end(run: Run) -> bool:
    """Return True if a block ends early: near the deadline at once, else after an optimizer step.

    Ranks in step must take the same batches: their blocks are never cut.
    """
    now = perf_counter()
    is_pausing = now > run.pause_at and run.trainer.accumulated == 0
    return run.group.size == 1 and (now > run.ends_at or is_pausing)


def _note_restart(run: Run, delivery: Delivery, samples: int, evaluated_s: float) -> float:
    """Add a batch to its restart and return its seconds, from asking for it, without evaluation."""
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
    """Return whether the window consists of whole epochs: short ones, or ones of few queues."""
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
    """Return the raw record of some stretches, as if the time had ended the window there.

    Args:
        run: The run that was measured.
        stretches: The window's blocks so far.
        warm: Result of the warm-up before it.
        queue_at_start: Batches ready when the clock started; None if unknown.
        whole_epochs: The blocks are whole epochs.
    """
    blocks = tuple(stretch.block for stretch in stretches)
    batches = sum(block.batches for block in blocks)
    epoch_batches = run.feed.epoch_batches
    # ranks whose epochs differ: their restarts stay in the blocks
    is_uneven = not whole_epochs and not run.splits_restarts
    epoch_samples = None
    samples_per_batch = sum(block.samples for block in blocks) / batches
    if epoch_batches is not None and not is_uneven:
        epoch_samples = round(epoch_batches * samples_per_batch)
    ahead = [stretch.host_ahead_s for stretch in stretches if stretch.host_ahead_s is not None]
    return Window(
        blocks=blocks,
        restarts=tuple(run.restarts) if run.splits_restarts else (),
        whole_epochs=whole_epochs,
        epoch_samples=epoch_samples,
        expected_restart_s=_expected_restart_s(run, stretches),
        queue_capacity=run.queue_capacity,
        workers=run.trainer.config.num_workers,
        asked=run.feed.asked_batches(),
        queue_at_start=queue_at_start,
        queue_at_end=blocks[-1].ready_at_end,
        take_s=run.take_s,
        host_ahead_s=median(ahead) if ahead else None,
        warm_up_batches=warm.batches,
        warm_up_s=warm.seconds,
        is_drained=warm.is_drained,
        is_steady=warm.is_steady,
        stopped_by="time",
    )


def _expected_restart_s(run: Run, stretches: list[Stretch]) -> float:
    """Return the expected cost of a restart if none was measured, from the loader's first start.

    The first wait includes one-time work of the workers (imports, worker_init_fn), which persistent
    workers do not repeat. An iterable dataset is restarted even in persistent workers, which may
    take long: there the result is an upper bound.
    """
    config = run.trainer.config
    feed = run.feed
    if config.persistent_workers and not feed.is_iterable:
        return 0.0
    # the loop waits while each worker makes its first batch
    filling_s = max(1, config.num_workers) * mean_batch_s(stretches)
    start_s = 0.0 if config.persistent_workers else feed.start_s
    return start_s + max(0.0, feed.first_wait_s - filling_s)


def _block_batches(run: Run, rules: WindowRules, pace_s: float, *, whole: bool) -> int:
    """Return the batches of a block: at least `block_s` of them, in whole epochs or optimizer steps.

    Workers may finish their batches at the same time. If only finished batches are counted, a block
    holds at least one of each worker.
    """
    unit = run.trainer.config.grad_accum_steps
    if whole and run.feed.epoch_batches:
        unit = run.feed.epoch_batches
    least = 1 if run.knows_made else run.trainer.config.num_workers
    return batches_in(rules.block_s, pace_s, unit, least=least)


def batches_in(seconds: float, batch_s: float, unit: int, least: int = 1) -> int:
    """Return how many batches take at least some seconds, rounded up to whole units.

    Args:
        seconds: Least duration.
        batch_s: Seconds per batch.
        unit: The result is a multiple of this.
        least: Least number of batches.
    """
    batches = max(ceil(seconds / max(batch_s, 1e-6)), least, 1)
    return ceil(batches / unit) * unit


def mean_batch_s(stretches: Sequence[Stretch]) -> float:
    """Return the mean seconds per batch of some stretches, waits included."""
    seconds = sum(stretch.block.seconds for stretch in stretches)
    return seconds / sum(stretch.block.batches for stretch in stretches)


def _long_run_batch_s(stretches: Sequence[Stretch]) -> float:
    """Return the seconds per batch once the queue is used up, if workers make fewer than are taken."""
    samples = sum(stretch.block.samples for stretch in stretches)
    counts = [stretch.block.made for stretch in stretches if stretch.block.made is not None]
    is_falling = len(counts) == len(stretches) and 0 < sum(counts) < samples
    batch_s = mean_batch_s(stretches)
    if is_falling:
        return batch_s * (samples / sum(counts))
    return batch_s


def _pace_s(stretches: Sequence[Stretch]) -> float:
    """Return the seconds per batch by which blocks are sized.

    More than the training time if most time passes outside of training, so that a block does not
    take minutes.
    """
    batches = sum(stretch.block.batches for stretch in stretches)
    spent_s = sum(stretch.spent_s for stretch in stretches) / batches
    return max(_long_run_batch_s(stretches), spent_s / _LONGEST_BLOCK)


def _skips(run: Run) -> int:
    """Return the steps that the GradScaler has skipped since the last call; each halves its scale."""
    if run.trainer.config.amp_dtype != "float16":
        return 0
    scale = run.trainer.scaler.get_scale()
    if scale == 0:  # halved until nothing is left: further skips can't be counted
        raise Diverged(
            "float16 must train, but the GradScaler skipped every step: the gradients are never "
            "finite"
        )
    skipped = max(0, round(log2(run.scale / scale)))
    run.scale = scale
    run.skipped_steps += skipped
    return skipped
