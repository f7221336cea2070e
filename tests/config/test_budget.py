"""A number of trials that is given is honoured; one left open is bounded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autotune.config.plan import Budget


def test_a_number_left_open_means_at_most_forty_and_may_stop_early() -> None:
    assert (Budget().max_trials, Budget().may_stop_early) == (40, True)


def test_a_number_given_is_honoured() -> None:
    budget = Budget(n_trials=100)
    assert (budget.max_trials, budget.may_stop_early) == (100, False)


@pytest.mark.parametrize(
    "values",
    [
        {"n_trials": 0},
        {"n_trials": 2.0},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"seconds": 3},
    ],
)
def test_a_budget_of_nothing_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Budget.model_validate(values)
