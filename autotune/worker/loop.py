"""The measuring loop: warm-up, then a window of blocks, by the rules of measuring.

Takes a started Feed and a Trainer; hands on the raw Window. The clock covers the whole loop, loader included, and the
device is synchronised at block edges alone. The window ends when its interval, by the very formula that is reported, is
narrow enough, or when its time is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, isfinite, log2
from statistics import median
from time import perf_counter
from typing import Any, Literal

from autotune.core.measurement import Block, Window, rate_of
from autotune.core.statistics import BATCH_MEANS
from autotune.protocol import WindowRules
from autotune.worker.feed import Delivery, Feed
from autotune.worker.step import Trainer, count_samples

__all__ = ["Diverged", "Run", "Warmth", "measure_window", "warm_up"]

_WARM_UP_STEPS = 3  # optimizer steps synchronised one by one: compilation, cuDNN's search, first allocations
_WARM_UP_BLOCK_S = 0.05
_WARM_UP_MIN_S = 0.3
_WARM_UP_MAX_S = 8.0
_SLOW_FACTOR = 3.0  # a block whose computing takes this many times the median lets the queue fill
_WHOLE_EPOCHS_UP_TO_S = 1.0  # shorter epochs are measured whole; of longer ones the restart is added in proportion
_MIN_BLOCKS = 3
_MIN_EPOCH_BLOCKS = 5
_QUEUES_IN_WINDOW = 2
_OVERTIME = 2.0  # how far past its time a window goes on until it has seen the queue through twice


class Diverged(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The loss is not finite, or every step is skipped for its gradients; the message says which."""


@dataclass(slots=True)
class Run:
    """A trial's training under way: what the loop needs, and what it counts."""

    feed: Feed
    trainer: Trainer
    queue_capacity: int
    ends_at: float
    """Time of perf_counter at which the deadline is too near to go on."""
    loss: Any = None
    scale: float = 1.0
    skipped_steps: int = 0
    started: float = field(default_factory=perf_counter)

    def is_late(self) -> bool:
        """Whether the deadline is near."""
        return perf_counter() > self.ends_at


@dataclass(frozen=True, slots=True)
class Warmth:
    """What the warm-up has seen."""

    batches: int
    seconds: float
    is_drained: bool
    is_steady: bool
    batch_s: float
    """Seconds of a batch, waits included."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A block with its restarts and what the warm-up looks for."""

    block: Block
    restarts_s: tuple[float, ...]
    waits_in_a_row: int

    @property
    def compute_s(self) -> float:
        return (self.block.seconds - self.block.data_wait_s) / self.block.batches


def warm_up(run: Run, first: Delivery) -> Warmth:
    """Train until steps are steady and the batches that slow first steps let pile up are used.

    Drained means: as many batches as the queue holds were taken since the last slow step, or, sooner, the loop has
    found the queue empty as many times running as there are workers. Gives up after 8 s and says so.
    """
    begun = perf_counter()
    config = run.trainer.config
    stretches = [_train_block(run, config.grad_accum_steps, first)]
    while len(stretches) < _WARM_UP_STEPS and not run.is_late():
        stretches.append(_train_block(run, config.grad_accum_steps))
    begun_steady, since_slow, waits, computes = perf_counter(), 0, 0, [stretches[-1].compute_s]
    steady_streak, is_drained = 0, run.queue_capacity == 0
    while True:
        took = perf_counter() - begun_steady
        is_steady = steady_streak >= 2
        if (is_steady and is_drained and took >= _WARM_UP_MIN_S) or took >= _WARM_UP_MAX_S or run.is_late():
            break
        stretch = _train_block(run, _batches_for(_WARM_UP_BLOCK_S, stretches[-1], config.grad_accum_steps))
        stretches.append(stretch)
        computes.append(stretch.compute_s)
        is_slow = stretch.compute_s > _SLOW_FACTOR * median(computes) or _skips(run)
        steady_streak = 0 if is_slow else steady_streak + 1
        since_slow = 0 if is_slow else since_slow + stretch.block.batches
        all_waited = stretch.waits_in_a_row == stretch.block.batches
        waits = waits + stretch.waits_in_a_row if all_waited else stretch.waits_in_a_row
        is_drained = since_slow >= run.queue_capacity or waits >= max(1, config.num_workers)
    recent = stretches[-1]
    seconds = recent.block.seconds + sum(recent.restarts_s)
    return Warmth(
        batches=sum(stretch.block.batches for stretch in stretches),
        seconds=perf_counter() - begun,
        is_drained=is_drained,
        is_steady=steady_streak >= 2,
        batch_s=seconds / recent.block.batches,
    )


def measure_window(run: Run, rules: WindowRules, warmth: Warmth, at_edge: Callable[[], None]) -> Window:
    """Train for a timed window. `at_edge` is called right before the clock starts (passive probes begin there)."""
    epoch_batches = run.feed.epoch_batches
    whole = epoch_batches is not None and epoch_batches * warmth.batch_s <= _WHOLE_EPOCHS_UP_TO_S
    size = _block_batches(run, rules, warmth.batch_s, epoch_batches if whole else None)
    queue_at_start = run.feed.ready()
    run.feed.watches_queue = False
    run.trainer.device.synchronize()
    at_edge()
    begun, stretches = perf_counter(), list[_Stretch]()
    while True:
        stretches.append(_train_block(run, size))
        window = _window(run, stretches, warmth, queue_at_start, whole_epochs=whole)
        stopped_by = _verdict(run, rules, window, perf_counter() - begun)
        if stopped_by is not None:
            _refuse_skipping(run, stretches)
            return window.model_copy(update={"stopped_by": stopped_by})
        size = size if whole else max(size, _block_batches(run, rules, _batch_s(stretches), None))


def _verdict(
    run: Run, rules: WindowRules, window: Window, elapsed_s: float
) -> Literal["precision", "time", "deadline"] | None:
    count = len(window.blocks)
    if count < _MIN_BLOCKS:
        return None
    if run.is_late():
        return "deadline"
    has_seen_queue = sum(block.batches for block in window.blocks) >= _QUEUES_IN_WINDOW * run.queue_capacity
    enough = _MIN_EPOCH_BLOCKS if window.whole_epochs else BATCH_MEANS
    if has_seen_queue and count >= enough and rate_of(window).relative_half_width <= rules.precision:
        return "precision"
    if elapsed_s >= rules.max_s and (has_seen_queue or elapsed_s >= _OVERTIME * rules.max_s):
        return "time"
    return None


def _train_block(run: Run, batches: int, first: Delivery | None = None) -> _Stretch:
    """Train on so many batches, then synchronise. The clock runs from the last edge's to this one's."""
    feed, trainer, expected = run.feed, run.trainer, run.trainer.config.micro_batch_size
    samples, wait_s, waits_in_a_row, restarts = 0, 0.0, 0, list[float]()
    begun = perf_counter()
    for index in range(batches):
        delivery = first if index == 0 and first is not None else feed.take()
        if delivery is first:
            pass  # its wait lies before the clock
        elif delivery.is_restart:
            restarts.append(delivery.wait_s)
        else:
            wait_s += delivery.wait_s
        waits_in_a_row = waits_in_a_row + 1 if delivery.had_to_wait else 0
        samples += count_samples(delivery.batch, expected)
        run.loss = trainer.train(delivery.batch)
    trainer.device.synchronize()
    seconds = max(perf_counter() - begun - sum(restarts), 1e-9)
    _check_loss(run)
    block = Block(samples=samples, batches=batches, seconds=seconds, data_wait_s=min(wait_s, seconds))
    return _Stretch(block, tuple(restarts), waits_in_a_row)


def _window(
    run: Run, stretches: list[_Stretch], warmth: Warmth, queue_at_start: int | None, *, whole_epochs: bool
) -> Window:
    blocks = tuple(stretch.block for stretch in stretches)
    batches = sum(block.batches for block in blocks)
    epoch_batches = run.feed.epoch_batches
    samples_per_batch = sum(block.samples for block in blocks) / batches
    mean_wait_s = sum(block.data_wait_s for block in blocks) / batches
    first_s = run.feed.first_wait_s + (0.0 if run.trainer.config.persistent_workers else run.feed.start_s)
    return Window(
        blocks=blocks,
        restarts_s=tuple(restart for stretch in stretches for restart in stretch.restarts_s),
        whole_epochs=whole_epochs,
        epoch_samples=None if epoch_batches is None else round(epoch_batches * samples_per_batch),
        expected_restart_s=max(0.0, first_s - mean_wait_s),
        queue_capacity=run.queue_capacity,
        queue_at_start=queue_at_start,
        queue_at_end=run.feed.ready(),
        warm_up_batches=warmth.batches,
        warm_up_s=warmth.seconds,
        is_drained=warmth.is_drained,
        is_steady=warmth.is_steady,
        stopped_by="time",
    )


def _block_batches(run: Run, rules: WindowRules, batch_s: float, epoch_batches: int | None) -> int:
    """Batches of a block: at least 0.2 s of them and one a worker; whole epochs, or whole optimizer steps."""
    config = run.trainer.config
    wanted = max(config.num_workers, ceil(rules.block_s / max(batch_s, 1e-6)), 1)
    unit = epoch_batches or config.grad_accum_steps
    return ceil(wanted / unit) * unit


def _batches_for(seconds: float, stretch: _Stretch, unit: int) -> int:
    batch_s = stretch.block.seconds / stretch.block.batches
    return max(1, ceil(seconds / max(batch_s, 1e-6) / unit)) * unit


def _batch_s(stretches: list[_Stretch]) -> float:
    return sum(one.block.seconds for one in stretches) / sum(one.block.batches for one in stretches)


def _check_loss(run: Run) -> None:
    value = float(run.loss)
    if not isfinite(value):
        raise Diverged(f"the loss became {value} at the baseline's learning rate of {run.trainer.config.lr:g}")


def _skips(run: Run) -> bool:
    """Whether the GradScaler has skipped steps since the last look: its scale is halved each time."""
    if run.trainer.config.amp_dtype != "float16":
        return False
    scale = run.trainer.scaler.get_scale()
    skipped = max(0, round(log2(run.scale / scale))) if 0 < scale < run.scale else 0
    run.scale, run.skipped_steps = scale, run.skipped_steps + skipped
    return skipped > 0


def _refuse_skipping(run: Run, stretches: list[_Stretch]) -> None:
    before = run.skipped_steps
    steps = sum(one.block.batches for one in stretches) / run.trainer.config.grad_accum_steps
    if _skips(run) and run.skipped_steps - before > steps / 2:
        raise Diverged(
            f"float16 must train, but the GradScaler skipped {run.skipped_steps - before} of the window's "
            f"{steps:.0f} optimizer steps for gradients that were not finite"
        )
