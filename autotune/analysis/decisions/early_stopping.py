"""Whether a trial under way can be stopped, since its rate can't come near the best so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from autotune.analysis.rates import mean_rate
from autotune.analysis.statistics import t_quantile
from autotune.note import Note, note
from autotune.records.measurement import Block
from autotune.records.run_spread import RunSpread

__all__ = ["PruningThreshold", "behind_threshold", "luck_of"]

_FEWEST_BLOCKS = 3
"""Before a trial may be stopped: our own convention."""
_LUCKY_SDS = 1.64
"""Standard deviations of a difference that one in twenty exceeds: a trial as fast as the best is rarely stopped."""
_NOT_LUCKY = 0.95
"""The same as a quantile of Student's t, where hosts of accelerators differ by a spread that is little known."""
_BUSY_MARGIN = 0.02
"""By how much a busier device may raise a score: the default of objective.busy_weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningThreshold:
    """A pruning threshold: the rate that a trial has to come near to go on."""

    number: int
    """The trial that sets it."""
    low_samples_per_s: float
    """What is believed of that trial's rate, less what two runs of the same settings may differ by."""


def luck_of(best: RunSpread, running: RunSpread) -> float:
    """Return what the logarithms of two rates may differ by though the settings are the same.

    Hosts of accelerators differ more than CPUs do, so that there it counts how little is known of the spread.

    Args:
        best: The spread of runs of the kind that the best trial is of.
        running: That of the trial under way, the host's.
    """
    lucky_sds = _LUCKY_SDS if running.device is None else t_quantile(_NOT_LUCKY, running.degrees_of_freedom)
    return lucky_sds * hypot(best.sd, running.sd)


def behind_threshold(blocks: Sequence[Block], bar: PruningThreshold) -> Note | None:
    """Why a trial can be stopped; None while it may still come near the threshold.

    Both corrections of the final rate, for restarts and for a queue that was filled before the window, only lower it.
    So an upper end below the threshold stays below it.
    """
    if len(blocks) < _FEWEST_BLOCKS:
        return None
    rate, half_width = mean_rate(blocks)
    if (1 + _BUSY_MARGIN) * (rate + half_width) >= bar.low_samples_per_s:
        return None
    threshold = {"threshold_number": bar.number, "threshold_samples_per_s": bar.low_samples_per_s}
    return note("stopped_early", samples_per_s=rate, half_width=half_width, **threshold)
