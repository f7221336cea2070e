"""The most likely state of Gaussian processes that are seen through a function which is not linear. Pure.

Comes in: a Problem, with the processes' covariances at the places of what was seen. Goes out: a Solution, from which
the state anywhere follows, and what is known of it.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 3.4 (Laplace's approximation);
steps by Gauss and Newton, damped until they better the fit: Levenberg and Marquardt's method, Nocedal and Wright 2006,
"Numerical Optimization", 10.3, with the processes' own prior as the metric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autotune.analysis.floats import Floats

__all__ = ["Problem", "Solution", "most_likely"]

_STEPS = 60
_TRIES = 12
_DAMPING = 4.0
"""Factor by which a step is damped more where it worsens the fit, and less where it betters it."""
_LEAST_DAMPING, _LITTLE_DAMPING = 0.05, 1.0
_SETTLED = 1e-4
"""A step with little damping that betters the misfit by less is the last: the state is hardly more probable for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What was seen of processes, (seen,) each, and how."""

    seen: Floats
    variances: Floats
    """Of the noise of what was seen."""
    before: Floats
    """Means of the processes at the places of what was seen, (processes, seen)."""
    covariances: Floats
    """Of the processes there, (processes, seen, seen)."""
    expect: Callable[[Floats], Floats]
    """From a state, (processes, seen): what should be seen, (seen,)."""
    pulls: Callable[[Floats], Floats]
    """From a state: derivatives of what should be seen by it, (processes, seen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The most likely state, around which the observation is taken to be linear."""

    weights: Floats
    """(processes, seen): the state anywhere is the mean there and its covariance with what was seen, times these."""
    pulls: Floats
    """Derivatives of what was seen by the state, (processes, seen)."""
    root: Floats
    """Cholesky root of the covariance of what was seen, (seen, seen)."""
    log_evidence: float
    """Logarithm of the probability of what was seen, but for a constant: tells one noise from another."""


def most_likely(problem: Problem, start: Solution | None = None) -> Solution:
    """The state that explains best what was seen; close to it where the observation is far from linear.

    Full steps alone may swing to and fro for ever: of a minimum they see one side at a time. `start`: the solution of a
    like problem, from which fewer steps are needed.
    """
    weights = np.zeros_like(problem.before) if start is None else start.weights
    misfit, damping = _misfit(problem, weights), 0.0
    for _ in range(_STEPS):
        around, last = _linearize(problem, weights), misfit
        for _ in range(_TRIES):
            tried = around.step(damping)
            if (now := _misfit(problem, tried)) < misfit:
                weights, misfit, damping = tried, now, damping / _DAMPING
                break
            damping = max(damping, _LEAST_DAMPING) * _DAMPING
        if misfit == last or (last - misfit <= _SETTLED and damping <= _LITTLE_DAMPING):
            break
    around = _linearize(problem, weights)
    root = np.asarray(np.linalg.cholesky(around.covariance + np.diag(problem.variances)), dtype=np.float64)
    log_evidence = -0.5 * misfit - float(np.log(np.diag(root)).sum())
    return Solution(weights=weights, pulls=around.pulls, root=root, log_evidence=log_evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """A problem as it is around a state."""

    problem: Problem
    weights: Floats
    pulls: Floats
    covariance: Floats
    """Of what is seen, without its noise, (seen, seen)."""
    surprise: Floats
    """What was seen beyond what should be."""
    moved: Floats
    """What the state's distance from the means does to what should be seen, (seen,)."""

    def step(self, damping: float) -> Floats:
        """The weights of the state that a step leads to; with much damping it stays where it was."""
        share = 1.0 / (1.0 + damping)
        noisy = share * self.covariance + np.diag(self.problem.variances)
        alpha = np.linalg.solve(noisy, self.surprise + share * self.moved)
        stepped: Floats = (1 - share) * self.weights + share * self.pulls * alpha
        return stepped


def _linearize(problem: Problem, weights: Floats) -> _Linear:
    moved = _moved(problem, weights)
    state = problem.before + moved
    pulls = problem.pulls(state)
    return _Linear(
        problem=problem,
        weights=weights,
        pulls=pulls,
        covariance=np.einsum("pi,pij,pj->ij", pulls, problem.covariances, pulls),
        surprise=problem.seen - problem.expect(state),
        moved=(pulls * moved).sum(axis=0),
    )


def _misfit(problem: Problem, weights: Floats) -> float:
    """Twice the negative logarithm of a state's probability, but for a constant."""
    moved = _moved(problem, weights)
    expected = problem.expect(problem.before + moved)
    return float(((problem.seen - expected) ** 2 / problem.variances).sum() + (weights * moved).sum())


def _moved(problem: Problem, weights: Floats) -> Floats:
    """How far a state lies from the means."""
    moved: Floats = np.einsum("pij,pj->pi", problem.covariances, weights)
    return moved
