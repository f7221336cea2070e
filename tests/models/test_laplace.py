"""Find the most likely state, also where undamped steps would oscillate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.models.throughput import Posterior, Problem, most_likely

Floats = NDArray[np.float64]


def posed(
    observed: list[float],
    sds: list[float],
    covariances: Floats,
    function: tuple[Callable[[Floats], Floats], ...],
) -> Problem:
    expect, slopes = function
    return Problem(
        observed=np.array(observed),
        variances=np.array(sds) ** 2,
        prior_mean=np.zeros(covariances.shape[:2]),
        covariances=covariances,
        expect=lambda now: (expect(now), lambda: slopes(now)),
    )


def state(covariances: Floats, posterior: Posterior) -> Floats:
    found: Floats = np.einsum("pij,pj->pi", covariances, posterior.weights)
    return found


def smooth(places: list[float]) -> Floats:
    """Return the covariance of a smooth process at some places."""
    apart = np.subtract.outer(places, places)
    covariance: Floats = np.exp(-0.5 * apart**2) + 1e-9 * np.eye(len(places))
    return covariance


def softened_minimum(now: Floats) -> Floats:
    least: Floats = -np.logaddexp.reduce(-8 * now, axis=0) / 8
    return least


ADDED = (lambda now: now.sum(axis=0), np.ones_like)
SOFTENED_MINIMUM = (softened_minimum, lambda now: np.exp(-8 * (now - softened_minimum(now))))


@given(
    st.lists(
        st.tuples(st.floats(-3, 3), st.floats(-2, 2), st.floats(0.05, 1.0)),
        min_size=1,
        max_size=6,
        unique_by=lambda sight: sight[0],
    )
)
def test_a_linear_function_is_solved_exactly(sights: list[tuple[float, float, float]]) -> None:
    places, observed, sds = (list(column) for column in zip(*sights, strict=True))
    covariances = np.stack([smooth(places), 0.5 * smooth(places)])
    total = 1.5 * smooth(places)
    expected = total @ np.linalg.solve(total + np.diag(np.square(sds)), observed)
    posterior = most_likely(posed(observed, sds, covariances, ADDED))
    assert state(covariances, posterior).sum(axis=0) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("observed", [0.0, 1.0, 5.0, -5.0])
def test_a_minimum_above_both_sides_raises_both(observed: float) -> None:
    covariances = np.array([[[1.0]], [[1.0]]])
    posterior = most_likely(posed([observed], [0.01], covariances, SOFTENED_MINIMUM))
    first, second = state(covariances, posterior)[:, 0]
    assert softened_minimum(np.array([[first], [second]]))[0] == pytest.approx(observed, abs=0.02)
    if observed > 0:
        assert first == pytest.approx(second, abs=1e-6)
    else:
        assert min(first, second) == pytest.approx(observed, abs=0.1)


@given(
    st.lists(
        st.tuples(st.floats(-3, 3), st.floats(-4, 4)),
        min_size=1,
        max_size=5,
        unique_by=lambda sight: round(sight[0], 1),
    )
)
def test_posterior_is_a_local_optimum(
    sights: list[tuple[float, float]],
) -> None:
    places, observed = (list(column) for column in zip(*sights, strict=True))
    covariances = np.stack([smooth(places), smooth(places)])
    problem = posed(observed, [0.05] * len(observed), covariances, SOFTENED_MINIMUM)
    posterior = most_likely(problem)

    def objective(weights: Floats) -> float:
        moved = np.einsum("pij,pj->pi", covariances, weights)
        misfit = (problem.observed - softened_minimum(moved)) ** 2 / problem.variances
        return float(misfit.sum() + (weights * moved).sum())

    best = objective(posterior.weights)
    assert best <= objective(np.zeros_like(posterior.weights))
    for place in np.ndindex(posterior.weights.shape):
        for by in (1e-3, -1e-3):
            weights = posterior.weights.copy()
            weights[place] += by
            assert objective(weights) > best - 1e-3 * (1 + best)


def test_start_from_another_noise() -> None:
    places, observed = [0.0, 1.0, 2.5], [1.0, -2.0, 0.5]
    covariances = np.stack([smooth(places), smooth(places)])
    loose, tight = (posed(observed, [sd] * 3, covariances, SOFTENED_MINIMUM) for sd in (0.3, 0.05))
    fresh, continued = most_likely(tight), most_likely(tight, most_likely(loose).weights)
    assert continued.log_evidence == pytest.approx(fresh.log_evidence, abs=0.05)
    assert softened_minimum(state(covariances, continued)) == pytest.approx(observed, abs=0.1)


def test_exact_observation_leaves_no_uncertainty() -> None:
    posterior = most_likely(posed([1.0], [1e-3], np.array([[[1.0]], [[1.0]]]), ADDED))
    explained = np.linalg.solve(posterior.cholesky, np.array([2.0]))
    assert 2.0 - float(explained @ explained) == pytest.approx(1e-6, rel=0.01)
