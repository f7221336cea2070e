"""Spread a few numbers over many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotune.space.ranges import spread


def test_few_numbers_are_all_taken_in_order() -> None:
    assert spread([8, 0, 2, 4, 2], 4) == [0, 2, 4, 8]


def test_many_numbers_are_spread_over_powers() -> None:
    assert spread(range(256), 9) == [0, 1, 3, 7, 15, 31, 63, 127, 255]


@given(st.sets(st.integers(0, 5000), min_size=1), st.integers(2, 30))
def test_spread_keeps_the_ends(values: set[int], most: int) -> None:
    taken = spread(sorted(values), most)
    assert set(taken) <= values
    assert len(taken) <= most
    assert (taken[0], taken[-1]) == (min(values), max(values))
