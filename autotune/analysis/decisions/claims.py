"""What to believe of a gain that was measured: shrunk, since most changes bring little and the best looks best by luck.

Comes in: the logarithm of a ratio with its standard error. Goes out: a Belief. Pure.

The prior of a gain is a mixture of normal distributions around none, from a narrow one to a wide one: small gains that
the noise could make are shrunk to almost nothing, large ones hardly at all. Beliefs under such a prior need no further
correction for the choice of the best of several, nor for having looked at them several times.

Sources: spike and slab, George and McCulloch 1993, "Variable selection via Gibbs sampling"; shrinkage instead of a
correction for many comparisons, Gelman, Hill and Yajima 2012; mixtures fitted to many experiments of the same kind
(adaptive shrinkage), Stephens 2017, "False discovery rates: a new deal".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p

import numpy as np

from autotune.analysis.decisions.rounds import Difference

__all__ = ["WORTHWHILE", "Belief", "believe"]

WORTHWHILE = 0.02
"""What is believed to win less over another counts as equal to it, and the simpler one is recommended: our own
convention."""
_SCALES = np.array((0.01, 0.03, 0.1, 0.4))
"""Standard deviations of the logarithm of a gain, from nothing to a factor: our own convention."""
_WEIGHTS = np.array((0.4, 0.3, 0.2, 0.1))
"""How often changes of settings bring so much: our own convention. Source: benchmarks/decisions.py, where the claims of
searches that say "faster" are right in the mean, from 3 to 50 %."""
_FEWEST_DEGREES = 2.5
"""Of freedom; with two or fewer Student's t has no variance. What is assumed of a machine counts as three."""
_LEAST_VARIANCE = 1e-12  # keeps a division finite


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of the logarithm of a ratio of rates."""

    mean: float
    gain_probability: float
    """That the ratio is above 1."""
    worthwhile_probability: float
    """That it is above 1 + WORTHWHILE."""


def believe(measured: Difference) -> Belief:
    """The posterior mean of a gain, and how likely it is to be one, or one that is worth a change.

    The standard error, known by so many degrees of freedom, counts as a normal one of Student's variance.
    """
    from scipy.special import ndtr

    freedom = max(measured.degrees_of_freedom, _FEWEST_DEGREES)
    noise = freedom / (freedom - 2) * measured.standard_error**2 + _LEAST_VARIANCE
    prior = _SCALES**2
    total = prior + noise
    log_weights = np.log(_WEIGHTS) - 0.5 * np.log(total) - 0.5 * measured.value**2 / total
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    means, variances = measured.value * prior / total, prior * noise / total
    gain, worthwhile = (
        float(weights @ ndtr((means - least) / np.sqrt(variances))) for least in (0.0, log1p(WORTHWHILE))
    )
    return Belief(
        mean=float(weights @ means),
        gain_probability=gain,
        worthwhile_probability=worthwhile,
    )
