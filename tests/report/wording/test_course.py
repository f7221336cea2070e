"""How a search went, in words: trials, outcomes, time, why it ended, and when it has paid for itself."""

from __future__ import annotations

from autotune.note import note
from autotune.records.recommendation import Ratio
from autotune.report.wording.summary import say_course
from tests.factories import make_recommendation, make_summary

TWICE = Ratio(value=2.0, low=1.9, high=2.1)


def test_a_search_that_found_a_gain_says_when_it_has_paid_for_itself() -> None:
    """What took T takes T / 2 now: half of 400 s is what the search took."""
    found = make_recommendation(verdict="faster", speedup=TWICE)
    summary = make_summary(recommendation=found, wall_s=200.0, promised_s=150.0)
    assert say_course(summary).endswith(
        "trials are the most. Breaks even after 6 min 40 s of training at the old speed."
    )


def test_a_search_that_went_on_from_an_earlier_sitting_does_not_know_what_it_took_in_all() -> None:
    summary = make_summary(recommendation=make_recommendation(verdict="faster", speedup=TWICE), promised_s=None)
    assert "Breaks even" not in say_course(summary)


def test_what_is_not_confirmed_to_be_faster_pays_for_nothing() -> None:
    for verdict, speedup in (("already_best", Ratio(value=1.0, low=1.0, high=1.0)), ("unconfirmed", None)):
        found = make_recommendation(verdict=verdict, speedup=speedup)
        assert "Breaks even" not in say_course(make_summary(recommendation=found, promised_s=150.0))


def test_the_outcomes_are_counted_and_the_reason_to_end_is_told_once() -> None:
    told = say_course(make_summary(stopped_because=note("little_expected", gain_fraction=0.003)))
    assert told.count("Stopped: another trial is expected to bring 0.3 %.") == 1
    assert "ok" in told
