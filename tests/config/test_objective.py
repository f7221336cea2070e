"""Limits are parsed once."""

from __future__ import annotations

from itertools import product

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
def test_limit(given_limit: int | float | str, bytes_of_1000: int) -> None:
    objective = Objective.model_validate({"memory_limit": given_limit})
    assert objective.limit_bytes(1000) == bytes_of_1000
    assert Objective.model_validate_json(objective.model_dump_json()) == objective


@pytest.mark.parametrize(
    ("reserve", "left_of_1000"),
    [(0, 900), ("0", 900), (0.1, 800), (300, 600), ("200 B", 700), ("2KiB", 900 - 2048)],
)
def test_reserve(reserve: float | str, left_of_1000: int) -> None:
    objective = Objective.model_validate({"reserve": reserve})
    assert objective.limit_bytes(1000) == left_of_1000
    assert Objective.model_validate_json(objective.model_dump_json()) == objective


def test_no_reserve_is_the_default() -> None:
    assert Objective(reserve=0).model_dump_json() == Objective().model_dump_json()


_NO_SIZES = [-1, 1.5, True, None, "much", "", "0GiB", "-2GiB", "inf", "nan", float("inf"), [1]]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("memory_limit", 0),
        *product(["reserve"], [1, 1.0, "1"]),
        *product(["memory_limit", "reserve"], _NO_SIZES),
    ],
)
def test_other_sizes_are_refused(name: str, size: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Objective.model_validate({name: size})
