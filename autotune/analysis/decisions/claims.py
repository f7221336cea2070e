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
from autotune.policy import POLICY, Proof

__all__ = ["believe", "chance_worthwhile"]


def believe(measured: Contrast, proof: Proof = POLICY.proof) -> Contrast:
    """Return the posterior of a gain under the prior."""
    scales = np.array(proof.gain_sds)
    variances = measured.sds[:, None] ** 2
    total = variances + scales**2
    log_weights = (
        np.log(np.maximum(measured.weights, 1e-300))[:, None]
        + np.log(proof.gain_weights)
        - 0.5 * np.log(total)
        - 0.5 * measured.means[:, None] ** 2 / total
    )
    weights = np.exp(log_weights - log_weights.max())
    return Contrast(
        (weights / weights.sum()).ravel(),
        (measured.means[:, None] * scales**2 / total).ravel(),
        np.sqrt(scales**2 * variances / total).ravel(),
    )


def chance_worthwhile(measured: Contrast, proof: Proof = POLICY.proof) -> float:
    """Return how likely a gain is to be worth a change of settings."""
    return 1 - believe(measured, proof).chance_below(log1p(proof.worthwhile))
