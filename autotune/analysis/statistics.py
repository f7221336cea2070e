"""Quantiles, and the interval of a rate by batch means. Pure functions over numbers; no measuring here.

Sources: batch means with t quantiles, Law, "Simulation Modeling and Analysis", 5th ed., section 9.5.3; the fixed
number of about ten batches, Schmeiser 1982, "Batch size effects in the analysis of simulation output".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BATCH_MEANS",
    "NORMAL_95",
    "Floats",
    "batch_means_half_width",
    "t_95",
    "t_quantile",
]

Floats = NDArray[np.float64]
"""The arrays that models calculate with; each use states the shape."""
BATCH_MEANS = 10
"""Batches that a series is cut into: ten keep 92 to 95 % coverage where steps are autocorrelated."""
NORMAL_95 = NormalDist().inv_cdf(0.975)
"""Two-sided 95 % quantile of the normal distribution."""


def t_95(degrees_of_freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t; infinite without a degree of freedom."""
    return t_quantile(0.975, degrees_of_freedom) if degrees_of_freedom > 0 else inf


@lru_cache(maxsize=1024)  # a report asks for the same few thousands of times
def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """The value of Student's t, of more than no degrees of freedom, that this share stays below."""
    from scipy.special import stdtrit  # a trial has it at its start, by worker/rank: its window can't wait for imports

    return float(stdtrit(degrees_of_freedom, probability))


def batch_means_half_width(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    """Half of the 95 % interval of the rate sum(amounts) / sum(seconds), by batch means.

    Neighbouring blocks are joined into about ten batches, since steps are correlated with their neighbours. The rate is
    a ratio of sums, and its variance that of amount - rate * seconds: where a loader pauses, batches' own rates differ
    by a hundred times, and neither their mean nor their spread says much of the rate. Infinite for fewer than two
    blocks.

    Source: Cochran, "Sampling Techniques", 3rd ed., section 6.4.
    """
    batches = _joined(amounts, seconds)
    if len(batches) < 2:
        return inf
    elapsed = sum(time for _, time in batches)
    rate = sum(amount for amount, _ in batches) / elapsed
    spread = sqrt(sum((amount - rate * time) ** 2 for amount, time in batches) / (len(batches) - 1))
    return t_95(len(batches) - 1) * spread * sqrt(len(batches)) / elapsed


def _joined(amounts: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    count = len(amounts)
    batches = count if count < 2 * BATCH_MEANS else BATCH_MEANS
    edges = [round(index * count / batches) for index in range(batches + 1)] if batches else []
    return [(sum(amounts[start:stop]), sum(seconds[start:stop])) for start, stop in pairwise(edges)]
