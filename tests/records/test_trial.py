"""A record tells how its trial ended, and is kept exactly."""

from __future__ import annotations

from math import inf, nan
from typing import get_args

import pytest

from autotune.records.trial import Failure, Outcome, Score, TrialRecord, TrialResult
from tests.factories import make_measurement, make_record

_FAILED = [outcome for outcome in get_args(Outcome) if outcome not in {"ok", "over_memory"}]


def test_a_trial_above_the_limit_is_over_memory_and_says_how_far() -> None:
    record = make_record(score=Score(value=2.0, feasible=False, violation=0.1, reason="above the limit"))
    assert (record.outcome, record.reason, record.is_feasible) == ("over_memory", "above the limit", False)
    assert record.measurement is not None


def test_a_trial_within_the_limit_is_ok() -> None:
    record = make_record()
    assert (record.outcome, record.reason, record.is_feasible) == ("ok", "", True)


@pytest.mark.parametrize("outcome", _FAILED)
def test_a_trial_that_failed_has_its_results_outcome_and_reason(outcome: Outcome) -> None:
    record = make_record(result=TrialResult(outcome=outcome, reason="why"), score=None)
    assert (record.outcome, record.reason, record.is_feasible, record.measurement) == (outcome, "why", False, None)


def test_a_trial_that_is_not_scored_yet_is_no_candidate() -> None:
    assert not make_record(score=None).is_feasible


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_a_record_comes_back_from_json_exactly(outcome: Outcome) -> None:
    result = TrialResult(
        outcome=outcome,
        reason='wörds, "quotes"\nand lines',
        measurement=make_measurement(1 / 3, samples_per_s_ci=(0.1, inf), loss=nan),
        failure=Failure(signature="ValueError at net.py:12", traceback="Traceback…"),
        violation=0.1 + 0.2,
        wall_s=1e-9,
        log="logs/7.log",
    )
    record = make_record(result=result, number=7)
    line = record.model_dump_json()
    assert "\n" not in line
    assert repr(TrialRecord.model_validate_json(line)) == repr(record)


def test_a_trials_own_time_leaves_out_what_came_after_its_window() -> None:
    result = TrialResult(outcome="ok", measurement=make_measurement(1.0, after_s=3.0), wall_s=10.0)
    assert result.own_s == 7
    assert TrialResult(outcome="oom", wall_s=2.0).own_s == 2
