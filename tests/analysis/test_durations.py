from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.durations import (
    SHORTEST_WINDOW_S,
    queue_s,
    rounds_of,
    shortest_trial_s,
    typical_overhead_s,
    typical_s,
)
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings.training_config import TrainingConfig
from tests.evidence import make_measurement


def record(wall_s: float, *, number: int = 1, after_s: float = 0.0, is_measured: bool = True) -> TrialRecord:
    measurement = make_measurement(100.0, after_s=after_s) if is_measured else None
    result = TrialResult(outcome="ok" if is_measured else "crashed", measurement=measurement, wall_s=wall_s)
    return TrialRecord(number=number, config=TrainingConfig(), result=result)


def test_a_trial_takes_what_half_of_them_take() -> None:
    records = [record(10.0), record(11.0), record(500.0)]
    window_s = sum(block.seconds for block in make_measurement(100.0).blocks)
    assert typical_s(records) == 11.0
    assert typical_overhead_s(records) == pytest.approx(max(0.0, 11.0 - window_s))
    assert shortest_trial_s(records) == typical_overhead_s(records) + SHORTEST_WINDOW_S


def test_what_the_baseline_alone_is_looked_at_for_is_no_part_of_a_trial() -> None:
    assert typical_s([record(17.0, number=0, after_s=6.0)]) == 11.0
    assert typical_overhead_s([record(17.0, number=0, after_s=6.0)]) == typical_overhead_s([record(11.0)])
    assert typical_s([record(17.0, after_s=6.0)]) == 17.0, "another trial with ceilings of its own may come again"


def test_what_was_not_measured_tells_nothing_of_the_overhead() -> None:
    assert typical_overhead_s([record(100.0, is_measured=False)]) == typical_overhead_s([])


@given(st.integers(1, 200), st.integers(1, 50))
def test_rounds_hold_all_trials_and_none_is_empty(trials: int, slots: int) -> None:
    rounds = rounds_of(trials, slots=slots)
    assert (rounds - 1) * slots < trials <= rounds * slots
    after_one = rounds_of(trials, slots=slots, is_first_alone=True) - 1
    assert (after_one - 1) * slots < trials - 1 <= after_one * slots
    assert rounds_of(trials, slots=1) == rounds_of(trials, slots=1, is_first_alone=True) == trials


@pytest.mark.parametrize(
    ("changes", "epoch_samples", "seconds"),
    [
        ({"num_workers": 4, "prefetch_factor": 2}, None, 3 * 4 * 2 * 32 / 100.0),
        ({"num_workers": 4}, None, 3 * 4 * 2 * 32 / 100.0),
        ({"num_workers": 4, "prefetch_factor": 8}, 500, 3 * 500 / 100.0),
        ({"num_workers": 4, "strategy": "ddp", "world_size": 2}, None, 3 * 2 * 4 * 2 * 32 / 100.0),
        ({}, None, 0.0),
    ],
)
def test_the_queues_that_a_trial_has_to_see(
    changes: dict[str, object], epoch_samples: int | None, seconds: float
) -> None:
    config = TrainingConfig.model_validate({"micro_batch_size": 32, **changes})
    assert queue_s(config, 100.0, epoch_samples) == pytest.approx(seconds)
