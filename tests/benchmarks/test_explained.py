"""What a covariate explains is judged on runs that its slope has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measures.explained import adjusted_mean, explained_share

RANDOM = np.random.default_rng(0)


def test_what_follows_from_a_covariate_is_explained_whole() -> None:
    covariate = RANDOM.normal(size=20)
    assert explained_share(3 - 2 * covariate, covariate[:, None]) == pytest.approx(1)


def test_chance_explains_nothing() -> None:
    shares = [
        explained_share(RANDOM.normal(size=20), RANDOM.normal(size=(20, 3))) for _ in range(50)
    ]
    assert np.mean(shares) < 0, "three slopes through noise foretell worse than the mean"


def test_half_of_the_variance_is_told_as_about_half() -> None:
    covariate, noise = RANDOM.normal(size=(2, 2000))
    assert explained_share(covariate + noise, covariate[:, None]) == pytest.approx(0.5, abs=0.05)


def test_a_mean_is_adjusted_by_what_the_covariate_has_moved() -> None:
    covariate = RANDOM.normal(1, 1, size=2000)
    target = 3 + 0.4 * covariate + RANDOM.normal(0, 0.1, size=2000)
    assert adjusted_mean(target, covariate) == pytest.approx(3, abs=0.02)
    assert adjusted_mean(np.ones(4), np.arange(4.0)) == 1


def test_of_two_runs_the_prior_keeps_a_chance_slope_small() -> None:
    target, covariate = np.array([0.0, 1.0]), np.array([0.0, 0.1])
    assert abs(adjusted_mean(target, covariate) - 0.5) < 0.01
