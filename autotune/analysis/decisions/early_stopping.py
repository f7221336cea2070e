"""Whether a trial under way can be stopped, since its rate can't come near the best so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from autotune.analysis.rates import mean_rate
from autotune.analysis.statistics import t_quantile
from autotune.messages.trials import stopped_early
from autotune.note import Note
from autotune.records.measurement import Block
from autotune.records.run_spread import RunSpread

__all__ = ["PruningThreshold", "behind_threshold", "luck_of"]

_FEWEST_BLOCKS = 3
"""Before a trial may be stopped: our own convention."""
_HOPELESS = 0.5
"""Share of the threshold below which a trial may be stopped in its warm-up: our own convention. A clock that rises with
the load, or a loader that is still starting, does not halve a rate for so long."""
_HOPELESS_BLOCKS = 2
_HOPELESS_S = 0.5
"""Fewest blocks, and seconds of them, for that: our own convention, ten times a block of the warm-up."""
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
    """Return why a trial can be stopped; None while it may still come near the threshold.

    Both corrections of the final rate, for restarts and for a queue that was filled before the window, only lower it.
    So an upper end below the threshold stays below it. Blocks of the warm-up count only where they are far below it:
    they have no interval, but prefetched batches made them faster, if anything.

    Args:
        blocks: Those so far, of the warm-up as well.
        bar: The threshold.
    """
    in_window = [block for block in blocks if not block.is_warm_up]
    if len(in_window) < _FEWEST_BLOCKS:
        return _stopped(blocks, 0.0, bar) if _is_hopeless(blocks, bar) else None
    rate, half_width = mean_rate(in_window)
    if (1 + _BUSY_MARGIN) * (rate + half_width) >= bar.low_samples_per_s:
        return None
    return _stopped(in_window, half_width, bar)


def _is_hopeless(blocks: Sequence[Block], bar: PruningThreshold) -> bool:
    """Return whether blocks are together below half of the threshold, and not for a single pause.

    Each came, or was made, at less than the threshold: a pause leaves the others as fast as they are.
    """
    if len(blocks) < _HOPELESS_BLOCKS or sum(block.seconds for block in blocks) < _HOPELESS_S:
        return False
    slowest = [min(block.samples, block.samples if block.made is None else block.made) for block in blocks]
    is_alike = all(
        samples < bar.low_samples_per_s * block.seconds for samples, block in zip(slowest, blocks, strict=True)
    )
    return is_alike and mean_rate(blocks)[0] < _HOPELESS * bar.low_samples_per_s


def _stopped(blocks: Sequence[Block], half_width: float, bar: PruningThreshold) -> Note:
    return stopped_early(mean_rate(blocks)[0], half_width, bar.number, bar.low_samples_per_s)
