"""One side alone: the loader without training, the device on batches that it already holds, and copying between them.

Takes a running Feed or a Trainer; hands on a Ceiling, the rate that no setting of the other side
can pass. Used after a trial's window and for the curves of a diagnosis; nothing here changes what a
window has measured.
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
from autotune.worker.batch import Held, Reused, batch_bytes, tensors_of, unpacked
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

# What names no source is our own convention.
_BLOCK_S = 0.05  # as a warm-up's
_HELD_COUNT = (
    8  # batches that training takes in turns: more than one, so that no cache holds them all
)
_HELD_BYTES = 256 * 2**20  # little beside a model that trains, beyond every cache
_OVERTIME = 2.0  # past its time a stretch goes on so far for that
_LONGEST = 6.0  # past its time so far, whatever has come: a batch may take seconds
_FEWEST_EPOCH_BATCHES = 4  # of shorter epochs nothing is left beside their restart
# Optimizer steps on held batches before the clock starts; the last one is timed to plan the
# stretch.
_WARM_STEPS = 2
MOST_SKIPS = 17
"""Steps that float16 may skip before it trains: a GradScaler halves its scale of 65536 so often
until it is below 1. Source: torch.amp.GradScaler, init_scale and backoff_factor."""
_LEAST_PAUSE_S = 1e-4  # of the loop, below which the host is as good as never idle
_LONGEST_PAUSE_S = 0.01  # before a timed launch: caches are cold by then
_FEWEST_STEPS = 3  # as few as peaks of memory are read over (CONTRIBUTING, Rules of measuring)


def loader_alone(
    feed: BatchFeed,
    config: TrainingConfig,
    *,
    seconds: float,
    restart_s: float | None = None,
    ends_at: float = inf,
) -> Ceiling:
    """The rate at which batches come when nobody trains on them.

    What lies ready is taken first. The stretch ends after `seconds` once it has used up the queue
    twice; slow loaders get up to twice that, and six times for a single round of the workers.
    Epochs' restarts belong to the rate, as in `window_rate`.

    Args:
        feed: A feed that was started; it can be gone on with.
        config: What the feed's loader was built for.
        seconds: Length of the stretch.
        restart_s: What an epoch's restart is taken to cost where none falls into the stretch; None:
            what the feed's own start has shown.
        ends_at: Time of perf_counter at which the deadline is near; the stretch is cut there.
    """
    run = Run(feed, NoTrainer(config), feed.queue_capacity, ends_at)
    run.pause_at = perf_counter() + _LONGEST * seconds
    watched = feed.watches_queue
    feed.watches_queue = True
    _drain(run)
    is_whole = feed.epoch_batches is not None and feed.epoch_batches < _FEWEST_EPOCH_BATCHES
    run.splits_restarts = not is_whole
    unit = feed.epoch_batches if is_whole and feed.epoch_batches else max(1, config.num_workers)
    queue_at_start = feed.ready()
    feed.watches_queue = False
    begun = perf_counter()
    stretches = [train_block(run, unit)]
    while not _has_seen_enough(run, stretches, perf_counter() - begun, seconds):
        stretches.append(train_block(run, batches_in(_BLOCK_S, mean_batch_s(stretches[-1:]), unit)))
    window = window_of(run, stretches, WarmUpResult(), queue_at_start, whole_epochs=is_whole)
    feed.watches_queue = watched
    return _ceiling_of(
        window if restart_s is None else window.model_copy(update={"expected_restart_s": restart_s})
    )


def device_alone(
    trainer: StepTrainer,
    held: Sequence[Held],
    *,
    seconds: float,
    pause_s: float = 0.0,
    ends_at: float = inf,
) -> Ceiling:
    """The rate of training on batches that lie on the device, in turns; whole optimizer steps.

    Synchronised at the edges alone, so that launching runs ahead as it does in training; what the
    host takes to launch a batch is measured behind it. The model goes on learning from the same
    batches: what the run is worth afterwards is nothing. Where the user's code changes their
    tensors in place, copies are made outside the clock; of large batches for one optimizer step
    after the other.

    Args:
        trainer: Where training stands.
        held: What `resident` has given.
        seconds: Length of the stretch; at least three optimizer steps unless these take twice that,
            then at least one.
        pause_s: Seconds for which the host waits for data before each batch of the loop. Launching
            after a pause takes longer than in a tight loop.
        ends_at: Time of perf_counter at which the deadline is near; beyond one step nothing is
            begun then.

    Raises:
        RuntimeError: this was no training: the GradScaler skipped steps, or the loss is not finite.
    """
    supply = Reused([kept.batch for kept in held])
    per_step = trainer.config.grad_accum_steps
    if trainer.accumulated:  # a window that the deadline has cut may end within a step
        train_on(trainer, islice(supply, per_step - trainer.accumulated))
    warm_s = _warm_up(trainer, supply, seconds, ends_at)
    seconds = min(seconds, max(0.0, ends_at - perf_counter()))
    fewest = _FEWEST_STEPS if _FEWEST_STEPS * warm_s <= 2 * seconds else 1
    first = supply.handed_out
    taken = 0
    spent_s = 0.0
    scale = trainer.scaler.get_scale()
    while taken == 0 or (
        (taken < fewest * per_step or spent_s < seconds) and perf_counter() < ends_at
    ):
        step_s = spent_s * per_step / taken if taken else warm_s
        steps = max(1, fewest - taken // per_step, ceil((seconds - spent_s) / max(step_s, 1e-6)))
        stretch_s, loss = train_on(trainer, iter(supply.take(steps, per_step)))
        spent_s = spent_s + stretch_s
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
    """Return the seconds in which the host launches a batch's work, the least of a few optimizer steps.

    The device has done all before each step. Where a step has more launches than the driver's queue
    holds, or waits for the device by itself, as `.item()` does, that counts as the host's time.
    float16 without a fused optimizer waits in each step to see whether gradients are finite: None,
    as without the time for a step. Source: torch.amp.GradScaler.step.
    """
    per_step = trainer.config.grad_accum_steps
    device = trainer.device
    waits_within = trainer.config.amp_dtype == "float16" and not trainer.config.fused
    if device.kind == "cpu" or waits_within:
        return None
    pause_s = min(pause_s, _LONGEST_PAUSE_S) if pause_s >= _LEAST_PAUSE_S else 0.0
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
    return None if least_s == inf else least_s / per_step


def copy_alone(
    trainer: StepTrainer, host: Sequence[Held | Delivery], *, seconds: float, ends_at: float = inf
) -> Ceiling:
    """The rate of moving batches from the host to the device, in turns, as training does it, without computing.

    From pinned memory the host launches one copy after another, and waits for them all at the end
    of a stretch.

    Args:
        trainer: Moves a batch by `to_device`, in the configuration's layout.
        host: Batches in the host's memory, pinned where the configuration pins. That they are the
            same again and again may keep them in the host's caches: the rate is at its best.
        seconds: Length of the stretch.
        ends_at: Time of perf_counter at which the deadline is near; beyond the first copies nothing
            is begun then.
    """
    turns = cycle(host)
    taken = 0
    samples = 0
    spent_s = 0.0

    def moved(count: int) -> tuple[float, int]:
        """Seconds of moving so many batches, and their samples."""
        batches = [Held(unpacked(kept.batch), kept.samples) for kept in islice(turns, count)]
        trainer.device.synchronize()
        begun = perf_counter()
        for kept in batches:
            trainer.to_device(kept.batch)
        trainer.device.synchronize()
        return max(perf_counter() - begun, 1e-9), sum(kept.samples for kept in batches)

    for _ in range(2):  # the last one is timed to plan the stretch
        once_s, _ = moved(1)
    while taken == 0 or (spent_s < seconds and perf_counter() < ends_at):
        batch_s = spent_s / taken if taken else once_s
        left_s = min(seconds - spent_s, max(0.0, ends_at - perf_counter()))
        count = min(
            10_000, max(1, ceil(left_s / batch_s))
        )  # bounds what the driver has to remember
        stretch_s, came = moved(count)
        taken = taken + count
        samples = samples + came
        spent_s = spent_s + stretch_s
    return Ceiling(samples_per_s=samples / spent_s, samples=samples, seconds=spent_s, batches=taken)


def collect(
    feed: BatchFeed, *, seconds: float, count: int = _HELD_COUNT, first: Delivery | None = None
) -> list[Delivery]:
    """The next batches as the loader delivers them: at least one, up to a count, a size in bytes, and a time.

    A batch that was taken before may be handed in as the first.
    """
    begun = perf_counter()
    came = [first or feed.take()]
    while len(came) < count and perf_counter() - begun < seconds:
        if (
            batch_bytes(delivery.batch for delivery in came) * (len(came) + 1) / len(came)
            > _HELD_BYTES
        ):
            break
        came.append(feed.take())
    return came


def resident(trainer: StepTrainer, host: Sequence[Held | Delivery]) -> list[Held]:
    """Batches moved to the device, in the trainer's layout: the first alone where all are known to have one size."""
    shapes = {tuple(tuple(tensor.shape) for tensor in tensors_of(kept.batch)) for kept in host}
    chosen = host[:1] if len(shapes) == 1 and shapes != {()} else host
    return [Held(trainer.to_device(unpacked(kept.batch)), kept.samples) for kept in chosen]


def _drain(run: Run) -> None:
    """Take what lies ready: as many batches as the queue holds, or, sooner, one wait for each worker running."""
    taken = 0
    waits = 0
    workers = run.trainer.config.num_workers
    while (
        taken < run.queue_capacity
        and waits < workers
        and perf_counter() < min(run.ends_at, run.pause_at)
    ):
        waits = waits + 1 if run.feed.take().had_to_wait else 0
        taken += 1


def _has_seen_enough(
    run: Run, stretches: Sequence[Stretch], elapsed_s: float, seconds: float
) -> bool:
    if run.is_late() or elapsed_s >= _LONGEST * seconds:
        return True
    batches = sum(stretch.block.batches for stretch in stretches)
    if elapsed_s >= _OVERTIME * seconds:
        return batches >= run.trainer.config.num_workers
    return elapsed_s >= seconds and batches >= 2 * run.queue_capacity


def _ceiling_of(window: Window) -> Ceiling:
    in_blocks = sum(block.samples for block in window.blocks)
    batches = sum(block.batches for block in window.blocks)
    parts: tuple[Block | Restart, ...] = (*window.blocks, *window.restarts)
    samples = sum(part.samples for part in parts)
    rate, half_width = mean_rate(window.blocks)
    return Ceiling(
        samples_per_s=window_rate(window).value,
        samples=samples,
        seconds=sum(part.seconds for part in parts),
        batches=round(samples * batches / in_blocks) if in_blocks else batches,
        relative_sd=half_width / NORMAL_95 / rate if isfinite(half_width) and rate else None,
    )


def _warm_up(trainer: StepTrainer, supply: Iterator[Any], seconds: float, ends_at: float) -> float:
    """Seconds of the last of a few optimizer steps: one where it is long; in float16 until none is skipped."""
    for done in range(1, MOST_SKIPS + 1):
        scale = trainer.scaler.get_scale()
        warm_s, _ = train_on(trainer, islice(supply, trainer.config.grad_accum_steps))
        is_skipped = trainer.scaler.get_scale() < scale
        if perf_counter() > ends_at or (
            not is_skipped and (done >= _WARM_STEPS or warm_s > seconds)
        ):
            break
    # Again: the kernels of this batch have been loaded, outside the allocator.
    trainer.device.cap_memory()
    return warm_s


def _check_trained(trainer: StepTrainer, scale: float, loss: float) -> None:
    """Refuse a stretch whose rate is not that of training: a skipped step costs less than one that is done.

    Raises:
        RuntimeError: steps were skipped, or the loss is not finite.
    """
    if trainer.scaler.get_scale() < scale:
        raise RuntimeError(
            f"steps were skipped: their gradients in {trainer.config.amp_dtype} are not finite"
        )
    if not isfinite(loss):
        raise RuntimeError(f"the loss is not finite ({loss})")


def train_on(trainer: StepTrainer, batches: Iterator[Any]) -> tuple[float, Any]:
    """Seconds of training on some batches, from one synchronisation to the next, and the last one's loss."""
    loss: Any = 0.0
    trainer.device.synchronize()
    begun = perf_counter()
    for batch in batches:
        loss = trainer.train(batch)
    trainer.device.synchronize()
    return max(perf_counter() - begun, 1e-9), loss
