"""A record tells how its trial ended, and is kept exactly."""

from __future__ import annotations

from math import inf, nan

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.records.trial import Failure, Outcome, Score, TrialRecord, TrialResult
from tests.factories import make_measurement, make_record, make_trial, run_again


@pytest.mark.parametrize(
    ("result", "score", "expected"),
    [
        ("ok", Score(value=1.0, feasible=True), ("ok", "", True)),
        (
            "ok",
            Score(value=2.0, feasible=False, violation=0.1, reason="above the limit"),
            ("over_memory", "above the limit", False),
        ),
        ("oom", None, ("oom", "oom", False)),
        ("ok", None, ("ok", "", False)),  # not scored yet
    ],
)
def test_outcome_and_reason(
    result: Outcome, score: Score | None, expected: tuple[str, str, bool]
) -> None:
    reason = "" if result == "ok" else result
    record = make_record(result=TrialResult(outcome=result, reason=reason), score=score)
    assert (record.outcome, record.reason, record.is_feasible) == expected


def run_often(*outcomes: Outcome, number: int = 1) -> TrialRecord:
    """A trial that went well, and whose further runs ended so."""
    record = make_trial(number, TrainingConfig(), measurement=make_measurement())
    for one in outcomes:
        record = record.with_run(TrialResult(outcome=one, reason=one))
    return record


@pytest.mark.parametrize("number", [0, 1])
def test_a_further_run_that_failed_refutes_its_trial_for_good(number: int) -> None:
    refuted = run_often("ok", "oom", "ok", number=number)
    assert not refuted.is_feasible
    assert refuted.refuted_by is not None
    assert refuted.refuted_by.outcome == "oom"
    assert refuted.outcome == "ok", "of its first run"


@pytest.mark.parametrize(
    ("number", "outcomes", "is_feasible"),
    [
        (1, ("ok", "ok"), True),
        (1, ("timeout",), True),
        (1, ("timeout", "ok"), True),
        (1, ("timeout", "ok", "timeout"), False),
        (0, ("timeout", "timeout", "timeout"), True),
        (0, ("timeout", "crashed"), False),
    ],
)
def test_one_deadline_may_be_chance_and_two_refute_any_but_the_baseline(
    number: int, outcomes: tuple[Outcome, ...], is_feasible: bool
) -> None:
    assert run_often(*outcomes, number=number).is_feasible == is_feasible


def test_a_trial_that_failed_is_no_candidate_however_its_further_runs_ended() -> None:
    record = make_record(result=TrialResult(outcome="oom"), score=None)
    again = record.with_run(TrialResult(outcome="ok", measurement=make_measurement()))
    assert not again.is_feasible


def test_runs_are_the_measurements_of_all_runs_in_their_order() -> None:
    record = run_again(
        make_trial(1, TrainingConfig(), measurement=make_measurement(100.0)), 90.0, None, 110.0
    )
    assert [run.samples_per_s for run in record.runs] == [100.0, 90.0, 110.0]


def test_a_record_comes_back_from_json_exactly() -> None:
    result = TrialResult(
        outcome="oom",
        reason='wörds, "quotes"\nand lines',
        measurement=make_measurement(1 / 3, samples_per_s_ci=(0.1, inf), loss=nan),
        failure=Failure(signature="ValueError at net.py:12", traceback="Traceback…"),
        violation=0.1 + 0.2,
        wall_s=1e-9,
        log="logs/7.log",
    )
    record = make_record(number=7, results=(result, result.model_copy(update={"at_s": 1 / 3})))
    line = record.model_dump_json()
    assert "\n" not in line
    assert repr(TrialRecord.model_validate_json(line)) == repr(record)


def test_a_trials_own_time_leaves_out_what_came_after_its_window() -> None:
    result = TrialResult(outcome="ok", measurement=make_measurement(1.0, after_s=3.0), wall_s=10.0)
    assert result.own_s == 7
    assert TrialResult(outcome="oom", wall_s=2.0).own_s == 2
