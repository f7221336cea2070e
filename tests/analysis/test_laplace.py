"""The most likely state: exact where the observation is linear, and reached where full steps would swing to and fro."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.analysis.laplace import Problem, Solution, most_likely

Floats = NDArray[np.float64]


def posed(
    seen: list[float], sds: list[float], covariances: Floats, observe: tuple[Callable[[Floats], Floats], ...]
) -> Problem:
    expect, pulls = observe
    return Problem(
        seen=np.array(seen),
        variances=np.array(sds) ** 2,
        before=np.zeros(covariances.shape[:2]),
        covariances=covariances,
        expect=expect,
        pulls=pulls,
    )


def state(problem: Problem, solution: Solution) -> Floats:
    found: Floats = problem.before + np.einsum("pij,pj->pi", problem.covariances, solution.weights)
    return found


def smooth(places: list[float]) -> Floats:
    """The covariance of a smooth process at some places."""
    apart = np.subtract.outer(places, places)
    covariance: Floats = np.exp(-0.5 * apart**2) + 1e-9 * np.eye(len(places))
    return covariance


def softened_minimum(now: Floats) -> Floats:
    least: Floats = -np.logaddexp.reduce(-8 * now, axis=0) / 8
    return least


ADDED = (lambda now: now.sum(axis=0), np.ones_like)
SOFTENED_MINIMUM = (softened_minimum, lambda now: np.exp(-8 * (now - softened_minimum(now))))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-3, 3), st.floats(-2, 2), st.floats(0.05, 1.0)),
        min_size=1,
        max_size=6,
        unique_by=lambda one: one[0],
    )
)
def test_a_linear_observation_is_solved_exactly(sights: list[tuple[float, float, float]]) -> None:
    places, seen, sds = (list(column) for column in zip(*sights, strict=True))
    problem = posed(seen, sds, np.stack([smooth(places), 0.5 * smooth(places)]), ADDED)
    total = 1.5 * smooth(places)
    expected = total @ np.linalg.solve(total + np.diag(np.square(sds)), seen)
    assert state(problem, most_likely(problem)).sum(axis=0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seen", [0.0, 1.0, 5.0, -5.0])
def test_a_minimum_above_both_sides_raises_both(seen: float) -> None:
    both = np.array([[[1.0]], [[1.0]]])
    problem = posed([seen], [0.01], both, SOFTENED_MINIMUM)
    first, second = state(problem, most_likely(problem))[:, 0]
    assert softened_minimum(np.array([[first], [second]]))[0] == pytest.approx(seen, abs=0.02)
    assert first == pytest.approx(second, abs=1e-6) if seen > 0 else min(first, second) == pytest.approx(seen, abs=0.1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-3, 3), st.floats(-4, 4)), min_size=1, max_size=5, unique_by=lambda one: round(one[0], 1)
    )
)
def test_the_solution_explains_no_less_than_the_means_and_is_settled(sights: list[tuple[float, float]]) -> None:
    places, seen = (list(column) for column in zip(*sights, strict=True))
    problem = posed(seen, [0.05] * len(seen), np.stack([smooth(places), smooth(places)]), SOFTENED_MINIMUM)
    solution = most_likely(problem)

    def misfit(weights: Floats) -> float:
        moved = np.einsum("pij,pj->pi", problem.covariances, weights)
        expected = softened_minimum(moved)
        return float(((problem.seen - expected) ** 2 / problem.variances).sum() + (weights * moved).sum())

    best = misfit(solution.weights)
    assert best <= misfit(np.zeros_like(solution.weights))
    for place in np.ndindex(solution.weights.shape):
        for by in (1e-3, -1e-3):
            weights = solution.weights.copy()
            weights[place] += by
            assert misfit(weights) > best - 1e-3 * (1 + best)


def test_what_was_seen_without_doubt_leaves_none() -> None:
    problem = posed([1.0], [1e-3], np.array([[[1.0]], [[1.0]]]), ADDED)
    solution = most_likely(problem)
    explained = np.linalg.solve(solution.root, np.array([2.0]))
    assert 2.0 - float(explained @ explained) == pytest.approx(1e-6, rel=0.01)
