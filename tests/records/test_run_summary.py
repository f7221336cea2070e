"""A run's summary is read back as it was written."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from autotune.config.plan import Objective
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import RunSummary, changed_settings
from autotune.records.trial import runs_of
from tests.factories import (
    make_recommendation,
    make_record,
    make_summary,
    make_trials,
    run_again,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recommendation": None},
        {"objective": Objective.model_validate({"memory_limit": "20GiB"})},
        {
            "recommendation": make_recommendation(
                speedup=Interval(value=1.1, low=0.0, high=inf), more_s=1 / 3
            )
        },
        {"trials": (run_again(make_record(0), 1 / 7), make_record(1))},
    ],
)
def test_a_summary_comes_back_from_json_exactly(changes: dict[str, Any]) -> None:
    summary = make_summary(**changes)
    assert RunSummary.model_validate_json(summary.model_dump_json()) == summary


def test_the_runs_of_a_trial_are_all_that_measured_something() -> None:
    first, *others = make_trials()
    summary = make_summary(trials=(run_again(first, None, 77.0), *others))
    own = [run.samples_per_s for run in runs_of(summary.trials, 0)]
    assert own == [5123.4, 5049.0, 5128.0, 77.0]
    assert runs_of(summary.trials, 5) == (), "it ran out of memory"
    assert runs_of(summary.trials, 99) == ()


def test_changed_settings_are_the_differences_alone() -> None:
    baseline = TrainingConfig()
    assert changed_settings(baseline, baseline) == {}
    changed = TrainingConfig(num_workers=4, amp_dtype="bfloat16", strategy="ddp", ddp=DdpConfig())
    assert changed_settings(changed, baseline) == {
        "num_workers": (0, 4),
        "amp_dtype": ("float32", "bfloat16"),
        "strategy": ("single", "ddp"),
        "ddp": (None, DdpConfig().model_dump()),
    }
