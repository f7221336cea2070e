"""Penalised least squares: where MINPACK's own solver ends, after as many steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autotune.analysis.forecast.least_squares import penalised_minimum

Floats = NDArray[np.float64]


def posed(seed: int, observations: int, unknowns: int, bend: float) -> Callable[[Floats], tuple[Floats, Floats]]:
    """Residuals, and their derivatives, of exponentials of sums: the larger `bend`, the less a linear model holds."""
    drawn = np.random.default_rng(seed)
    matrix, observed = drawn.normal(size=(observations, unknowns)), drawn.normal(size=observations) * 3

    def residuals(at: Floats) -> tuple[Floats, Floats]:
        grown = np.exp(np.minimum(bend * matrix @ at, 20.0))
        return grown - 1 - observed, bend * grown[:, None] * matrix

    return residuals


def minpacks(
    residuals: Callable[[Floats], tuple[Floats, Floats]], start: Floats, tolerance: float
) -> tuple[Floats, int]:
    """What MINPACK finds where the penalties are residuals like others, and the points it looked at."""
    fit = least_squares(
        lambda at: np.concatenate([residuals(at)[0], at]),
        start,
        lambda at: np.vstack([residuals(at)[1], np.eye(at.size)]),
        method="lm",
        x_scale="jac",
        ftol=tolerance,
        xtol=tolerance,
    )
    return fit.x, fit.nfev


@given(
    seed=st.integers(0, 10_000),
    observations=st.integers(1, 8),
    unknowns=st.integers(1, 12),
    bend=st.sampled_from([0.1, 0.5, 1.0]),
    start=st.sampled_from([0.0, 1.0, -3.0]),
)
def test_the_steps_are_those_of_minpack(seed: int, observations: int, unknowns: int, bend: float, start: float) -> None:
    residuals, looked_at = posed(seed, observations, unknowns, bend), list[Floats]()

    def watched(at: Floats) -> tuple[Floats, Callable[[], Floats]]:
        looked_at.append(at)
        apart, slopes = residuals(at)
        return apart, lambda: slopes

    begin = np.full(unknowns, start)
    found = penalised_minimum(watched, begin, tolerance=1e-4)
    expected, points = minpacks(residuals, begin, 1e-4)
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-4)  # which both are asked for
    assert len(looked_at) == points


def test_a_start_that_is_the_minimum_is_kept() -> None:
    found = penalised_minimum(lambda at: (at[:1], lambda: np.eye(1, 2)), np.zeros(2), tolerance=1e-4)
    assert found.tolist() == [0.0, 0.0]
