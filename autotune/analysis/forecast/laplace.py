"""The most likely state of Gaussian processes that are observed through a nonlinear function.

Comes in: a Problem, with the observations and factors of the processes' prior covariances. Goes out: a Posterior, from
which the state at any other place follows, with its uncertainty. Pure.

The state that maximises the posterior density minimises squared residuals: those of the observations over their noise,
and the whitened state itself. That is a nonlinear least-squares problem, which Levenberg and Marquardt's method solves.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 3.4 (Laplace's approximation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autotune.analysis.statistics import Floats

__all__ = ["Posterior", "Problem", "factor_of", "most_likely"]

_TOLERANCE = 1e-4
"""Relative gain of the objective, and relative step, below which the fit ends. Our own convention: with a hundredth of
it no forecast on the surfaces of benchmarks/regret.py differs by more than 0.3 %."""
_LEAST_EIGENVALUE = 1e-6
"""Share of the largest one below which a direction is left out: its standard deviation is a thousandth, less than any
measurement resolves. Our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Observations of processes, (observations,) each."""

    observed: Floats
    variances: Floats
    """Of the observations' noise."""
    prior_mean: Floats
    """Of the processes at the observations' places, (processes, observations)."""
    factor: Floats
    """Of the processes' covariances there, see `factor_of`."""
    expect: Callable[[Floats], Floats]
    """From a state, (processes, observations), to the expected observations, (observations,)."""
    jacobian: Callable[[Floats], Floats]
    """From a state to the derivatives of the expected observations by it, (processes, observations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """The most likely state, around which the function is taken to be linear."""

    whitened: Floats
    """The state less its prior mean, in independent standard normal coordinates, (coordinates,)."""
    weights: Floats
    """(processes, observations): the state at any place is its prior mean there plus its covariance with the
    observations' places times these."""
    jacobian: Floats
    """At the most likely state, (processes, observations)."""
    cholesky: Floats
    """Of the observations' covariance, noise included, (observations, observations)."""
    log_evidence: float
    """Logarithm of the observations' probability, but for a constant: compares one noise with another."""


def factor_of(covariances: Floats) -> Floats:
    """A matrix F with few columns so that F F' has the covariances, (processes, places, places), as diagonal blocks.

    Its columns are orthogonal to each other, (processes * places, coordinates).
    """
    from scipy.linalg import block_diag

    values, vectors = np.linalg.eigh(covariances)
    kept = values > _LEAST_EIGENVALUE * values[:, -1:]
    scaled = vectors * np.sqrt(np.maximum(values, 0.0))[:, None]
    return np.asarray(block_diag(*(part[:, keep] for part, keep in zip(scaled, kept, strict=True))), dtype=np.float64)


def most_likely(problem: Problem, start: Posterior | None = None, *, begin: Floats | None = None) -> Posterior:
    """The state that explains the observations best.

    Args:
        problem: what was observed.
        start: the posterior of the same problem with another noise, from which fewer steps are needed.
        begin: a state, (processes, observations), near which the best one may lie as well; the prior mean where neither
            is given.
    """
    from scipy.optimize import least_squares  # takes longer to import than a fit does, and no trial needs it

    factor, sd, shape = problem.factor, np.sqrt(problem.variances), problem.prior_mean.shape
    away = np.zeros(shape) if begin is None else begin - problem.prior_mean
    begun = factor.T @ away.ravel() / np.square(factor).sum(axis=0)

    def state(whitened: Floats) -> Floats:
        return problem.prior_mean + (factor @ whitened).reshape(shape)

    def slopes(whitened: Floats) -> Floats:
        scaled = problem.jacobian(state(whitened)).reshape(-1, 1) * factor
        return np.asarray(scaled.reshape(*shape, -1).sum(axis=0), dtype=np.float64)

    fit = least_squares(
        lambda whitened: np.concatenate([(problem.expect(state(whitened)) - problem.observed) / sd, whitened]),
        begun if start is None else start.whitened,
        lambda whitened: np.vstack([slopes(whitened) / sd[:, None], np.eye(whitened.size)]),
        method="lm",
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
    )
    around = slopes(fit.x)
    cholesky = np.asarray(np.linalg.cholesky(around @ around.T + np.diag(problem.variances)), dtype=np.float64)
    return Posterior(
        whitened=fit.x,
        weights=(factor / np.square(factor).sum(axis=0) @ fit.x).reshape(shape),
        jacobian=problem.jacobian(state(fit.x)),
        cholesky=cholesky,
        log_evidence=-float(fit.cost) - float(np.log(np.diag(cholesky)).sum()),
    )
