"""The most likely state of Gaussian processes that are observed through a nonlinear function.

Comes in: a Problem, with the observations and factors of the processes' prior covariances. Goes out: a Posterior, from
which the state at any other place follows, with its uncertainty. Pure.

The state that maximises the posterior density minimises squared residuals: those of the observations over their noise,
and the whitened state itself. Gauss and Newton's steps find it, each halved until it helps; with a penalty on each
unknown a step takes a factorisation only as large as there are observations (an iterated Kalman update).

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 3.4 (Laplace's approximation);
Bell and Cathey 1993, "The iterated Kalman filter update as a Gauss-Newton method".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.statistics import Floats

__all__ = ["Factor", "Posterior", "Problem", "factor_of", "most_likely"]

_Residuals = Callable[[Floats], tuple[Floats, Callable[[], Floats]]]
"""From unknowns, (unknowns,), to residuals, (observations,), and to a call for their derivatives there, (observations,
unknowns), which not every point needs."""
_LEAST_EIGENVALUE = 1e-6
"""Share of the largest one below which a direction is left out: its standard deviation is a thousandth, less than any
measurement resolves. Our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A matrix F with few columns so that F F' has the covariances of processes as diagonal blocks.

    Its columns are orthogonal to each other; each has entries for one process alone.
    """

    columns: Floats
    """Of each column the entries that are not 0, (places, coordinates)."""
    process: NDArray[np.intp]
    """Of each column, the number of its process, rising: every one has a column."""

    def of_states(self, coordinates: Floats) -> Floats:
        """F times what independent coordinates are, (processes, places)."""
        starts = np.searchsorted(self.process, np.arange(self.process[-1] + 1))
        return np.asarray(np.add.reduceat(self.columns * coordinates, starts, axis=1).T, dtype=np.float64)

    def weighted(self, slopes: Floats) -> Floats:
        """Derivatives by the states, (processes, places), as those by the coordinates, (places, coordinates)."""
        return np.asarray(slopes[self.process].T * self.columns, dtype=np.float64)

    @property
    def squares(self) -> Floats:
        """Of each column's length."""
        return np.asarray(np.square(self.columns).sum(axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Observations of processes, (observations,) each."""

    observed: Floats
    variances: Floats
    """Of the observations' noise."""
    prior_mean: Floats
    """Of the processes at the observations' places, (processes, observations)."""
    factor: Factor
    """Of the processes' covariances there, see `factor_of`."""
    expect: Callable[[Floats], tuple[Floats, Callable[[], Floats]]]
    """From a state, (processes, observations), to the expected observations, (observations,), and to a call for their
    derivatives by the state, (processes, observations)."""


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


def factor_of(covariances: Floats) -> Factor:
    """The factor of some processes' covariances, (processes, places, places)."""
    values, vectors = np.linalg.eigh(covariances)
    process, kept = np.nonzero(values > _LEAST_EIGENVALUE * values[:, -1:])
    scaled = vectors * np.sqrt(np.maximum(values, 0.0))[:, None]
    return Factor(columns=np.ascontiguousarray(scaled[process, :, kept].T), process=process)


def most_likely(problem: Problem, start: Posterior | None = None, *, begin: Floats | None = None) -> Posterior:
    """The state that explains the observations best.

    Args:
        problem: what was observed.
        start: the posterior of the same problem with another noise, from which fewer steps are needed.
        begin: a state, (processes, observations), near which the best one may lie as well; the prior mean where neither
            is given.
    """
    factor, sd = problem.factor, np.sqrt(problem.variances)

    def state(whitened: Floats) -> Floats:
        return problem.prior_mean + factor.of_states(whitened)

    def residuals(whitened: Floats) -> tuple[Floats, Callable[[], Floats]]:
        expected, slopes = problem.expect(state(whitened))
        return (expected - problem.observed) / sd, lambda: factor.weighted(slopes()) / sd[:, None]

    begun = _coordinates(problem, begin) if start is None else start.whitened
    whitened = _minimum(residuals, begun)
    expected, slopes = problem.expect(state(whitened))
    jacobian = slopes()
    around = factor.weighted(jacobian)
    cholesky = np.asarray(np.linalg.cholesky(around @ around.T + np.diag(problem.variances)), dtype=np.float64)
    misfit = np.square((expected - problem.observed) / sd).sum() + np.square(whitened).sum()
    return Posterior(
        whitened=whitened,
        weights=factor.of_states(whitened / factor.squares),
        jacobian=jacobian,
        cholesky=cholesky,
        log_evidence=-0.5 * float(misfit) - float(np.log(np.diag(cholesky)).sum()),
    )


def _minimum(residuals: _Residuals, start: Floats) -> Floats:
    """Return where the sum of squared residuals and squared unknowns is least, near the start."""
    here, (apart, slopes_of) = start, residuals(start)
    squares = apart @ apart + here @ here
    for _ in range(100):
        slopes = slopes_of()
        inner = slopes @ slopes.T + np.eye(len(apart))
        step = slopes.T @ np.linalg.solve(inner, slopes @ here - apart) - here
        before, share = squares, 1.0
        while share >= 1e-3:
            there = here + share * step
            apart_there, slopes_there = residuals(there)
            squares_there = apart_there @ apart_there + there @ there
            if squares_there < squares:
                here, apart, slopes_of, squares = there, apart_there, slopes_there, squares_there
                break
            share /= 2
        if squares >= (1 - 1e-4) * before:
            break
    return here


def _coordinates(problem: Problem, begin: Floats | None) -> Floats:
    """Of a state; of the prior mean where there is none."""
    factor = problem.factor
    if begin is None:
        return np.zeros(len(factor.process))
    along = factor.weighted(begin - problem.prior_mean).sum(axis=0)
    return np.asarray(along / factor.squares, dtype=np.float64)
