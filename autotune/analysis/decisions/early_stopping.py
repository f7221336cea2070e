"""Whether a trial under way can be stopped, since its rate can't come near the best so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.analysis.rates import mean_rate
from autotune.note import Note, note
from autotune.records.measurement import Block

__all__ = ["PruningThreshold", "behind_threshold"]

_FEWEST_BLOCKS = 3
"""Before a trial may be stopped: our own convention."""
_BUSY_MARGIN = 0.02
"""By how much a busier device may raise a score: the default of objective.busy_weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningThreshold:
    """A pruning threshold: the rate that a trial has to come near to go on."""

    number: int
    """The trial that sets it."""
    low_samples_per_s: float
    """What is believed of that trial's rate, less what two runs of the same settings may differ by."""


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
