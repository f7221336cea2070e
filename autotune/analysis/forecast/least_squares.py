"""Least squares with as many penalties as unknowns: squared residuals of a few observations, and the unknowns' own.

Comes in: a function to residuals and their derivatives, and a start. Goes out: the point where the squares are least.
Pure.

Levenberg and Marquardt's method, step for step as MINPACK has it, but for its linear algebra: with a penalty on each
unknown the normal matrix is a diagonal one and what the observations add, so that a step takes a factorisation as large
as there are observations. Thus it costs a fraction of a general solver's, in which the penalties are rows like others.

Source: Moré 1978, "The Levenberg-Marquardt algorithm: implementation and theory"; lmder and lmpar of MINPACK (Moré,
Garbow, Hillstrom 1980), whose constants these are; Golub and Van Loan 2013, "Matrix Computations", 2.1.4 (Woodbury).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autotune.analysis.statistics import Floats

__all__ = ["Residuals", "penalised_minimum"]

Residuals = Callable[[Floats], tuple[Floats, Callable[[], Floats]]]
"""From unknowns, (unknowns,), to residuals, (observations,), and to a call for their derivatives there, (observations,
unknowns), which not every point needs."""

_FIRST_RADIUS = 100.0
"""Of the region in which the first linear model is trusted, over the start's own length."""
_LEAST_SLOPE = 1e-8
"""Cosine between residuals and each derivative below which no step is tried any more."""
_LEAST_RATIO = 1e-4
"""Of what a step gains to what the linear model promised, below which it is not taken."""
_MOST_DAMPINGS = 10
_MOST_STEPS_AN_UNKNOWN = 100


@dataclass(frozen=True, slots=True)
class _Linear:
    """The problem around a point."""

    unknowns: Floats
    apart: Floats
    """The residuals there."""
    slopes: Floats
    """(observations, unknowns)"""

    @property
    def gradient(self) -> Floats:
        """Of half the sum of squares."""
        return np.asarray(self.slopes.T @ self.apart + self.unknowns, dtype=np.float64)

    def step(self, diagonal: Floats) -> Floats:
        """To where the normal equations lead that have this diagonal in the penalties' place."""
        scaled = self.slopes / diagonal
        pull = self._inner(scaled, self.apart - scaled @ self.unknowns)
        return np.asarray(-(self.unknowns / diagonal + scaled.T @ pull), dtype=np.float64)

    def solved(self, right: Floats, diagonal: Floats) -> Floats:
        """What the same matrix has to be multiplied by for the right-hand side."""
        scaled = self.slopes / diagonal
        return np.asarray(right / diagonal - scaled.T @ self._inner(scaled, scaled @ right), dtype=np.float64)

    def _inner(self, scaled: Floats, right: Floats) -> Floats:
        inner = scaled @ self.slopes.T
        inner[np.diag_indices_from(inner)] += 1.0
        return np.asarray(np.linalg.solve(inner, right), dtype=np.float64)


def penalised_minimum(residuals: Residuals, start: Floats, *, tolerance: float) -> Floats:
    """Where the sum of squared residuals and squared unknowns is least.

    Args:
        residuals: of the observations.
        start: the unknowns to begin with.
        tolerance: relative gain of the sum of squares, and relative step, below which the search ends.
    """
    here, (apart, slopes_of) = start, residuals(start)
    slopes, length, scale = slopes_of(), _length(apart, here), np.zeros_like(start)
    damping, radius, is_first = 0.0, 0.0, True
    for _ in range(_MOST_STEPS_AN_UNKNOWN * start.size):
        linear = _Linear(here, apart, slopes)
        norms = np.sqrt(np.square(slopes).sum(axis=0) + 1.0)
        if length == 0 or np.max(np.abs(linear.gradient) / norms, initial=0.0) <= _LEAST_SLOPE * length:
            break
        scale = np.maximum(scale, norms)
        if not radius:
            radius = _FIRST_RADIUS * float(np.linalg.norm(scale * here)) or _FIRST_RADIUS
        damping, step = _damped_step(linear, scale, radius, damping)
        size = float(np.linalg.norm(scale * step))
        radius = min(radius, size) if is_first else radius
        there, (apart_there, slopes_of) = here + step, residuals(here + step)
        length_there = _length(apart_there, there)
        gained = 1 - (length_there / length) ** 2 if 0.1 * length_there < length else -1.0
        undamped = (float(np.square(slopes @ step).sum()) + float(step @ step)) / length**2
        damped = damping * (size / length) ** 2
        promised = undamped + 2 * damped
        ratio = gained / promised if promised else 0.0
        if ratio <= 0.25:
            slope = -(undamped + damped)
            shrunk = 0.5 if gained >= 0 else 0.5 * slope / (slope + 0.5 * gained)
            shrunk = 0.1 if 0.1 * length_there >= length else max(shrunk, 0.1)
            radius, damping = shrunk * min(radius, 10 * size), damping / shrunk
        elif damping == 0 or ratio >= 0.75:
            radius, damping = 2 * size, 0.5 * damping
        if ratio >= _LEAST_RATIO:
            here, apart, slopes, length, is_first = there, apart_there, slopes_of(), length_there, False
        is_still = abs(gained) <= tolerance and promised <= tolerance and ratio <= 2
        if is_still or radius <= tolerance * float(np.linalg.norm(scale * here)):
            break
    return here


def _damped_step(linear: _Linear, scale: Floats, radius: float, damping: float) -> tuple[float, Floats]:
    """The step to where the linear model is least within the radius, by a tenth, and the damping that gives it."""
    step = linear.step(np.ones_like(scale))
    excess = float(np.linalg.norm(scale * step)) - radius
    if excess <= 0.1 * radius:
        return 0.0, step
    lowest = excess / radius / _steepness(linear, scale, step, 0.0)
    highest = float(np.linalg.norm(linear.gradient / scale)) / radius
    damping = min(max(damping, lowest), highest)
    for _ in range(_MOST_DAMPINGS):
        step = linear.step(1.0 + damping * scale**2)
        excess = float(np.linalg.norm(scale * step)) - radius
        if abs(excess) <= 0.1 * radius:
            break
        lowest, highest = (max(lowest, damping), highest) if excess > 0 else (lowest, min(highest, damping))
        damping = max(lowest, damping + excess / radius / _steepness(linear, scale, step, damping))
    return damping, step


def _steepness(linear: _Linear, scale: Floats, step: Floats, damping: float) -> float:
    """How fast the step's length shrinks with the damping, relatively."""
    along = scale**2 * step / np.linalg.norm(scale * step)
    return float(along @ linear.solved(along, 1.0 + damping * scale**2))


def _length(apart: Floats, unknowns: Floats) -> float:
    return float(np.sqrt(apart @ apart + unknowns @ unknowns))
