"""A run's summary is read back as it was written."""

from __future__ import annotations

from math import inf

import pytest

from autotune.config.plan import Budget, Objective
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import Recommendation, RunSummary, RunVariation, changed_settings
from autotune.records.trial import runs_of
from autotune.space.scaling import LrAdvice
from tests.factories import (
    make_confirmation,
    make_environment,
    make_facts,
    make_record,
    make_summary,
    make_trials,
    run_again,
    said,
)


@pytest.mark.parametrize("has_recommendation", [True, False])
@pytest.mark.parametrize("memory_limit", [0.9, 1.0, "20GiB"])
def test_a_summary_comes_back_from_json_exactly(
    has_recommendation: bool,
    memory_limit: float | str,
) -> None:
    recommendation = Recommendation(
        config=TrainingConfig(lr=1 / 3),
        number=3,
        verdict="unconfirmed",
        speedup=Interval(value=1.1, low=0.0, high=inf),
        gain_probability=2 / 3,
        more_s=1 / 3,
        lr_advice=LrAdvice(
            lr=1 / 3, rule="sqrt", batch_ratio=4, betas=(0.6, 0.996), eps=5e-9, notes=(said("one"),)
        ),
        confirmations=(
            make_confirmation(0, 100.0, 90.0),
            make_confirmation(3, 1 / 7, num_workers=2),
        ),
    )
    summary = RunSummary(
        name="quickstart",
        environment=make_environment(),
        facts=make_facts(),
        objective=Objective.model_validate({"memory_limit": memory_limit}),
        budget=Budget(timeout_s=300),
        baseline=TrainingConfig(),
        limit_bytes=2**37,
        memory_source="PSS of the process tree",
        seed=0,
        trials=(run_again(make_record(0), 1 / 7), make_record(1)),
        run_variation=RunVariation(sd=0.02, degrees_of_freedom=3.0),
        recommendation=recommendation if has_recommendation else None,
        stopped_because=said("the budget is spent"),
        wall_s=12.5,
        autotune_version="0.1.0",
    )
    assert RunSummary.model_validate_json(summary.model_dump_json()) == summary
    assert Recommendation.model_validate_json(recommendation.model_dump_json()) == recommendation


def test_the_runs_of_a_trial_are_all_that_measured_something() -> None:
    first, *others = make_trials()
    summary = make_summary(trials=(run_again(first, None, 77.0), *others))
    assert [run.samples_per_s for run in runs_of(summary.trials, 0)] == [
        5123.4,
        5049.0,
        5128.0,
        77.0,
    ]
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
