"""Quantiles, throughput by batch means, the throughput that a window shows, the score of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf, sqrt
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from autotune.config.plan import Objective
from autotune.records.measurement import Block, Interval, Measurement, Window
from autotune.records.trial import Score

# Quantiles, and the interval of a rate by batch means. Pure functions over numbers; no measuring
# here.
#
# Sources: batch means with t quantiles, Law, "Simulation Modeling and Analysis", 5th ed., section
# 9.5.3; the fixed number of about ten batches, Schmeiser 1982, "Batch size effects in the analysis
# of simulation output".


Floats = NDArray[np.float64]
"""The arrays that models calculate with; each use states the shape."""
BATCH_MEANS = 10
"""Batches that a series is cut into: ten keep 92 to 95 % coverage where steps are autocorrelated."""
NORMAL_95 = NormalDist().inv_cdf(0.975)
"""Two-sided 95 % quantile of the normal distribution."""


def t_95(degrees_of_freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t; infinite without a degree of freedom."""
    return t_quantile(0.975, degrees_of_freedom) if degrees_of_freedom > 0 else inf


@lru_cache(maxsize=1024)  # a report asks for the same few thousands of times
def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """The value of Student's t, of more than no degrees of freedom, that this share stays below."""
    from scipy.special import (
        stdtrit,  # a trial has it at its start, by worker/rank: its window can't wait for imports
    )

    return float(stdtrit(degrees_of_freedom, probability))


def batch_means_half_width(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    """Half of the 95 % interval of the rate sum(amounts) / sum(seconds), by batch means.

    Neighbouring blocks are joined into about ten batches, since steps are correlated with their
    neighbours. The rate is a ratio of sums, and its variance that of amount - rate * seconds: where
    a loader pauses, batches' own rates differ by a hundred times, and neither their mean nor their
    spread says much of the rate. Infinite for fewer than two blocks.

    Source: Cochran, "Sampling Techniques", 3rd ed., section 6.4.
    """
    batches = _joined(amounts, seconds)
    if len(batches) < 2:
        return inf
    elapsed = sum(time for _, time in batches)
    rate = sum(amount for amount, _ in batches) / elapsed
    spread = sqrt(sum((amount - rate * time) ** 2 for amount, time in batches) / (len(batches) - 1))
    return t_95(len(batches) - 1) * spread * sqrt(len(batches)) / elapsed


def _joined(amounts: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    count = len(amounts)
    batches = count if count < 2 * BATCH_MEANS else BATCH_MEANS
    edges = [round(index * count / batches) for index in range(batches + 1)] if batches else []
    return [(sum(amounts[start:stop]), sum(seconds[start:stop])) for start, stop in pairwise(edges)]


# The rate that a window shows, with the interval that its own blocks tell.
#
# The stop rule of a window and the Measurement use the same `window_rate`. What runs differ by
# beyond that, no window can show by itself: `run_spread` widens the interval. Pure.


_STARVES_FROM = 0.05
"""Share of the loop's time spent waiting for data, from which on the loader limits it: our own
convention. With less, what was made is followed as far as that share, which is about as much as it
matters."""


def mean_rate(blocks: Sequence[Block]) -> tuple[float, float]:
    """The rate of some blocks by batch means, in samples per second, and half of its 95 % interval.

    It is not corrected for restarts and the edges of the queue.
    """
    amounts = [float(block.samples) for block in blocks]
    seconds = [block.seconds for block in blocks]
    return sum(amounts) / sum(seconds), batch_means_half_width(amounts, seconds)


def window_rate(window: Window) -> Interval:
    """Return the rate that a long run would have, from a window.

    Where workers have counted the samples that they make, see `_counted_rate`. Otherwise it is the
    mean rate of what came, less the batches that lay ready at the first edge beyond those at the
    last, which were loaded before the clock started. These count only as far as the loop has
    starved, or as the queue has fallen steadily from block to block. Else they made nothing faster:
    workers fill the queue while the probes read at the first edge, and training then keeps it less
    full. The interval's upper end is that of the uncorrected rate, since the truth lies between the
    two.

    Blocks of whole epochs hold their restarts; otherwise what a restart costs beyond the samples
    that came with it is added once per `epoch_samples`.
    """
    if window.made:  # where a queue alone was used up, nothing was made
        steady, low, high = _counted_rate(window)
    else:
        mean, half = mean_rate(window.blocks)
        steady = mean - _surplus_samples(window) / sum(block.seconds for block in window.blocks)
        low = max(steady - half, 0.0)
        high = mean + half
    return Interval(
        value=_with_restarts(steady, window),
        low=_with_restarts(low, window),
        high=_with_restarts(high, window),
    )


def wait_fraction(window: Window) -> float:
    """Return the share of its time that the loop waits for data in the long run.

    While a queue is used up it waits less than it will: its own work takes the same time for each
    sample, so that at the lower rate all else is waiting.
    """
    waited = _waited_share(window)
    if not window.made:
        return waited
    steady, _, _ = _counted_rate(window)
    return max(0.0, 1.0 - (1.0 - waited) * steady / window.raw_samples_per_s)


def _counted_rate(window: Window) -> tuple[float, float, float]:
    """Return a steady rate, and the ends of its interval, from what was made and what came.

    It is the lower of two rates: that at which workers make samples, and that at which the loop
    would take them if it never waited. A long queue hides that the loader is the slower one, also
    where the device always has work: an H200 took 3,628 images/s for 2 s out of a queue that fell
    from 55 batches to 43, and 2,820 from then on. While it falls, a worker whose batches all lie
    ready waits until one is taken: what is made over the share of workers that had work is what all
    would make, up to what came.

    Less is made than comes by chance as well. So that counts only where the queue falls steadily,
    or as far as the loop has waited. Where the two rates differ by more than chance, and waiting
    does not show which is right, the interval holds both, and what was made, which a long run's
    rate can't be below.
    """
    came, came_half = mean_rate(window.blocks)
    lengths = [block.seconds for block in window.blocks]
    amounts = [block.made or 0.0 for block in window.blocks]
    made = sum(amounts) / sum(lengths)
    made_half = batch_means_half_width(amounts, lengths)
    could = made
    could_half = made_half
    if made < came:
        could = made / max(_share_with_work(window), made / came)
        could_half = made_half * could / made if could < came else came_half
    waited = min(_waited_share(window), 0.999)  # a loop that only waits has no rate of its own
    differs = abs(could - came) > came_half + could_half
    if could >= came:
        value = min(could, came / (1.0 - waited))
        half = could_half if value == could else came_half
        low = min(value - half, came - came_half) if differs else value - half
        return value, max(low, 0.0), value + half
    is_loader = waited >= _STARVES_FROM
    if not is_loader and not _falls(
        [block.made - block.samples for block in window.blocks if block.made is not None]
    ):
        value = max(could, came * (1.0 - waited))
        return value, max(value - came_half, 0.0), came + came_half
    high = (
        could + could_half
        if is_loader or not differs
        else max(could + could_half, came + came_half)
    )
    return could, max(made - made_half, 0.0), high


def _share_with_work(window: Window) -> float:
    """Return the mean share of the loader's workers that were making a batch; 1 where that is not known.

    torch hands out batches to its workers in turn, so the batches that are not ready yet are spread
    evenly over them.
    """
    ready = [window.queue_at_start, *(block.ready_at_end for block in window.blocks)]
    known = [count for count in ready if count is not None]
    if window.workers == 0 or window.asked is None or len(known) < len(ready):
        return 1.0
    shares = [
        min(1.0, (window.asked - (before + after) / 2) / window.workers)
        for before, after in pairwise(known)
    ]
    weighted = sum(
        share * block.seconds for share, block in zip(shares, window.blocks, strict=True)
    )
    return max(0.0, weighted) / sum(block.seconds for block in window.blocks)


def _waited_share(window: Window) -> float:
    return min(1.0, window.starved_s / sum(block.seconds for block in window.blocks))


def _surplus_samples(window: Window) -> float:
    """Return the samples that would not have come in time had the queue been as full at first as it was at the end."""
    if window.queue_at_start is None or window.queue_at_end is None or window.is_held_by_device:
        return 0.0
    batches = sum(block.batches for block in window.blocks)
    starved_batches = window.starved_s / window.batch_s
    surplus = min(
        window.queue_at_start - window.queue_at_end,
        batches - 1,
        max(starved_batches, _fallen(window.blocks)),
    )
    return surplus * sum(block.samples for block in window.blocks) / batches if surplus > 0 else 0.0


def _fallen(blocks: Sequence[Block]) -> float:
    """Return the batches by which the queue has fallen over some blocks: 0 where that may be chance.

    A loader that is a little slower than training empties a long queue only after the window,
    without any wait in it.
    """
    ready = [block.ready_at_end for block in blocks if block.ready_at_end is not None]
    changes = [after - before for before, after in pairwise(ready)]
    return -fmean(changes) * len(blocks) if len(ready) == len(blocks) and _falls(changes) else 0.0


def _falls(changes: Sequence[float]) -> bool:
    """Return whether the mean of a queue's changes from block to block is below 0 by a t-test at 95 %."""
    if len(changes) < 2:
        return False
    return -fmean(changes) > t_95(len(changes) - 1) * stdev(changes) / sqrt(len(changes))


def _with_restarts(steady: float, window: Window) -> float:
    if window.whole_epochs or window.epoch_samples is None or not 0 < steady < inf:
        return steady
    costs = [
        restart.seconds - min(restart.samples, window.epoch_samples) / steady
        for restart in window.restarts
    ]
    restart_s = max(0.0, sum(costs) / len(costs)) if costs else window.expected_restart_s
    return 1.0 / (1.0 / steady + restart_s / window.epoch_samples)


# What a measurement is worth: its rate over the baseline's, less a little for an idle device, under
# the memory limit.
#
# Comes in: a Measurement, the baseline's, the Objective and the limit in bytes. Goes out: a Score.
# Pure.


LEAST_VIOLATION = 0.01
"""Share by which a run that thrashes, or was ended for its memory, counts as over the limit; its
need is not known."""


def evaluate(
    measurement: Measurement, baseline: Measurement, objective: Objective, limit_bytes: int
) -> Score:
    """Score a measurement against the baseline's, under a memory limit in bytes.

    score = throughput / baseline throughput * (1 - w * (1 - busy_fraction)). Busy fractions of
    different sources don't compare, and GPM or NVML may refuse a single trial: one that the
    baseline's source did not measure is scored with the baseline's fraction, as if it were as busy.
    """
    told = measurement.busy_by(baseline.busy_source)
    busy = baseline.busy_fraction if told is None else told
    idle = 0.0 if busy is None else 1.0 - busy
    value = (
        measurement.samples_per_s / baseline.samples_per_s * (1.0 - objective.busy_weight * idle)
    )
    violation = measurement.peak_memory_bytes / limit_bytes - 1.0
    reason = memory_fault(measurement, limit_bytes)
    if reason is not None and violation <= 0:
        violation = LEAST_VIOLATION
    return Score(value=value, feasible=reason is None, violation=violation, reason=reason or "")


def memory_fault(measurement: Measurement, limit_bytes: int) -> str | None:
    """Why a run's memory does not suffice under a limit, or None.

    A run that thrashes within the limit is none that fits, see `MemorySample.is_thrashing`.
    """
    limit = _mib(limit_bytes)
    peak = _mib(measurement.peak_memory_bytes)
    if measurement.peak_memory_bytes > limit_bytes:
        return f"peak memory must stay within {limit}, but was {peak}"
    if measurement.memory.is_thrashing:
        return (
            f"training must find room within {limit}, but at {peak} the allocator gave back what "
            f"it held, and asked "
            f"again, {measurement.memory.alloc_retries} times in the window; take a smaller micro "
            f"batch, or raise "
            "memory_limit"
        )
    return None


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
