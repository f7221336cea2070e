"""Runs of one configuration that other processes slowed down.

Comes in: the runs of a configuration. Goes out: which of them say little about it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log
from statistics import median

__all__ = ["outliers_of"]

_MOST_SDS = 4.0
"""Robust standard deviations below the other runs: our own convention; of normal runs one in 30,000 lies there."""
_LEAST_FACTOR = 1.8
"""Times that the others must be as fast at the least. Where runs differ by 20 %, that is three standard deviations:
with less, runs that were merely unlucky would be left out, and what is left would look faster than it is
(benchmarks/decisions.py)."""
_AGREEING_FACTOR = 1.3
"""Within which two of the others agree: our own convention; runs of the same settings differ by 1 to 20 %."""
_SD_OF_MAD = 1.4826
"""Standard deviation of a normal law over its median absolute deviation."""


def outliers_of(log_rates: Sequence[float]) -> frozenset[int]:
    """Return the places of the runs that other processes disturbed, to judge by their rates alone.

    Such a rate lies more than four robust standard deviations and a factor of 1.8 below the other runs of its
    configuration, of which at least two agree within a factor of 1.3.

    Args:
        log_rates: Of all runs of one configuration.
    """
    slow = set[int]()
    for place, own in enumerate(log_rates):
        others = sorted([*log_rates[:place], *log_rates[place + 1 :]])
        if not any(upper - lower <= log(_AGREEING_FACTOR) for lower, upper in pairwise(others)):
            continue
        middle = median(others)
        sd = _SD_OF_MAD * median(abs(other - middle) for other in others)
        if middle - own > max(_MOST_SDS * sd, log(_LEAST_FACTOR)):
            slow.add(place)
    return frozenset(slow)
