from __future__ import annotations

from autotune.records.trial import Score
from autotune.tuning.study import MeasuredTrials
from tests.factories.trials import make_record


def scored(value: float) -> Score:
    return Score(value=value, feasible=True)


def test_what_is_derived_is_the_same_object_until_a_trial_is_kept() -> None:
    first, late, early = (make_record(number, score=scored(number + 1.0)) for number in (0, 2, 1))
    measured = MeasuredTrials({"a": first})
    assert (measured.ended, measured.in_order, measured.best) == ((first,), (first,), first)
    assert measured.ended is measured.ended
    measured.keep("c", late)
    measured.keep("b", early)
    assert measured.ended == (first, late, early)
    assert measured.in_order == (first, early, late)
    assert measured.best == late


def test_a_further_run_takes_the_place_of_the_trials_record() -> None:
    first, other = (make_record(number, score=scored(number + 1.0)) for number in (0, 1))
    measured = MeasuredTrials({"a": first, "b": other})
    assert measured.best == other
    again = first.with_run(first.result).model_copy(update={"score": scored(4.0)})
    measured.keep("a", again)
    assert (measured.ended, measured.best) == ((again, other), again)
    assert measured.of_number(0) == ("a", again)
    assert ("a" in measured, "c" in measured, measured.get("c"), len(measured)) == (
        True,
        False,
        None,
        2,
    )
