"""Which entrants go on: those that may still be the best, as long as anything is open."""

from __future__ import annotations

from autotune.analysis.decisions.elimination import worth_going_on
from autotune.records.run_spread import RunSpread
from tests.factories import make_confirmation

STEADY = RunSpread(sd=0.01, degrees_of_freedom=20.0)
LOUD = RunSpread(sd=0.1, degrees_of_freedom=20.0)
ERROR = 0.01


def test_a_proven_gain_whose_interval_is_narrow_ends_it() -> None:
    field = [make_confirmation(0, 100, 101, 99), make_confirmation(1, 150, 151, 149)]
    assert worth_going_on(field, (0, 1), STEADY, ERROR) == ()
    assert worth_going_on(field, (0, 1), LOUD, 1e-6) == (1,)


def test_what_is_clearly_behind_the_leading_one_runs_no_more() -> None:
    rates = {0: 100, 1: 104, 2: 103.9, 3: 90}
    field = [make_confirmation(number, *[rate] * 3) for number, rate in rates.items()]
    assert worth_going_on(field, tuple(rates), STEADY, 1e-6) == (1, 2)


def test_it_ends_where_nobody_is_likely_to_be_worth_a_change() -> None:
    field = [make_confirmation(0, *[100] * 6), make_confirmation(1, *[99.5] * 6), make_confirmation(2, *[100.1] * 6)]
    assert worth_going_on(field, (0, 1, 2), STEADY, ERROR) == ()
    assert worth_going_on(field, (0, 1, 2), LOUD, ERROR) == (1, 2)


def test_without_a_baseline_it_goes_on_until_one_is_left() -> None:
    field = [make_confirmation(1, *[100] * 3), make_confirmation(2, *[101] * 3), make_confirmation(3, *[80] * 3)]
    assert worth_going_on(field, (1, 2, 3), STEADY, ERROR) == (1, 2)
    assert worth_going_on(field[:1] + field[2:], (1, 3), STEADY, ERROR) == ()


def test_where_no_challenger_is_alive_nothing_goes_on() -> None:
    field = [make_confirmation(0, 100, 100), make_confirmation(1, 150, 150)]
    assert worth_going_on(field, (0,), STEADY, ERROR) == ()
