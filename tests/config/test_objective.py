"""Limits are parsed once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autotune.config.plan import Objective


@pytest.mark.parametrize(
    ("given_limit", "bytes_of_1000"),
    [
        (0.9, 900),
        ("0.5", 500),
        (1, 1000),
        (1.0, 1000),
        (2, 2),
        ("20GiB", 20 * 2**30),
        ("2 GB", 2 * 10**9),
        (2e9, 2 * 10**9),
    ],
)
def test_a_limit_is_bytes_a_size_or_a_fraction(
    given_limit: int | float | str, bytes_of_1000: int
) -> None:
    objective = Objective.model_validate({"memory_limit": given_limit})
    assert objective.limit_bytes(1000) == bytes_of_1000
    assert Objective.model_validate_json(objective.model_dump_json()) == objective


@pytest.mark.parametrize(
    ("reserve", "left_of_1000"),
    [(0, 900), ("0", 900), (0.1, 800), (300, 600), ("200 B", 700), ("2KiB", 900 - 2048)],
)
def test_a_reserve_is_left_free_below_the_limit(reserve: float | str, left_of_1000: int) -> None:
    objective = Objective.model_validate({"reserve": reserve})
    assert objective.limit_bytes(1000) == left_of_1000
    assert Objective.model_validate_json(objective.model_dump_json()) == objective


@pytest.mark.parametrize(
    "reserve", [-1, 1, 1.0, 1.5, True, None, "much", "-2GiB", "inf", "nan", [1]]
)
def test_a_reserve_that_is_no_size_is_refused_with_the_rule(reserve: object) -> None:
    with pytest.raises(ValidationError, match="reserve"):
        Objective.model_validate({"reserve": reserve})


@pytest.mark.parametrize(
    "given_limit",
    [
        0,
        -1,
        1.5,
        True,
        None,
        "much",
        "",
        "0GiB",
        "-2GiB",
        "inf",
        "nan",
        float("inf"),
        float("nan"),
        [1],
    ],
)
def test_a_limit_that_is_none_of_these_is_refused_with_the_rule(given_limit: object) -> None:
    with pytest.raises(ValidationError, match="memory_limit"):
        Objective.model_validate({"memory_limit": given_limit})
