"""What differs between two searches, and whether their rates differ by more than noise."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.records.result import RunSummary, RunVariation
from autotune.records.trial import TrialResult
from autotune.report.comparison import Comparison, compare_summaries
from tests.factories import FAST, SAME_BATCH, make_recommendation, make_rich_summary, make_summary
from tests.factories.summaries import LEARNED
from tests.report.cases import trials_at

NAMES = "runs/a", "runs/b"


def compared(second: RunSummary, first: RunSummary | None = None) -> Comparison:
    return compare_summaries(first or make_summary(), second, NAMES)


def faster(times: float, **changes: Any) -> RunSummary:
    """The same search on a machine that is so many times as fast."""
    return make_summary(trials=trials_at(times), **changes)


def test_a_search_beside_itself_differs_in_nothing() -> None:
    found = compared(make_summary())
    assert not found.is_beyond_noise
    assert (found.machine, found.workload, found.asked) == ({}, {}, {})
    assert found.recommended is not None
    assert (found.recommended.settings, found.baseline.settings) == ({}, {})
    assert found.recommended.ratio is not None
    assert found.recommended.ratio.value == pytest.approx(1.0)


@pytest.mark.parametrize("times", [0.8, 1.25])
def test_rates_that_differ_by_more_than_runs_do_are_beyond_noise(times: float) -> None:
    found = compared(faster(times))
    assert found.is_beyond_noise
    for config in (found.baseline, found.recommended):
        assert config is not None
        assert config.ratio is not None
        assert config.ratio.value == pytest.approx(times)
        assert config.is_beyond_noise


def test_the_wider_spread_of_the_two_searches_says_what_noise_is() -> None:
    wide = RunVariation(sd=0.2, degrees_of_freedom=4.0, source="workload")
    assert compared(faster(1.1)).is_beyond_noise
    found = compared(faster(1.1), make_summary(run_variation=wide))
    assert found.spread == wide
    assert not found.is_beyond_noise
    assert compared(faster(1.1), make_summary(run_variation=LEARNED)).spread == LEARNED


def test_settings_machine_and_what_was_asked_for_are_told_where_they_differ() -> None:
    first = make_summary()
    machine = first.environment.model_copy(update={"torch": "9.9.9", "cores": 96})
    facts = first.facts.model_copy(update={"dataset_length": 77})
    slow = FAST.model_copy(update={"num_workers": 2})
    found = compared(
        make_summary(
            environment=machine,
            facts=facts,
            seed=7,
            recommendation=make_recommendation(config=slow),
            baseline=SAME_BATCH,
        )
    )
    assert {"torch", "processor", "fingerprint"} == set(found.machine)
    assert found.machine["torch"][1].startswith("9.9.9")
    assert found.workload["data"][1].endswith("77 samples")
    assert found.asked["seed"] == ("0", "7")
    assert found.recommended is not None
    assert found.recommended.settings["num_workers"] == (4, 2)
    assert found.baseline.settings["amp_dtype"] == ("float32", "bfloat16")


def test_where_nothing_is_feasible_the_baselines_are_compared_alone() -> None:
    found = compared(make_summary(recommendation=None))
    assert found.recommended is None
    assert found.verdicts == ("faster", "nothing_feasible")


def test_the_slower_side_of_what_is_recommended_is_told() -> None:
    found = compared(make_rich_summary(), make_rich_summary())
    assert found.limits == ("device", "device")
    assert compared(make_summary()).limits == (None, None)


def test_any_two_searches_can_be_compared(any_summary: RunSummary) -> None:
    for found in (
        compared(any_summary),
        compared(make_summary(), any_summary),
        compared(any_summary, any_summary),
    ):
        assert Comparison.model_validate_json(found.model_dump_json()) == found


def test_a_recommendation_that_one_search_alone_has_is_a_change() -> None:
    assert compared(make_summary(recommendation=None)).is_changed
    assert not compared(
        make_summary(recommendation=None), make_summary(recommendation=None)
    ).is_changed


def test_a_baseline_that_one_search_alone_has_measured_is_a_change_though_neither_recommends_anything() -> (
    None
):
    measured = make_summary(recommendation=None)
    first, *others = measured.trials
    crashed = first.model_copy(update={"results": (TrialResult(outcome="crashed", reason="no"),)})
    assert compared(measured.model_copy(update={"trials": (crashed, *others)}), measured).is_changed
