"""The rate that a window shows, and the interval in which another run of the same settings would lie.

The stop rule of a window and the Measurement use the same `window_rate`. Its interval comes from batch means;
`with_run_spread` joins it with the usual spread between runs, which no window can show by itself. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf

from autotune.analysis.statistics import NORMAL_95, batch_means_half_width
from autotune.records.measurement import Block, Rate, Window
from autotune.settings.environment import DeviceKind

__all__ = ["RUN_SPREAD", "mean_rate", "window_rate", "with_run_spread"]

RUN_SPREAD: dict[DeviceKind, float] = {"cpu": 0.015}
"""Relative standard deviation between runs of the same settings. Source: benchmarks/fidelity.py, whose plain runs lay
3.6 and 1.9 % apart in two settings of four and three (a range of that many values is about twice their deviation)."""
_OTHER_RUN_SPREAD = 0.005
"""On an accelerator: our convention until benchmarks/gpu.py has measured it."""


def mean_rate(blocks: Sequence[Block]) -> tuple[float, float]:
    """The rate of some blocks by batch means, in samples per second, and half of its 95 % interval.

    It is not corrected for restarts and the edges of the queue.
    """
    amounts, seconds = [float(block.samples) for block in blocks], [block.seconds for block in blocks]
    return sum(amounts) / sum(seconds), batch_means_half_width(amounts, seconds)


def window_rate(window: Window) -> Rate:
    """The rate that a long run would have, from a window.

    Mean rate of what came, less the batches that lay ready at the first edge beyond those at the last: they were
    loaded before the clock started. Blocks of whole epochs hold their restarts; otherwise what a restart costs beyond
    the samples that came with it is added once per `epoch_samples`. The interval's upper end is that of the uncorrected
    rate, since the truth lies between the two.
    """
    mean, half = mean_rate(window.blocks)
    steady = mean - _surplus_samples(window) / sum(block.seconds for block in window.blocks)
    return Rate(
        value=_with_restarts(steady, window),
        low=_with_restarts(max(steady - half, 0.0), window),
        high=_with_restarts(mean + half, window),
    )


def with_run_spread(rate: Rate, device_kind: DeviceKind) -> Rate:
    """The same rate with the interval that another run of the same settings keeps to, not this window alone.

    Blocks of one window share what a process happens to get: its memory's layout, the clock, the neighbours of the
    minute. Runs of the same settings therefore spread more than batch means can tell; that spread is joined to the
    window's own half-widths in quadrature.
    """
    run = NORMAL_95 * RUN_SPREAD.get(device_kind, _OTHER_RUN_SPREAD) * rate.value
    return Rate(
        value=rate.value,
        low=max(0.0, rate.value - hypot(rate.value - rate.low, run)),
        high=rate.value + hypot(rate.high - rate.value, run),
    )


def _surplus_samples(window: Window) -> float:
    if window.queue_at_start is None or window.queue_at_end is None:
        return 0.0
    batches = sum(block.batches for block in window.blocks)
    surplus = min(window.queue_at_start - window.queue_at_end, batches - 1)
    return surplus * sum(block.samples for block in window.blocks) / batches if surplus > 0 else 0.0


def _with_restarts(steady: float, window: Window) -> float:
    if window.whole_epochs or window.epoch_samples is None or not 0 < steady < inf:
        return steady
    costs = [restart.seconds - min(restart.samples, window.epoch_samples) / steady for restart in window.restarts]
    restart_s = max(0.0, sum(costs) / len(costs)) if costs else window.expected_restart_s
    return 1.0 / (1.0 / steady + restart_s / window.epoch_samples)
