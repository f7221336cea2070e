"""Ratios of pairs that were measured close in time: their geometric mean, its standard error and interval.

A machine's speed drifts for seconds and minutes; it changes both of a pair alike, so that it drops out of their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev

from autotune.models.statistics import t_95

__all__ = ["MeanRatio", "mean_ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRatio:
    """The ratio of some pairs."""

    pairs: int
    ratio: float
    """Geometric mean."""
    standard_error: float | None
    """Of the mean of the logarithms; None for a single pair."""
    low: float
    high: float
    """The 95 % interval by Student's t; of a single pair the ratio itself."""

    def is_one_within(self, share: float) -> bool | None:
        """Return True where the interval lies within 1 +- share, False where it lies outside, else None."""
        if self.standard_error is None:
            return None
        if self.low >= 1 - share and self.high <= 1 + share:
            return True
        return False if self.low > 1 + share or self.high < 1 - share else None


def mean_ratio(ratios: Sequence[float]) -> MeanRatio:
    """Average the ratios of pairs.

    Args:
        ratios: at least one, each above 0.
    """
    logs = [log(one) for one in ratios]
    mean = fmean(logs)
    error = stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else None
    half = 0.0 if error is None else t_95(len(logs) - 1) * error
    return MeanRatio(
        pairs=len(logs),
        ratio=exp(mean),
        standard_error=error,
        low=exp(mean - half),
        high=exp(mean + half),
    )
