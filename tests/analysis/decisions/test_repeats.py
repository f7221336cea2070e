"""What is run again: what leads or challenges by no more than noise, and the baseline, once each."""

from __future__ import annotations

from math import log

from autotune.analysis.decisions.repeats import unsure_at_the_end, unsure_before_a_switch
from autotune.records.run_spread import RunSpread
from autotune.records.trial import Score, TrialRecord, TrialResult
from tests.factories import make_measurement, make_record, make_window

SPREAD = RunSpread(sd=0.05, degrees_of_freedom=5.0)


def trial(number: int, rate: float, repeats: int = 0, *, feasible: bool = True) -> TrialRecord:
    result = TrialResult(outcome="ok", measurement=make_measurement(rate))
    score = Score(value=rate / 100, feasible=feasible)
    return make_record(number, result=result, score=score, repeats=(result,) * repeats)


def believed(*records: TrialRecord) -> dict[int, float]:
    return {record.number: log(run.samples_per_s) for record in records for run in record.runs[:1]}


def switch(*records: TrialRecord, leading: int | None) -> int | None:
    found = unsure_before_a_switch(records, believed(*records), SPREAD, leading)
    return None if found is None else found.number


def end(*records: TrialRecord) -> int | None:
    found = unsure_at_the_end(records, believed(*records), SPREAD)
    return None if found is None else found.number


def test_before_a_switch_challenger_and_leader_run_again_once_each() -> None:
    assert switch(trial(0, 100), trial(1, 105), leading=0) == 1
    assert switch(trial(0, 100), trial(1, 105, repeats=1), leading=0) == 0
    assert switch(trial(0, 100, repeats=1), trial(1, 105, repeats=1), leading=0) is None


def test_a_clear_gain_leads_at_once() -> None:
    assert switch(trial(0, 100), trial(1, 150), leading=0) is None


def test_nothing_is_run_again_where_nobody_challenges() -> None:
    assert switch(trial(0, 100), trial(1, 90), leading=0) is None
    assert switch(trial(0, 100), trial(1, 105), leading=None) is None


def test_before_the_end_the_best_its_rival_and_the_baseline_have_run_twice() -> None:
    assert end(trial(0, 100), trial(1, 150), trial(2, 148)) == 1
    assert end(trial(0, 100), trial(1, 150, repeats=1), trial(2, 148)) == 2
    assert end(trial(0, 100), trial(1, 150, repeats=1), trial(2, 100)) == 0
    assert end(trial(0, 100, repeats=1), trial(1, 150, repeats=1), trial(2, 100)) is None


def test_what_is_not_feasible_is_not_run_again() -> None:
    assert end(trial(0, 100, repeats=1), trial(1, 150, feasible=False)) is None
    assert end(trial(0, 100)) is None, "nothing is compared"


def test_a_repeat_that_failed_is_not_tried_again() -> None:
    failed = make_record(
        1,
        result=TrialResult(outcome="ok", measurement=make_measurement(150.0)),
        score=Score(value=1.5, feasible=True),
        repeats=(TrialResult(outcome="timeout"),),
    )
    assert end(trial(0, 100, repeats=1), failed) is None


def test_runs_that_the_device_holds_are_clear_sooner() -> None:
    def held(number: int, rate: float) -> TrialRecord:
        result = TrialResult(outcome="ok", measurement=make_measurement(rate, window=make_window(host_ahead_s=1.0)))
        return make_record(number, result=result, score=Score(value=rate / 100, feasible=True))

    spread = SPREAD.model_copy(update={"device": RunSpread(sd=0.004, degrees_of_freedom=5.0)})
    for first, second, is_sure in ((trial(0, 100), trial(1, 105), False), (held(0, 100), held(1, 105), True)):
        found = unsure_before_a_switch((first, second), believed(first, second), spread, 0)
        assert (found is None) == is_sure
