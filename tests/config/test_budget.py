"""A number of trials that is given is honoured; one left open is bounded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autotune.config.plan import Budget


def test_default() -> None:
    assert (Budget().max_trials, Budget().may_stop_early) == (40, True)


def test_given_number() -> None:
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
def test_bad_budget(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Budget.model_validate(values)
