"""The rate that a window shows, with the interval that its own blocks tell.

The stop rule of a window and the Measurement use the same `window_rate`. What runs differ by beyond that, no window can
show by itself: `run_spread` widens the interval. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev

from autotune.analysis.statistics import batch_means_half_width, t_95
from autotune.records.measurement import Block, Rate, Window

__all__ = ["mean_rate", "window_rate"]


def mean_rate(blocks: Sequence[Block]) -> tuple[float, float]:
    """The rate of some blocks by batch means, in samples per second, and half of its 95 % interval.

    It is not corrected for restarts and the edges of the queue.
    """
    amounts, seconds = [float(block.samples) for block in blocks], [block.seconds for block in blocks]
    return sum(amounts) / sum(seconds), batch_means_half_width(amounts, seconds)


def window_rate(window: Window) -> Rate:
    """Return the rate that a long run would have, from a window.

    It is the mean rate of what came, less the batches that lay ready at the first edge beyond those at the last, which
    were loaded before the clock started. These count only as far as the loop has starved, or as the queue has fallen
    steadily from block to block. Else they made nothing faster: workers fill the queue while the probes read at the
    first edge, and training then keeps it less full.

    Blocks of whole epochs hold their restarts; otherwise what a restart costs beyond the samples that came with it is
    added once per `epoch_samples`. The interval's upper end is that of the uncorrected rate, since the truth lies
    between the two.
    """
    mean, half = mean_rate(window.blocks)
    steady = mean - _surplus_samples(window) / sum(block.seconds for block in window.blocks)
    return Rate(
        value=_with_restarts(steady, window),
        low=_with_restarts(max(steady - half, 0.0), window),
        high=_with_restarts(mean + half, window),
    )


def _surplus_samples(window: Window) -> float:
    """Return the samples that would not have come in time had the queue been as full at first as it was at the end."""
    if window.queue_at_start is None or window.queue_at_end is None or window.is_held_by_device:
        return 0.0
    batches = sum(block.batches for block in window.blocks)
    starved_batches = window.starved_s / window.batch_s
    surplus = min(
        window.queue_at_start - window.queue_at_end, batches - 1, max(starved_batches, _fallen(window.blocks))
    )
    return surplus * sum(block.samples for block in window.blocks) / batches if surplus > 0 else 0.0


def _fallen(blocks: Sequence[Block]) -> float:
    """Return the batches by which the queue has fallen over some blocks: 0 where that may be chance.

    A loader that is a little slower than training empties a long queue only after the window, without any wait in it.
    The queue counts as falling where the mean of its changes from block to block is below 0 by a t-test at 95 %.
    """
    ready = [block.ready_at_end for block in blocks if block.ready_at_end is not None]
    changes = [after - before for before, after in pairwise(ready)]
    if len(ready) < len(blocks) or len(changes) < 2:
        return 0.0
    falls = -fmean(changes)
    return falls * len(blocks) if falls > t_95(len(changes) - 1) * stdev(changes) / sqrt(len(changes)) else 0.0


def _with_restarts(steady: float, window: Window) -> float:
    if window.whole_epochs or window.epoch_samples is None or not 0 < steady < inf:
        return steady
    costs = [restart.seconds - min(restart.samples, window.epoch_samples) / steady for restart in window.restarts]
    restart_s = max(0.0, sum(costs) / len(costs)) if costs else window.expected_restart_s
    return 1.0 / (1.0 / steady + restart_s / window.epoch_samples)
