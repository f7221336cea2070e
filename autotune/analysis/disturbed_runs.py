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
_LEAST_FACTOR = 1.3
"""Times that the others must be as fast at the least: our own convention, since of three runs the deviations tell
little. Runs of the same settings differ by 1 to 20 %."""
_SD_OF_MAD = 1.4826
"""Standard deviation of a normal law over its median absolute deviation."""


def outliers_of(log_rates: Sequence[float]) -> frozenset[int]:
    """Return the places of the runs that other processes disturbed, to judge by their rates alone.

    Such a rate lies more than four robust standard deviations and a factor of 1.3 below the other runs of its
    configuration, of which at least two agree within that factor.

    Args:
        log_rates: Of all runs of one configuration.
    """
    slow = set[int]()
    for place, own in enumerate(log_rates):
        others = sorted([*log_rates[:place], *log_rates[place + 1 :]])
        if not any(upper - lower <= log(_LEAST_FACTOR) for lower, upper in pairwise(others)):
            continue
        middle = median(others)
        sd = _SD_OF_MAD * median(abs(other - middle) for other in others)
        if middle - own > max(_MOST_SDS * sd, log(_LEAST_FACTOR)):
            slow.add(place)
    return frozenset(slow)
