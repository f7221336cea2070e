"""Measure one side alone: the loader without training, the device on held batches, copies between.

Comes in: a running feed or a trainer. Goes out: a `Ceiling`, the throughput that no setting of the
other side can exceed. Used after a trial's window and for the curves of a diagnosis; nothing here
changes what a window has measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import ceil, inf, isfinite
from time import perf_counter, sleep
from typing import Any

from autotune.config.training_config import TrainingConfig
from autotune.models.statistics import NORMAL_95, mean_rate, window_rate
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Block, Restart, Window
from autotune.worker.batch import Held, Reused, batch_bytes, copied, tensors_of, unpacked
from autotune.worker.feed import BatchFeed, Delivery
from autotune.worker.step import NoTrainer, StepTrainer
from autotune.worker.window import (
    Run,
    Stretch,
    WarmUpResult,
    batches_in,
    mean_batch_s,
    train_block,
    window_of,
)

# Constants without a source are our own convention.
_BLOCK_S = 0.05  # as in a warm-up
_HELD_COUNT = 8
"""Batches that training takes in turn: more than one, so that no cache holds them all."""
_HELD_BYTES = 256 * 2**20
"""Most bytes of held batches: little next to a model in training, more than any cache."""
_OVERTIME = 2.0
"""Max ratio of a stretch's seconds to its time, to use up the queue twice."""
_LONGEST = 6.0
"""Max ratio of a stretch's seconds to its time in any case: a batch may take seconds."""
_FEWEST_EPOCH_BATCHES = 4
"""Shorter epochs are measured whole, since their restart takes most of them."""
_WARM_STEPS = 2
"""Optimizer steps on held batches before the clock starts; the last one is timed to plan the
stretch."""
MOST_SKIPS = 17
"""Steps that float16 may skip before it trains: a GradScaler halves its scale of 65536 as many
times until it is below 1. Source: torch.amp.GradScaler, init_scale and backoff_factor."""
_LEAST_PAUSE_S = 1e-4
"""Seconds per batch; a loop that waits less is considered never idle."""
_LONGEST_PAUSE_S = 0.01
"""Seconds before a timed launch after which caches are cold."""
_FEWEST_STEPS = 3
"""Optimizer steps, as few as memory peaks are read over. Source: CONTRIBUTING, Rules of
measuring."""


def loader_alone(
    feed: BatchFeed,
    config: TrainingConfig,
    *,
    seconds: float,
    restart_s: float | None = None,
    ends_at: float = inf,
) -> Ceiling:
    """Measure the throughput at which batches arrive when nobody trains on them.

    Ready batches are taken first. The stretch ends after `seconds` once it has used up the queue
    twice; slow loaders get up to twice that time, and six times for a single batch of each worker.
    Restarts of epochs count, as in `window_rate`.

    Args:
        feed: A feed that was started; it can be used afterwards.
        config: The configuration that the feed's loader was built for.
        seconds: Length of the stretch.
        restart_s: Assumed seconds of an epoch's restart if none falls into the stretch; None:
            derived from the feed's own start.
        ends_at: Time of perf_counter at which the deadline is near; the stretch is cut there.
    """
    run = Run(feed, NoTrainer(config), feed.queue_capacity, ends_at)
    run.pause_at = perf_counter() + _LONGEST * seconds
    watched = feed.watches_queue
    feed.watches_queue = True
    _drain(run)

    # Epochs of few batches are measured whole; of longer ones restarts are split off.
    is_whole = feed.epoch_batches is not None and feed.epoch_batches < _FEWEST_EPOCH_BATCHES
    run.splits_restarts = not is_whole
    unit = feed.epoch_batches if is_whole and feed.epoch_batches else max(1, config.num_workers)
    queue_at_start = feed.ready()
    feed.watches_queue = False

    # Take blocks until the time is up and the queue was used up twice.
    begun = perf_counter()
    stretches = [train_block(run, unit)]
    while not _has_seen_enough(run, stretches, perf_counter() - begun, seconds):
        stretches.append(train_block(run, batches_in(_BLOCK_S, mean_batch_s(stretches[-1:]), unit)))
    window = window_of(run, stretches, WarmUpResult(), queue_at_start, whole_epochs=is_whole)
    feed.watches_queue = watched
    if restart_s is not None:
        window = window.model_copy(update={"expected_restart_s": restart_s})
    return _ceiling_of(window)


def device_alone(
    trainer: StepTrainer,
    held: Sequence[Held],
    *,
    seconds: float,
    pause_s: float = 0.0,
    ends_at: float = inf,
) -> Ceiling:
    """Measure the throughput of training on batches that lie on the device, in whole optimizer steps.

    The device is synchronized only at the edges, so that launches run ahead as in training; the
    host's time to launch a batch is measured afterwards. The model goes on learning from the same
    batches: its weights are worthless afterwards. If the user's code changes tensors in place,
    copies are made outside the clock, of large batches one optimizer step at a time.

    Args:
        trainer: The trainer, in any state.
        held: Result of `resident`.
        seconds: Length of the stretch; at least three optimizer steps, or one if three take more
            than twice that.
        pause_s: Seconds for which the host waits for data before each batch of the training loop;
            launching after a pause takes longer than in a tight loop.
        ends_at: Time of perf_counter at which the deadline is near; only one step is started after
            it.

    Raises:
        RuntimeError: The GradScaler skipped steps, or the loss is not finite: this was no training.
    """
    supply = Reused([kept.batch for kept in held])
    per_step = trainer.config.grad_accum_steps
    if trainer.accumulated:  # the deadline may have cut the window within a step
        train_on(trainer, islice(supply, per_step - trainer.accumulated))
    warm_s = _warm_up(trainer, supply, seconds, ends_at)

    # Train in stretches, each planned to fill the time left, until time and steps are enough.
    seconds = min(seconds, max(0.0, ends_at - perf_counter()))
    fewest = _FEWEST_STEPS if _FEWEST_STEPS * warm_s <= 2 * seconds else 1
    first = supply.handed_out
    taken = 0
    spent_s = 0.0
    scale = trainer.scaler.get_scale()
    while taken == 0 or taken < fewest * per_step or spent_s < seconds:
        if taken and perf_counter() >= ends_at:
            break
        step_s = spent_s * per_step / taken if taken else warm_s
        steps = max(1, fewest - taken // per_step, ceil((seconds - spent_s) / max(step_s, 1e-6)))
        stretch_s, loss = train_on(trainer, iter(supply.take(steps, per_step)))
        spent_s += stretch_s
        taken = supply.handed_out - first
    samples = sum(held[index % len(held)].samples for index in range(first, supply.handed_out))
    _check_trained(trainer, scale, float(loss))

    step_s = spent_s * per_step / taken
    host_s = _launch_s(
        trainer, supply, step_s=step_s, pause_s=pause_s, seconds=seconds, ends_at=ends_at
    )
    return Ceiling(
        samples_per_s=samples / spent_s,
        samples=samples,
        seconds=spent_s,
        batches=taken,
        host_s=host_s,
    )


def _launch_s(
    trainer: StepTrainer,
    supply: Reused,
    *,
    step_s: float,
    pause_s: float,
    seconds: float,
    ends_at: float,
) -> float | None:
    """Return the host's seconds to launch a batch, the least of a few optimizer steps.

    The device is idle before each step. If a step has more launches than the driver's queue holds,
    or synchronizes, as `.item()` does, that counts as the host's time.

    Returns:
        None on the CPU, without time for a step, and in float16 without a fused optimizer, which
            waits in each step to see whether gradients are finite. Source:
            torch.amp.GradScaler.step.
    """
    per_step = trainer.config.grad_accum_steps
    device = trainer.device
    waits_within = trainer.config.amp_dtype == "float16" and not trainer.config.fused
    if device.kind == "cpu" or waits_within:
        return None
    pause_s = min(pause_s, _LONGEST_PAUSE_S)
    if pause_s < _LEAST_PAUSE_S:
        pause_s = 0.0

    # Launch up to five steps, each on an idle device, and keep the fastest.
    least_s = inf
    stop_at = min(ends_at, perf_counter() + seconds)
    for _ in range(5):
        if perf_counter() + step_s + per_step * pause_s > stop_at:
            break
        batches = supply.take(1, per_step)
        device.synchronize()
        launched_s = 0.0
        for batch in batches:
            if pause_s:
                sleep(pause_s)
            begun = perf_counter()
            trainer.train(batch)
            launched_s += perf_counter() - begun
        device.synchronize()
        least_s = min(least_s, launched_s)
    if least_s == inf:
        return None
    return least_s / per_step


def copy_alone(
    trainer: StepTrainer, host: Sequence[Held | Delivery], *, seconds: float, ends_at: float = inf
) -> Ceiling:
    """Measure the throughput of moving batches from the host to the device, without computing.

    From pinned memory the host launches copy after copy, and waits for all at the end of a stretch.

    Args:
        trainer: Moves a batch by `to_device`, in the configuration's layout.
        host: Batches in host memory, pinned if the configuration pins. They are used again and
            again, so the host's caches may hold them: the throughput is an upper bound.
        seconds: Length of the stretch.
        ends_at: Time of perf_counter at which the deadline is near; only the first copies are
            started after it.
    """
    turns = cycle(host)
    taken = 0
    samples = 0
    spent_s = 0.0

    def moved(count: int) -> tuple[float, int]:
        """Return the seconds of moving some batches, and their samples."""
        batches = [Held(unpacked(kept.batch), kept.samples) for kept in islice(turns, count)]
        trainer.device.synchronize()
        begun = perf_counter()
        for kept in batches:
            trainer.to_device(kept.batch)
        trainer.device.synchronize()
        return max(perf_counter() - begun, 1e-9), sum(kept.samples for kept in batches)

    # Move one batch twice; the second time plans the first stretch.
    for _ in range(2):
        once_s, _ = moved(1)
    while taken == 0 or (spent_s < seconds and perf_counter() < ends_at):
        batch_s = spent_s / taken if taken else once_s
        left_s = min(seconds - spent_s, max(0.0, ends_at - perf_counter()))
        # bounded, since the driver has to queue all of them
        count = min(10_000, max(1, ceil(left_s / batch_s)))
        stretch_s, came = moved(count)
        taken += count
        samples += came
        spent_s += stretch_s
    return Ceiling(samples_per_s=samples / spent_s, samples=samples, seconds=spent_s, batches=taken)


def collect(
    feed: BatchFeed, *, seconds: float, count: int = _HELD_COUNT, first: Delivery | None = None
) -> list[Delivery]:
    """Return the next batches of the loader: at least one, until one of three limits is reached.

    Args:
        feed: The feed to take from.
        seconds: Limit of the time.
        count: Limit of the number of batches; bytes are limited too.
        first: A batch that was taken before, used as the first.
    """
    begun = perf_counter()
    came = [first or feed.take()]
    while len(came) < count and perf_counter() - begun < seconds:
        came_bytes = batch_bytes(delivery.batch for delivery in came)
        if came_bytes * (len(came) + 1) / len(came) > _HELD_BYTES:
            break
        came.append(feed.take())
    return came


def resident(trainer: StepTrainer, host: Sequence[Held | Delivery]) -> list[Held]:
    """Move batches to the device, in the trainer's layout.

    Args:
        trainer: Moves a batch by `to_device`.
        host: Batches in host memory.

    Returns:
        The batches; only the first if all have tensors of the same shapes.
    """
    shapes = {tuple(tuple(tensor.shape) for tensor in tensors_of(kept.batch)) for kept in host}
    have_same_shapes = len(shapes) == 1 and shapes != {()}
    chosen = host[:1] if have_same_shapes else host
    return [Held(trainer.to_device(unpacked(kept.batch)), kept.samples) for kept in chosen]


def _drain(run: Run) -> None:
    """Take ready batches: as many as the queue holds, or until each worker was waited for in a row."""
    taken = 0
    waits = 0
    workers = run.trainer.config.num_workers
    ends_at = min(run.ends_at, run.pause_at)
    while taken < run.queue_capacity and waits < workers and perf_counter() < ends_at:
        if run.feed.take().had_to_wait:
            waits += 1
        else:
            waits = 0
        taken += 1


def _has_seen_enough(
    run: Run, stretches: Sequence[Stretch], elapsed_s: float, seconds: float
) -> bool:
    """Return whether the stretch may end, see `loader_alone`."""
    if run.is_late() or elapsed_s >= _LONGEST * seconds:
        return True
    batches = sum(stretch.block.batches for stretch in stretches)
    if elapsed_s >= _OVERTIME * seconds:
        return batches >= run.trainer.config.num_workers
    return elapsed_s >= seconds and batches >= 2 * run.queue_capacity


def _ceiling_of(window: Window) -> Ceiling:
    """Return the ceiling that a loader's window shows."""
    in_blocks = sum(block.samples for block in window.blocks)
    batches = sum(block.batches for block in window.blocks)
    parts: tuple[Block | Restart, ...] = (*window.blocks, *window.restarts)
    samples = sum(part.samples for part in parts)
    rate, half_width = mean_rate(window.blocks)
    relative_sd = None
    if isfinite(half_width) and rate:
        relative_sd = half_width / NORMAL_95 / rate
    return Ceiling(
        samples_per_s=window_rate(window).value,
        samples=samples,
        seconds=sum(part.seconds for part in parts),
        batches=round(samples * batches / in_blocks) if in_blocks else batches,
        relative_sd=relative_sd,
    )


def _warm_up(trainer: StepTrainer, supply: Iterator[Any], seconds: float, ends_at: float) -> float:
    """Return the seconds of the last of a few optimizer steps.

    One step is enough if it is long; in float16 they go on until none is skipped.
    """
    for done in range(1, MOST_SKIPS + 1):
        scale = trainer.scaler.get_scale()
        warm_s, _ = train_on(trainer, islice(supply, trainer.config.grad_accum_steps))
        is_skipped = trainer.scaler.get_scale() < scale
        is_warm = done >= _WARM_STEPS or warm_s > seconds
        if perf_counter() > ends_at or (is_warm and not is_skipped):
            break
    # again: the kernels of this batch are loaded, outside the allocator
    trainer.device.cap_memory()
    return warm_s


def _check_trained(trainer: StepTrainer, scale: float, loss: float) -> None:
    """Refuse a stretch that was no training: a skipped step costs less than a real one.

    Raises:
        RuntimeError: Steps were skipped, or the loss is not finite.
    """
    if trainer.scaler.get_scale() < scale:
        raise RuntimeError(
            f"steps were skipped: their gradients in {trainer.config.amp_dtype} are not finite"
        )
    if not isfinite(loss):
        raise RuntimeError(f"the loss is not finite ({loss})")


def train_on(trainer: StepTrainer, batches: Iterator[Any]) -> tuple[float, Any]:
    """Train on some batches, from one synchronization to the next.

    Returns:
        The seconds that it took, and the last loss.
    """
    loss: Any = 0.0
    trainer.device.synchronize()
    begun = perf_counter()
    for batch in batches:
        loss = trainer.train(batch)
    trainer.device.synchronize()
    return max(perf_counter() - begun, 1e-9), loss


def time_step(trainer: StepTrainer, batch: Any) -> float:
    """Measure the seconds of one optimizer step on copies of a batch."""
    copies = [copied(batch) for _ in range(trainer.config.grad_accum_steps)]
    return train_on(trainer, iter(copies))[0]
