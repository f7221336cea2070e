"""Shrink a measured gain as far as luck goes, since most changes bring little. Pure.

The prior of a gain is a mixture of normal distributions around none, from a narrow one to a very wide one: small gains
that the noise could make are shrunk to almost nothing, large ones hardly at all. Beliefs under such a prior need no
further correction for the choice of the best of several, nor for having looked at them several times.

Sources: spike and slab, George and McCulloch 1993, "Variable selection via Gibbs sampling"; shrinkage instead of a
correction for many comparisons, Gelman, Hill and Yajima 2012; mixtures fitted to many experiments of the same kind
(adaptive shrinkage), Stephens 2017, "False discovery rates: a new deal".
"""

from __future__ import annotations

from math import log1p

import numpy as np

from autotune.analysis.decisions.evidence import Contrast

__all__ = ["WORTHWHILE", "believe", "chance_worthwhile"]

WORTHWHILE = 0.02
"""A smaller gain of one configuration over another counts as none, and the simpler one is recommended: our own
convention."""
_SCALES = np.array((0.01, 0.03, 0.1, 0.4, 1.2))
"""Standard deviations of the logarithm of a gain, from nothing to a factor of ten. Source: winners of
benchmarks/default_search.py and of recorded GPU searches gain 1.1 to 22 times."""
_WEIGHTS = np.array((0.3, 0.2, 0.2, 0.15, 0.15))
"""How often changes of settings bring so much: our own convention. Source: benchmarks/decisions.py, where claims are
right in the mean."""


def believe(measured: Contrast) -> Contrast:
    """Return the posterior of a gain under the prior."""
    variances = measured.sds[:, None] ** 2
    total = variances + _SCALES**2
    log_weights = (
        np.log(np.maximum(measured.weights, 1e-300))[:, None]
        + np.log(_WEIGHTS)
        - 0.5 * np.log(total)
        - 0.5 * measured.means[:, None] ** 2 / total
    )
    weights = np.exp(log_weights - log_weights.max())
    return Contrast(
        (weights / weights.sum()).ravel(),
        (measured.means[:, None] * _SCALES**2 / total).ravel(),
        np.sqrt(_SCALES**2 * variances / total).ravel(),
    )


def chance_worthwhile(measured: Contrast) -> float:
    """Return how likely a gain is to be worth a change of settings."""
    return 1 - believe(measured).chance_below(log1p(WORTHWHILE))
