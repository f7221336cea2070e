"""How a confirmation spends its seconds and its error."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.decisions.confirmation_plan import (
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    UNHURRIED_CONFIRMATION_S,
    brief_confirmation,
    is_look,
    plan_confirmation,
    spent_error,
    window_length_s,
)
from autotune.records.run_spread import RunSpread

_OVERHEADS = st.lists(st.floats(0.0, 100.0), min_size=2, max_size=4)
_WINDOWS = st.floats(1.0, 8.0)


@given(_OVERHEADS, st.floats(0.0, 1000.0), _WINDOWS, st.booleans())
def test_what_is_planned_fits_into_the_time_that_is_left(
    overheads_s: list[float], left_s: float, window_s: float, has_baseline: bool
) -> None:
    plan = plan_confirmation(overheads_s, left_s, window_s, has_baseline=has_baseline)
    assert (plan.rounds == 0) == (left_s == 0)
    assert (2 if has_baseline else 1) <= plan.entrants <= len(overheads_s)
    is_last_resort = not plan.has_extras
    assert is_last_resort or plan.rounds * plan.round_s(overheads_s[: plan.entrants]) <= left_s + 1e-6
    assert 1.0 <= plan.window_s <= window_s
    if is_last_resort and plan.rounds:
        assert plan.rounds == 1


@given(_OVERHEADS, _WINDOWS)
def test_without_a_time_out_three_rounds_take_what_they_may_or_are_two_configurations(
    overheads_s: list[float], window_s: float
) -> None:
    plan = plan_confirmation(overheads_s, None, window_s, has_baseline=True)
    assert plan.rounds == FEWEST_ROUNDS
    taken_s = FEWEST_ROUNDS * plan.round_s(overheads_s[: plan.entrants])
    assert taken_s <= UNHURRIED_CONFIRMATION_S or plan.entrants == 2


@pytest.mark.parametrize(
    ("left_s", "rounds", "entrants"),
    [(600.0, 3, 4), (45.0, 3, 4), (20.0, 3, 2), (12.0, 2, 2), (9.0, 1, 2), (5.0, 1, 2)],
)
def test_with_less_time_configurations_go_first_and_then_rounds(left_s: float, rounds: int, entrants: int) -> None:
    plan = plan_confirmation([1.0, 1.0, 1.0, 1.0], left_s, 2.0, has_baseline=True)
    assert (plan.rounds, plan.entrants) == (rounds, entrants)


@given(_OVERHEADS, st.floats(0.1, 500.0), st.floats(0.1, 500.0))
def test_more_time_never_means_fewer_rounds_or_windows(overheads_s: list[float], one_s: float, other_s: float) -> None:
    less, more = sorted((one_s, other_s))
    plans = [plan_confirmation(overheads_s, left_s, 4.0, has_baseline=True) for left_s in (less, more)]
    first, second = ((plan.rounds, plan.entrants, plan.window_s) for plan in plans)
    assert first <= second


def test_planned_rounds_follow_without_a_time_out_and_further_ones_within_their_seconds() -> None:
    plan = plan_confirmation([1.0, 1.0], None, 2.0, has_baseline=True)
    assert plan.for_round([50.0, 50.0], 500.0, None, 2) == plan
    assert plan.for_round([1.0, 1.0], 70.0, None, 3) == plan
    assert plan.for_round([1.0, 1.0], 75.0, None, 3) is None


@pytest.mark.parametrize(("left_s", "window_s"), [(40.0, 2.0), (5.0, 1.5), (4.0, 1.0), (3.9, None)])
def test_with_a_time_out_the_windows_of_a_planned_round_shrink_to_what_is_left(
    left_s: float, window_s: float | None
) -> None:
    plan = plan_confirmation([1.0, 1.0], 60.0, 2.0, has_baseline=True)
    later = plan.for_round([1.0, 1.0], 10.0, left_s, 1)
    assert (None if later is None else later.window_s) == window_s


@given(st.integers(1, 4), st.lists(st.floats(0, 3), min_size=1, max_size=12))
def test_the_error_of_all_looks_adds_up_to_what_is_allowed(challengers: int, times: list[float]) -> None:
    shares = [0.0, *sorted(times), 1.0]
    spent = [spent_error(after, challengers) - spent_error(before, challengers) for before, after in pairwise(shares)]
    assert all(error >= 0 for error in spent)
    assert sum(spent) <= min(0.025, 0.05 / challengers) + 1e-12


def test_the_first_looks_spend_little() -> None:
    assert spent_error(0.1, 1) < 0.02 * spent_error(1.0, 1)


def test_looks_are_few_and_the_last_is_after_the_last_round() -> None:
    looks = [rounds for rounds in range(MOST_ROUNDS + 1) if is_look(rounds)]
    assert looks[0] == FEWEST_ROUNDS
    assert looks[-1] == MOST_ROUNDS
    assert len(looks) <= 8


def test_a_window_is_longer_where_starts_are_dear_and_shorter_where_runs_differ_anyway() -> None:
    steady, loud = (RunSpread(sd=sd, degrees_of_freedom=9) for sd in (0.01, 0.05))
    usual = window_length_s(1.0, 3e-4, steady)
    assert window_length_s(9.0, 3e-4, steady) == pytest.approx(3 * usual)
    assert window_length_s(1.0, 3e-4, loud) < usual
    assert window_length_s(0.01, 1e-9, loud) == 1.0
    assert window_length_s(1e6, 1.0, steady) == 8.0


def test_a_brief_confirmation_is_one_round_of_two_windows_alone() -> None:
    plan = brief_confirmation(4)
    assert (plan.entrants, plan.rounds, plan.has_extras) == (2, 1, False)
    assert plan.for_round([20.0, 20.0], 0.0, None, 0) == plan
    assert plan.for_round([20.0, 20.0], 48.0, None, 1) is None
    assert brief_confirmation(1).entrants == 1
