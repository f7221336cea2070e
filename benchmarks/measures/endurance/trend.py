"""A line through what was noted again and again: its slope with an interval, robust against steps and single values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measures.part_guard import Figures

__all__ = ["Trend", "trend_of"]

_WARM_UP_SHARE = 0.25  # what is held once has come by then: our own convention
_MOST_POINTS = 500  # the slope looks at every pair of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a figure changes from one note to the next."""

    slope: float
    """Median of the slopes between all pairs of notes."""
    low: float
    high: float
    """Its 95 % interval."""
    grown: float
    """Median of the last quarter of the notes, less that of the quarter after the warm-up."""

    def figures(self) -> Figures:
        """For the file of results."""
        return {"slope": self.slope, "low": self.low, "high": self.high, "grown": self.grown}


def trend_of(values: Sequence[float]) -> Trend:
    """The trend of notes in a row, the first quarter left out.

    Source: Sen 1968, "Estimates of the regression coefficient based on Kendall's tau"; it needs no normal errors, and
    allocators grow in steps.
    """
    from scipy.stats import theilslopes

    kept = list(values[int(len(values) * _WARM_UP_SHARE) :])
    if len(kept) < 4:
        raise ValueError(f"a trend needs at least six notes, but got {len(values)}")
    stride = -(-len(kept) // _MOST_POINTS)
    places = range(0, len(kept), stride)
    found = theilslopes([kept[place] for place in places], [*places], alpha=0.95)
    third = max(1, len(kept) // 3)
    return Trend(
        slope=float(found.slope),
        low=float(found.low_slope),
        high=float(found.high_slope),
        grown=float(median(kept[-third:]) - median(kept[:third])),
    )
