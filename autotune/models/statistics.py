"""Quantiles, throughput by batch means, the throughput of a window, and the score of a measurement.

Comes in: blocks of a window, or a `Measurement` with its baseline, objective and memory limit. Goes
out: an `Interval`, or a `Score`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean, stdev
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.config.plan import Objective
from autotune.policy import POLICY, WindowRules
from autotune.records.measurement import Block, Interval, Measurement, Window
from autotune.records.trial import Score

# Quantiles, and the interval of a throughput by batch means.
#
# Sources: batch means with t quantiles, Law, "Simulation Modeling and Analysis", 5th ed., section
# 9.5.3; the fixed number of about ten batches, Schmeiser 1982, "Batch size effects in the analysis
# of simulation output".


_Item = TypeVar("_Item")
Floats = NDArray[np.float64]
"""Arrays of the models; each use states the shape."""
BATCH_MEANS = 10
"""Batches that a series is cut into: ten keep 92 to 95 % coverage with autocorrelated steps."""
_AT_ONCE = 512
"""Items of a part; 512 configurations take 10 MB in a forecast with two hundred observations."""
NORMAL_95 = NormalDist().inv_cdf(0.975)
"""Two-sided 95 % quantile of the normal distribution."""


def t_95(degrees_of_freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t; infinite without a degree of freedom."""
    return t_quantile(0.975, degrees_of_freedom) if degrees_of_freedom > 0 else inf


@lru_cache(maxsize=1024)  # a report asks for the same few thousands of times
def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the quantile of Student's t; `degrees_of_freedom` must be positive."""
    # worker/rank imports it at a trial's start, so that no window waits for the import
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, probability))


def error_of_median(values: Sequence[float]) -> float:
    """Return a median's standard error for normal errors: 1.25 times that of a mean."""
    return 1.25 * stdev(values) / sqrt(len(values))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of paired ratios, with its 95 % interval by Student's t.

    Args:
        ratios: Positive ratios of two times, one a pair; at least one.

    Returns:
        The interval from 0 to infinity for a single pair.
    """
    logs = [log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) < 2:
        return Interval(value=exp(mean), low=0.0, high=inf)
    half = t_95(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return Interval(value=exp(mean), low=exp(mean - half), high=exp(mean + half))


def batch_means_half_width(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    """Return half of the 95 % interval of the throughput sum(amounts) / sum(seconds), by batch means.

    Adjacent blocks are joined into about ten batches, since steps are autocorrelated. Throughput is
    a ratio of sums, and its variance that of amount - rate * seconds: with a loader that pauses,
    the batches' own throughput varies by a factor of 100, and neither its mean nor its variance is
    meaningful.

    Source: Cochran, "Sampling Techniques", 3rd ed., section 6.4.

    Args:
        amounts: Samples of each block.
        seconds: Seconds of each block.

    Returns:
        Infinite with fewer than two blocks.
    """
    count = len(amounts)
    if count < 2:
        return inf
    batches = count if count < 2 * BATCH_MEANS else BATCH_MEANS
    edges = [round(index * count / batches) for index in range(batches + 1)]
    joined = [
        (sum(amounts[start:stop]), sum(seconds[start:stop])) for start, stop in pairwise(edges)
    ]
    elapsed = sum(seconds)
    rate = sum(amounts) / elapsed
    squares = sum((amount - rate * time) ** 2 for amount, time in joined)
    sd = sqrt(squares / (batches - 1))
    return t_95(batches - 1) * sd * sqrt(batches) / elapsed


def with_latest(items: Sequence[_Item], kept: Iterable[int], *, most: int) -> list[_Item]:
    """Return all items or, of many, those at some places and the latest, in their order.

    Args:
        items: The items.
        kept: Places of the items to keep in any case.
        most: Most items to return.
    """
    latest = reversed(range(len(items)))
    places = list(dict.fromkeys([*kept, *latest]))  # those to keep come first, none twice
    return [items[place] for place in sorted(places[:most])]


def in_parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield the items in parts, which bounds the memory of a computation over all of them."""
    for begin in range(0, len(items), _AT_ONCE):
        yield items[begin : begin + _AT_ONCE]


# The throughput of a window, with the interval by its own blocks.
#
# The stop rule of a window and the `Measurement` use the same `window_rate`. A single window does
# not show run-to-run variation: models.evidence adds it to the interval.


def mean_rate(blocks: Sequence[Block]) -> tuple[float, float]:
    """Return the throughput of blocks by batch means, in samples/s, and half of its 95 % interval.

    Not corrected for restarts or prefetched batches.
    """
    amounts = [float(block.samples) for block in blocks]
    seconds = [block.seconds for block in blocks]
    return sum(amounts) / sum(seconds), batch_means_half_width(amounts, seconds)


def window_rate(window: Window, rules: WindowRules = POLICY.window) -> Interval:
    """Return the throughput of a long run, from a window.

    With workers that count the samples that they make, see `_counted_rate`. Otherwise it is the
    mean throughput of the delivered samples, minus the surplus of ready batches at the first edge
    over those at the last, which were loaded before the clock started. The surplus counts only as
    far as the loop has starved, or the queue has fallen steadily from block to block. Otherwise
    these batches made nothing faster: workers fill the queue while the probes read at the first
    edge, and training then keeps it less full. The interval's upper end is that of the uncorrected
    throughput, since the truth lies between the two.

    Blocks of whole epochs contain their restarts; otherwise the cost of a restart beyond the
    samples that came with it is added once per `epoch_samples`.

    Args:
        window: The window.
        rules: Share of waiting from which the loader limits the loop.
    """
    if window.made:  # 0 if only the queue was used up
        steady, low, high = _counted_rate(window, rules)
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


def wait_fraction(window: Window, rules: WindowRules = POLICY.window) -> float:
    """Return the share of its time that the loop waits for data in the long run.

    While a queue is used up, the loop waits less than it will later: its own work takes the same
    time per sample, so at the lower throughput all other time is waiting.
    """
    waited = _waited_share(window)
    if not window.made:
        return waited
    steady, _, _ = _counted_rate(window, rules)
    return max(0.0, 1.0 - (1.0 - waited) * steady / window.raw_samples_per_s)


def _counted_rate(window: Window, rules: WindowRules) -> tuple[float, float, float]:
    """Return the steady throughput and both ends of its interval, from made and delivered samples.

    It is the lower of two values: the throughput at which workers make samples, and that of the
    loop if it never waited. A long queue hides a slow loader, even if the device always has work:
    an H200 took 3,628 images/s for 2 s out of a queue that fell from 55 batches to 43, and 2,820
    from then on. While it falls, a worker whose batches are all ready waits until one is taken: the
    made samples over the share of workers with work are what all would make, up to the delivered
    ones.

    Fewer samples are made than delivered by chance as well. So that counts only if the queue falls
    steadily, or as far as the loop has waited. If the two values differ by more than chance, and
    waiting does not decide between them, the interval contains both, and the made samples, which
    bound a long run from below.
    """
    # Delivered and made samples per second
    came, came_half = mean_rate(window.blocks)
    lengths = [block.seconds for block in window.blocks]
    amounts = [block.made or 0.0 for block in window.blocks]
    made = sum(amounts) / sum(lengths)
    made_half = batch_means_half_width(amounts, lengths)

    # What workers could make if all of them had work
    could = made
    could_half = made_half
    if made < came:
        could = made / max(_share_with_work(window), made / came)
        could_half = made_half * could / made if could < came else came_half

    # The loader is faster: the loop without its waits
    waited = min(
        _waited_share(window), 0.999
    )  # a loop that only waits has no throughput of its own
    differs = abs(could - came) > came_half + could_half
    if could >= came:
        value = min(could, came / (1.0 - waited))
        half = could_half if value == could else came_half
        low = min(value - half, came - came_half) if differs else value - half
        return value, max(low, 0.0), value + half

    # The loader is slower, but that may be chance: follow it as far as the loop has waited
    is_loader = waited >= rules.starving_share
    changes = [block.made - block.samples for block in window.blocks if block.made is not None]
    if not is_loader and not _falls(changes):
        value = max(could, came * (1.0 - waited))
        return value, max(value - came_half, 0.0), came + came_half

    # The loader limits the loop
    high = could + could_half
    if differs and not is_loader:
        high = max(high, came + came_half)
    return could, max(made - made_half, 0.0), high


def _share_with_work(window: Window) -> float:
    """Return the mean share of workers that were making a batch; 1 if unknown.

    torch assigns batches to its workers in turn, so the unfinished batches are spread evenly over
    them.
    """
    ready = [window.queue_at_start, *(block.ready_at_end for block in window.blocks)]
    known = [count for count in ready if count is not None]
    if window.workers == 0 or window.asked is None or len(known) < len(ready):
        return 1.0
    shares = [
        min(1.0, (window.asked - (before + after) / 2) / window.workers)
        for before, after in pairwise(known)
    ]
    seconds = [block.seconds for block in window.blocks]
    weighted = sum(share * time for share, time in zip(shares, seconds, strict=True))
    return max(0.0, weighted) / sum(seconds)


def _waited_share(window: Window) -> float:
    return min(1.0, window.starved_s / sum(block.seconds for block in window.blocks))


def _surplus_samples(window: Window) -> float:
    """Return the samples that came only because the queue was fuller at first than at the end."""
    if window.queue_at_start is None or window.queue_at_end is None or window.is_held_by_device:
        return 0.0
    batches = sum(block.batches for block in window.blocks)
    starved_batches = window.starved_s / window.batch_s
    surplus = min(
        window.queue_at_start - window.queue_at_end,
        batches - 1,
        max(starved_batches, _fallen(window.blocks)),
    )
    if surplus <= 0:
        return 0.0
    return surplus * sum(block.samples for block in window.blocks) / batches


def _fallen(blocks: Sequence[Block]) -> float:
    """Return the batches by which the queue has fallen over the blocks; 0 if that may be chance.

    A loader slightly slower than training empties a long queue only after the window, without any
    wait in it. The first block counts as the second: workers fill the queue while the probes read
    at the first edge.
    """
    ready = [block.ready_at_end for block in blocks if block.ready_at_end is not None]
    changes = [after - before for before, after in pairwise(ready)]
    if len(ready) < len(blocks) or not _falls(changes):
        return 0.0
    return ready[0] - ready[-1] - changes[0]


def _falls(changes: Sequence[float]) -> bool:
    """Return whether the mean change of a queue from block to block is below 0, by a t-test at 95 %."""
    if len(changes) < 2:
        return False
    return -fmean(changes) > t_95(len(changes) - 1) * stdev(changes) / sqrt(len(changes))


def _with_restarts(steady: float, window: Window) -> float:
    """Add the cost of epoch restarts to a steady throughput."""
    if window.whole_epochs or window.epoch_samples is None or not 0 < steady < inf:
        return steady
    costs = [
        restart.seconds - min(restart.samples, window.epoch_samples) / steady
        for restart in window.restarts
    ]
    restart_s = max(0.0, sum(costs) / len(costs)) if costs else window.expected_restart_s
    return 1.0 / (1.0 / steady + restart_s / window.epoch_samples)


# The score of a measurement.


def evaluate(
    measurement: Measurement,
    baseline: Measurement,
    objective: Objective,
    limit_bytes: int,
    least_excess: float = POLICY.memory.least_excess,
) -> Score:
    """Score a measurement against the baseline's.

    score = throughput / baseline throughput * (1 - w * (1 - busy_fraction)). Busy fractions of
    different sources are not comparable, and GPM or NVML may fail in a single trial: without the
    baseline's source, a measurement is scored with the baseline's fraction, as if it were as busy.

    Args:
        measurement: The measurement to score.
        baseline: The baseline's measurement.
        objective: Weight w of idle time.
        limit_bytes: Memory limit.
        least_excess: Assumed excess over the limit, as a share, of a run that thrashes.
    """
    busy = measurement.busy_by(baseline.busy_source)
    if busy is None:
        busy = baseline.busy_fraction
    idle = 0.0 if busy is None else 1.0 - busy
    speedup = measurement.samples_per_s / baseline.samples_per_s
    value = speedup * (1.0 - objective.busy_weight * idle)
    violation = measurement.peak_memory_bytes / limit_bytes - 1.0
    reason = memory_fault(measurement, limit_bytes)
    if reason is not None and violation <= 0:
        violation = least_excess
    return Score(value=value, feasible=reason is None, violation=violation, reason=reason or "")


def memory_fault(measurement: Measurement, limit_bytes: int) -> str | None:
    """Return the reason why a run does not fit into a memory limit, or None.

    A run that thrashes within the limit does not fit, see `MemorySample.is_thrashing`.
    """
    limit = _mib(limit_bytes)
    peak = _mib(measurement.peak_memory_bytes)
    to_come_bytes = measurement.memory.to_come_bytes
    if measurement.peak_memory_bytes > limit_bytes and to_come_bytes > 0:
        return (
            f"peak memory must stay within {limit}, but would reach {peak} by the end of the epoch: "
            f"loader workers still copy {_mib(to_come_bytes)} of the dataset's Python objects; keep "
            "those in NumPy arrays, or take fewer workers"
        )
    if measurement.peak_memory_bytes > limit_bytes:
        return f"peak memory must stay within {limit}, but was {peak}"
    if measurement.memory.is_thrashing:
        return (
            f"training must find room within {limit}, but at {peak} the allocator gave back what "
            f"it held, and asked again, {measurement.memory.alloc_retries} times in the window; "
            "take a smaller micro batch, or raise memory_limit"
        )
    return None


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
