"""Which entrants go on: those that may still be the best, as long as anything is open."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.analysis.decisions.elimination import worth_going_on
from autotune.records.recommendation import Confirmation
from autotune.records.run_spread import RunSpread
from tests.factories import make_confirmation

STEADY = RunSpread(sd=0.01, degrees_of_freedom=20.0)
LOUD = RunSpread(sd=0.1, degrees_of_freedom=20.0)
ERROR = 0.01


def going_on(
    field: Sequence[Confirmation],
    alive: Sequence[int],
    spread: RunSpread,
    error: float,
    larger: Sequence[int] = (),
) -> tuple[int, ...]:
    """Where a larger batch, of those named, is worth it from 5 % on."""
    batches = {entrant.number: 4.0 if entrant.number in larger else 1.0 for entrant in field}
    return worth_going_on(field, alive, spread, error, batches=batches, least=1.05)


def test_a_proven_gain_whose_interval_is_narrow_ends_it() -> None:
    field = [make_confirmation(0, 100, 101, 99), make_confirmation(1, 150, 151, 149)]
    assert going_on(field, (0, 1), STEADY, ERROR) == ()
    assert going_on(field, (0, 1), LOUD, 1e-6) == (1,)


def test_what_is_clearly_behind_the_leading_one_runs_no_more() -> None:
    rates = {0: 100, 1: 104, 2: 103.9, 3: 90}
    field = [make_confirmation(number, *[rate] * 3) for number, rate in rates.items()]
    assert going_on(field, tuple(rates), STEADY, 1e-6) == (1, 2)


def test_it_ends_where_nobody_is_likely_to_be_worth_a_change() -> None:
    field = [make_confirmation(0, *[100] * 6), make_confirmation(1, *[99.5] * 6), make_confirmation(2, *[100.1] * 6)]
    assert going_on(field, (0, 1, 2), STEADY, ERROR) == ()
    assert going_on(field, (0, 1, 2), LOUD, ERROR) == (1, 2)


def test_without_a_baseline_it_goes_on_until_one_is_left() -> None:
    field = [make_confirmation(1, *[100] * 3), make_confirmation(2, *[101] * 3), make_confirmation(3, *[80] * 3)]
    assert going_on(field, (1, 2, 3), STEADY, ERROR) == (1, 2)
    assert going_on(field[:1] + field[2:], (1, 3), STEADY, ERROR) == ()


def test_where_no_challenger_is_alive_nothing_goes_on() -> None:
    field = [make_confirmation(0, 100, 100), make_confirmation(1, 150, 150)]
    assert going_on(field, (0,), STEADY, ERROR) == ()


def test_a_larger_batch_goes_on_beside_the_best_of_the_own_until_it_is_decided_whether_it_is_worth_it() -> None:
    field = [make_confirmation(0, *[100] * 3), make_confirmation(1, *[140] * 3), make_confirmation(2, *[146] * 3)]
    assert going_on(field, (0, 1, 2), STEADY, ERROR) == ()
    assert going_on(field, (0, 1, 2), STEADY, ERROR, larger=[2]) == (1, 2)
    assert going_on(field, (0, 2), STEADY, ERROR, larger=[2]) == (), "the other one runs no more: nothing is decided"


def test_a_larger_batch_that_is_worth_it_or_not_ends_it() -> None:
    for rate in (100, 180):
        field = [make_confirmation(0, *[70] * 6), make_confirmation(1, *[140] * 6), make_confirmation(2, *[rate] * 6)]
        assert going_on(field, (0, 1, 2), STEADY, ERROR, larger=[2]) == ()


def test_a_larger_batch_that_is_not_worth_it_drops_out_though_it_leads() -> None:
    field = [make_confirmation(0, *[100] * 3), make_confirmation(1, *[101.5] * 3), make_confirmation(2, *[103.5] * 3)]
    assert going_on(field, (0, 1, 2), STEADY, ERROR, larger=[2]) == (1,)
    assert going_on(field[::2], (0, 2), STEADY, ERROR, larger=[2]) == (2,), "by 3.5 %, it may be more than 5"


def test_those_of_the_own_batch_contend_among_themselves_while_a_larger_one_is_undecided() -> None:
    rates = {0: 100.0, 1: 140.0, 2: 139.5, 3: 120.0, 4: 146.0}
    field = [make_confirmation(number, *[rate] * 3) for number, rate in rates.items()]
    assert going_on(field, tuple(rates), STEADY, ERROR, larger=[4]) == (1, 2, 4)
