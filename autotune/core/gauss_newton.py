"""The most likely state of Gaussian processes that are seen through a function which is not linear. Pure.

Comes in: a Problem, with the processes' covariances at the places of what was seen. Goes out: a Solution, from which
the state anywhere follows, and what is known of it.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 3.4 (Laplace's approximation);
steps by Gauss and Newton, halved until they better the fit: Nocedal and Wright 2006, "Numerical Optimization", 3.1 and
10.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autotune.core.floats import Floats

__all__ = ["Problem", "Solution", "most_likely"]

_STEPS = 30
_HALVINGS = 10
_SETTLED = 1e-8
"""A step that betters the misfit by a smaller share of it is the last."""


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
    observe: Callable[[Floats], tuple[Floats, Floats]]
    """From a state, (processes, seen): what should be seen, and its derivatives by the state."""


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
    misfit = _misfit(problem, weights)
    for _ in range(_STEPS):
        step, last = _solve(problem, weights).weights - weights, misfit
        for halving in range(_HALVINGS):
            tried = weights + step / 2**halving
            if (now := _misfit(problem, tried)) < misfit:
                weights, misfit = tried, now
                break
        if last - misfit <= _SETTLED * last:
            break
    around = _solve(problem, weights)
    return Solution(weights=weights, pulls=around.pulls, root=around.root, log_evidence=around.log_evidence)


def _solve(problem: Problem, weights: Floats) -> Solution:
    """What the state would be, were the observation linear everywhere as it is around this one."""
    moved = _moved(problem, weights)
    expected, pulls = problem.observe(problem.before + moved)
    surprise = problem.seen - expected + (pulls * moved).sum(axis=0)
    covariance = np.einsum("pi,pij,pj->ij", pulls, problem.covariances, pulls)
    root = np.linalg.cholesky(covariance + np.diag(problem.variances))
    alpha = np.linalg.solve(root.T, np.linalg.solve(root, surprise))
    log_evidence = -0.5 * float(surprise @ alpha) - float(np.log(np.diag(root)).sum())
    return Solution(weights=pulls * alpha, pulls=pulls, root=root, log_evidence=log_evidence)


def _misfit(problem: Problem, weights: Floats) -> float:
    """Twice the negative logarithm of a state's probability, but for a constant."""
    moved = _moved(problem, weights)
    expected, _ = problem.observe(problem.before + moved)
    return float(((problem.seen - expected) ** 2 / problem.variances).sum() + (weights * moved).sum())


def _moved(problem: Problem, weights: Floats) -> Floats:
    """How far a state lies from the means."""
    moved: Floats = np.einsum("pij,pj->pi", problem.covariances, weights)
    return moved
