"""Estimate the time of a search by its budget and its trials, and when it has paid off."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import Budget
from autotune.config.training_config import TrainingConfig
from autotune.models.time_estimate import (
    Pace,
    expected_s,
    first_batches_s,
    measuring_s,
    overhead_s,
    payback_s,
    typical_overhead_s,
    typical_run_s,
    typical_s,
)
from autotune.policy import POLICY
from autotune.records.trial import TrialRecord, TrialResult
from tests.factories import make_measurement, make_record, with_first

A_TRIAL_S = 1.1 * 12.0
"""Seconds of a trial, with its share of the baseline's further runs."""
LOOK_S = 8.0
"""Seconds of the curves, after the baseline."""
SETTLING_S = 4 * 12.0
"""Seconds of the runs that decide."""
OPEN_END: dict[str, Any] = {"most_trials": Budget().max_trials, "may_stop_early": True}


def asked_for(trials: int) -> dict[str, Any]:
    """Return the budget of a number of trials."""
    return {"most_trials": trials, "may_stop_early": False}


def make_records(count: int, overhead_s: float = 2.0) -> list[TrialRecord]:
    """Return trials, each with a window of 10 s and `overhead_s` around it."""
    result = TrialResult(outcome="ok", measurement=make_measurement(), wall_s=10.0 + overhead_s)
    return [make_record(number, result=result) for number in range(count)]


@given(
    st.integers(1, 60) | st.none(),
    st.floats(0.0, 1e3),
    st.integers(1, 8),
    st.floats(0.0, 60.0),
    st.booleans(),
)
def test_nothing_is_promised_beyond_the_timeout(
    trials: int | None, left_s: float, slots: int, probe_s: float, is_guided: bool
) -> None:
    budget = OPEN_END if trials is None else asked_for(trials)
    pace = Pace(**budget, slots=slots, probe_s=probe_s, left_s=left_s, is_guided=is_guided)
    assert 0 <= expected_s(pace) <= left_s


def test_further_trials_take_the_usual_time() -> None:
    paces = [Pace(**asked_for(count), records=make_records(4)) for count in (10, 11, 20)]
    ten, eleven, twenty = map(expected_s, paces)
    assert eleven - ten == pytest.approx(A_TRIAL_S)
    assert twenty - ten == pytest.approx(10 * A_TRIAL_S)


@pytest.mark.parametrize("build_s", [0.0, 30.0])
def test_settling_is_left_at_the_end(build_s: float) -> None:
    left = expected_s(Pace(**asked_for(10), records=make_records(10), build_s=build_s))
    assert left == pytest.approx(SETTLING_S + 4 * build_s)


def test_a_baseline_alone_is_compared_with_nothing() -> None:
    assert expected_s(Pace(**asked_for(1), records=make_records(1))) == 0


def test_what_is_left_falls_with_every_trial() -> None:
    left = [expected_s(Pace(**asked_for(10), records=make_records(done))) for done in range(1, 11)]
    assert left == sorted(left, reverse=True)
    assert left[0] - left[-1] == pytest.approx(LOOK_S + 9 * A_TRIAL_S)


def test_trials_side_by_side_share_the_time() -> None:
    alone, together = (
        expected_s(Pace(**asked_for(10), records=make_records(2), slots=slots)) for slots in (1, 4)
    )
    assert alone - together == pytest.approx((8 - 2) * A_TRIAL_S)


@pytest.mark.parametrize("is_guided", [True, False])
def test_early_stop_is_expected(is_guided: bool) -> None:
    for done in (0, 1, 5):
        records = make_records(done)
        open_end, most = (
            expected_s(Pace(**budget, records=records, is_guided=is_guided))
            for budget in (OPEN_END, asked_for(Budget().max_trials))
        )
        assert open_end < most


def test_long_search_expects_a_trial() -> None:
    late, later, last = (
        expected_s(Pace(**OPEN_END, records=make_records(done))) for done in (25, 30, 40)
    )
    assert late == later == pytest.approx(last + A_TRIAL_S)


def test_slow_probe_makes_trials_longer() -> None:
    quick, slow = (expected_s(Pace(**asked_for(10), probe_s=probe_s)) for probe_s in (1.0, 3.0))
    assert slow - quick > 10 * (3.0 - 1.0)


@given(st.floats(1.0, 1e5), st.floats(1.001, 100.0))
def test_payback(search_s: float, speedup: float) -> None:
    before_s = payback_s(search_s, speedup)
    assert before_s is not None
    assert before_s - before_s / speedup == pytest.approx(search_s, rel=1e-6)


@pytest.mark.parametrize("speedup", [1.0, 0.7])
def test_what_is_no_faster_never_pays(speedup: float) -> None:
    assert payback_s(60.0, speedup) is None


# Trials


def record(
    wall_s: float, *, number: int = 1, after_s: float = 0.0, is_measured: bool = True
) -> TrialRecord:
    measurement = make_measurement(100.0, after_s=after_s) if is_measured else None
    result = TrialResult(
        outcome="ok" if is_measured else "crashed", measurement=measurement, wall_s=wall_s
    )
    return TrialRecord(number=number, config=TrainingConfig(), results=(result,))


def test_a_trial_takes_what_half_of_them_take() -> None:
    records = [record(10.0), record(11.0), record(500.0)]
    window_s = sum(block.seconds for block in make_measurement(100.0).blocks)
    assert typical_s(records) == 11.0
    assert typical_overhead_s(records, POLICY.estimates) == pytest.approx(max(0.0, 11.0 - window_s))


def test_a_further_run_takes_a_start_and_a_window() -> None:
    assert typical_run_s(make_records(4, overhead_s=3.0), 1.5, POLICY.estimates) == 13.0
    assert (
        typical_run_s([], 1.5, POLICY.estimates) == typical_overhead_s([], POLICY.estimates) + 1.5
    )


def test_baselines_extras_are_no_part_of_a_trial() -> None:
    assert typical_s([record(17.0, number=0, after_s=6.0)]) == 11.0
    assert typical_overhead_s(
        [record(17.0, number=0, after_s=6.0)], POLICY.estimates
    ) == typical_overhead_s([record(11.0)], POLICY.estimates)
    assert typical_s([record(17.0, after_s=6.0)]) == 17.0, (
        "another trial with ceilings of its own may come again"
    )


def test_unmeasured_trials_have_no_overhead() -> None:
    assert typical_overhead_s(
        [record(100.0, is_measured=False)], POLICY.estimates
    ) == typical_overhead_s([], POLICY.estimates)


@pytest.mark.parametrize(
    ("changes", "epoch_samples", "seconds"),
    [
        ({"num_workers": 0}, None, 0.0),
        ({"num_workers": 2, "prefetch_factor": 8}, None, 2 * 2 * 32 / 100.0),
        ({"num_workers": 8}, None, 2 * 8 * 32 / 100.0),
        ({"num_workers": 8}, 100, 1.0),
    ],
)
def test_first_batches(
    changes: dict[str, object], epoch_samples: int | None, seconds: float
) -> None:
    config = TrainingConfig.model_validate({"micro_batch_size": 32, **changes})
    assert first_batches_s(config, 100.0, epoch_samples, POLICY.estimates) == pytest.approx(seconds)


def test_long_steps_make_a_trial_longer() -> None:
    config = TrainingConfig(micro_batch_size=64, grad_accum_steps=2)
    assert measuring_s(config, 1e6, None, POLICY.estimates) == 10.0
    assert measuring_s(config, 32.0, None, POLICY.estimates) == 6 * 128 / 32.0
    queues = config.model_copy(update={"num_workers": 8, "prefetch_factor": 8})
    assert measuring_s(queues, 32.0, None, POLICY.estimates) == first_batches_s(
        queues, 32.0, None, POLICY.estimates
    )


def test_own_process_builds_again() -> None:
    (record,) = make_records(1)
    measurement = record.result.measurement
    assert measurement is not None
    shared = measurement.model_copy(update={"build_s": 0.5})
    record = with_first(record, measurement=shared)
    assert overhead_s(record, 60.0) == overhead_s(record, 0.0) + 59.5
    assert overhead_s(record, 0.1) == overhead_s(record, 0.0)
