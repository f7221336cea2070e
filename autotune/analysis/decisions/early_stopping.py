"""Whether a trial under way can be stopped, since its rate can't come near the best so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from autotune.analysis.rates import mean_rate
from autotune.analysis.statistics import t_quantile
from autotune.messages.trials import stopped_early
from autotune.note import Note
from autotune.policy import POLICY, Stopping
from autotune.records.measurement import Block
from autotune.records.run_spread import RunSpread

__all__ = ["PruningThreshold", "behind_threshold", "luck_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningThreshold:
    """A pruning threshold: the rate that a trial has to come near to go on."""

    number: int
    """The trial that sets it."""
    low_samples_per_s: float
    """What is believed of that trial's rate, less what two runs of the same settings may differ by."""


def luck_of(best: RunSpread, running: RunSpread, stopping: Stopping = POLICY.stopping) -> float:
    """Return what the logarithms of two rates may differ by though the settings are the same.

    Hosts of accelerators differ more than CPUs do, so that there it counts how little is known of the spread.

    Args:
        best: The spread of runs of the kind that the best trial is of.
        running: That of the trial under way, the host's.
        stopping: The numbers of the search.
    """
    lucky_sds = (
        stopping.lucky_sds if running.device is None else t_quantile(stopping.not_lucky, running.degrees_of_freedom)
    )
    return lucky_sds * hypot(best.sd, running.sd)


def behind_threshold(
    blocks: Sequence[Block], bar: PruningThreshold, stopping: Stopping = POLICY.stopping
) -> Note | None:
    """Return why a trial can be stopped; None while it may still come near the threshold.

    Both corrections of the final rate, for restarts and for a queue that was filled before the window, only lower it.
    So an upper end below the threshold stays below it. Blocks of the warm-up count only where they are far below it:
    they have no interval, but prefetched batches made them faster, if anything.

    Args:
        blocks: Those so far, of the warm-up as well.
        bar: The threshold.
        stopping: The numbers of the search.
    """
    in_window = [block for block in blocks if not block.is_warm_up]
    if len(in_window) < stopping.fewest_blocks:
        return _stopped(blocks, 0.0, bar) if _is_hopeless(blocks, bar, stopping) else None
    rate, half_width = mean_rate(in_window)
    if (1 + stopping.busy_margin) * (rate + half_width) >= bar.low_samples_per_s:
        return None
    return _stopped(in_window, half_width, bar)


def _is_hopeless(blocks: Sequence[Block], bar: PruningThreshold, stopping: Stopping) -> bool:
    """Return whether blocks are together below half of the threshold, and not for a single pause.

    Each came, or was made, at less than the threshold: a pause leaves the others as fast as they are.
    """
    if len(blocks) < stopping.hopeless_blocks or sum(block.seconds for block in blocks) < stopping.hopeless_s:
        return False
    slowest = [min(block.samples, block.samples if block.made is None else block.made) for block in blocks]
    is_alike = all(
        samples < bar.low_samples_per_s * block.seconds for samples, block in zip(slowest, blocks, strict=True)
    )
    return is_alike and mean_rate(blocks)[0] < stopping.hopeless * bar.low_samples_per_s


def _stopped(blocks: Sequence[Block], half_width: float, bar: PruningThreshold) -> Note:
    return stopped_early(mean_rate(blocks)[0], half_width, bar.number, bar.low_samples_per_s)
