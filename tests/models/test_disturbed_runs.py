"""Runs of one configuration: which of them other processes have slowed."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import pytest

from autotune.models.evidence import outliers_of


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ((), set()),
        ((1000.0,), set()),
        ((1000.0, 59.0), set()),
        ((1000.0, 1010.0, 59.0), {2}),
        ((59.0, 1000.0, 1010.0, 61.0), {0, 3}),
        ((1000.0, 1010.0, 900.0), set()),
        ((1000.0, 1010.0, 500.0), {2}),
        ((1000.0, 1400.0, 59.0), set()),
        ((1000.0, 1010.0, 2000.0), set()),
        ((500.0, 600.0, 700.0, 800.0, 350.0), set()),
    ],
    ids=[
        "none",
        "one",
        "two: either may be right",
        "a seventeenth",
        "two of four",
        "a tenth below",
        "half",
        "the others disagree",
        "above",
        "among runs that differ as much",
    ],
)
def test_outliers(rates: Sequence[float], slow: set[int]) -> None:
    assert outliers_of([log(rate) for rate in rates]) == slow
