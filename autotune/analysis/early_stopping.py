"""Whether a trial that is under way may be stopped: its rate can't come near what others have reached. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.analysis.statistics import batch_means_half_width
from autotune.records.measurement import Block

__all__ = ["Bar", "SeenRate", "lost_race", "seen_rate"]

_FEWEST_BLOCKS = 3
_MARGIN = 0.03  # what differs between runs of the same settings, and what a busier device may add to a score


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a trial has to come near to go on."""

    number: int
    """The trial that has set it."""
    low_samples_per_s: float
    """The lower end of its rate's interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRate:
    """The rate in the blocks so far, and half of its 95 % interval, in samples per second."""

    samples_per_s: float
    half_width: float


def seen_rate(blocks: Sequence[Block]) -> SeenRate:
    """The rate of some blocks by batch means, epochs' restarts and edges of the queue left out."""
    amounts, seconds = [float(block.samples) for block in blocks], [block.seconds for block in blocks]
    return SeenRate(samples_per_s=sum(amounts) / sum(seconds), half_width=batch_means_half_width(amounts, seconds))


def lost_race(blocks: Sequence[Block], bar: Bar) -> str | None:
    """Why a trial need not go on, in a sentence; None while it may still come near the bar.

    A restart and a queue that was filled ahead only lower the final rate, so that an upper end below the bar stays
    there.
    """
    if len(blocks) < _FEWEST_BLOCKS:
        return None
    seen = seen_rate(blocks)
    if (1 + _MARGIN) * (seen.samples_per_s + seen.half_width) >= bar.low_samples_per_s:
        return None
    return (
        f"stopped early: {seen.samples_per_s:,.0f} ± {seen.half_width:,.0f} samples/s lie under trial {bar.number}'s, "
        f"at least {bar.low_samples_per_s:,.0f}"
    )
