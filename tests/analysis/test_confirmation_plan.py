from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.confirmation_plan import ROUNDS, UNHURRIED_CONFIRMATION_S, plan_confirmation

_OVERHEADS = st.lists(st.floats(0.0, 100.0), min_size=2, max_size=4)


@given(_OVERHEADS, st.floats(0.0, 1000.0), st.booleans())
def test_what_is_planned_fits_into_the_time_that_is_left(
    overheads_s: list[float], left_s: float, has_baseline: bool
) -> None:
    plan = plan_confirmation(overheads_s, left_s, has_baseline=has_baseline)
    assert (plan.rounds == 0) == (left_s == 0)
    assert (2 if has_baseline else 1) <= plan.entrants <= len(overheads_s)
    taken_s = plan.rounds * sum(plan.window_s + one for one in overheads_s[: plan.entrants])
    is_last_resort = not plan.has_extras
    assert is_last_resort or taken_s <= left_s
    if is_last_resort and plan.rounds:
        assert plan.rounds == 1
        assert plan.window_s == 1.0


@given(_OVERHEADS, st.floats(-10.0, 1000.0), st.integers(1, 2), st.floats(0.5, 3.0))
def test_a_later_round_leaves_the_time_that_is_not_its_own(
    overheads_s: list[float], left_s: float, rounds_left: int, slower: float
) -> None:
    plan, actual_s = plan_confirmation(overheads_s, 600.0, has_baseline=True), [slower * one for one in overheads_s]
    later = plan.for_round(actual_s, left_s, rounds_left)
    if later is None:
        assert left_s < sum(actual_s) + len(actual_s)
    else:
        assert 1.0 <= later.window_s <= plan.window_s
        assert sum(later.window_s + one_s for one_s in actual_s) <= left_s + 1e-6


@pytest.mark.parametrize(
    ("left_s", "window_s"), [(40.0, 8.0), (16.0, 3.0), (9.0, 3.5), (5.0, 1.5), (4.0, 1.0), (3.9, None)]
)
def test_later_rounds_are_shorter_and_then_fewer(left_s: float, window_s: float | None) -> None:
    plan = plan_confirmation([1.0, 1.0], None, has_baseline=True)
    later = plan.for_round([1.0, 1.0], left_s, 2)
    assert (None if later is None else later.window_s) == window_s


def test_without_a_time_out_later_rounds_are_as_long_as_the_first() -> None:
    plan = plan_confirmation([1.0, 1.0], None, has_baseline=True)
    assert plan.for_round([50.0, 50.0], None, 1) == plan


@given(_OVERHEADS)
def test_without_a_time_out_three_rounds_take_what_they_may_or_are_two_configurations(overheads_s: list[float]) -> None:
    plan = plan_confirmation(overheads_s, None, has_baseline=True)
    assert plan.rounds == ROUNDS
    assert 4.0 <= plan.window_s <= 8.0
    taken_s = ROUNDS * sum(plan.window_s + one for one in overheads_s[: plan.entrants])
    assert taken_s <= UNHURRIED_CONFIRMATION_S or plan.entrants == 2


@pytest.mark.parametrize(
    ("left_s", "rounds", "entrants"),
    [(600.0, 3, 4), (45.0, 3, 4), (30.0, 3, 2), (20.0, 2, 2), (10.0, 1, 2), (8.0, 1, 2)],
)
def test_with_less_time_configurations_go_first_and_then_rounds(left_s: float, rounds: int, entrants: int) -> None:
    plan = plan_confirmation([1.0, 1.0, 1.0, 1.0], left_s, has_baseline=True)
    assert (plan.rounds, plan.entrants) == (rounds, entrants)


@given(_OVERHEADS, st.floats(0.1, 500.0), st.floats(0.1, 500.0))
def test_more_time_never_means_fewer_measurements(overheads_s: list[float], one_s: float, other_s: float) -> None:
    less, more = sorted((one_s, other_s))
    plans = [plan_confirmation(overheads_s, left_s, has_baseline=True) for left_s in (less, more)]
    first, second = ((plan.rounds, plan.entrants, plan.window_s) for plan in plans)
    assert first <= second
