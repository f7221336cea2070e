"""Differences between two searches, and whether throughput differs by more than noise."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.records.result import RunSummary, RunVariation
from autotune.records.trial import TrialResult
from autotune.report.comparison import Comparison, compare_summaries, comparison_sections
from tests.factories import make_rich_summary, make_summary
from tests.factories.summaries import LEARNED
from tests.report.cases import comparison_cases, trials_at
from tests.report.forms import comparison_on_console

NAMES = "runs/a", "runs/b"


def compared(second: RunSummary, first: RunSummary | None = None) -> Comparison:
    return compare_summaries(first or make_summary(), second, NAMES)


def faster(times: float, **changes: Any) -> RunSummary:
    """Return the same search on a machine that is `times` as fast."""
    return make_summary(trials=trials_at(times), **changes)


def test_equal_searches_do_not_differ() -> None:
    found = compared(make_summary())
    assert not found.is_beyond_noise
    assert (found.machine, found.workload, found.asked) == ({}, {}, {})
    assert found.recommended is not None
    assert (found.recommended.settings, found.baseline.settings) == ({}, {})
    assert found.recommended.ratio is not None
    assert found.recommended.ratio.value == pytest.approx(1.0)
    titles = [section.title for section in comparison_sections(found)]
    assert titles == ["The two searches", "Recommended settings", "Baseline", "Noise"]


@pytest.mark.parametrize("times", [0.8, 1.25])
def test_large_differences_are_beyond_noise(times: float) -> None:
    found = compared(faster(times))
    assert found.is_beyond_noise
    for config in (found.baseline, found.recommended):
        assert config is not None
        assert config.ratio is not None
        assert config.ratio.value == pytest.approx(times)
        assert config.is_beyond_noise


def test_noise_is_the_wider_variation() -> None:
    wide = RunVariation(sd=0.2, degrees_of_freedom=4.0, source="workload")
    assert compared(faster(1.1)).is_beyond_noise
    found = compared(faster(1.1), make_summary(run_variation=wide))
    assert found.spread == wide
    assert not found.is_beyond_noise
    assert compared(faster(1.1), make_summary(run_variation=LEARNED)).spread == LEARNED


def test_differences_are_listed() -> None:
    found = comparison_cases()["changed"]
    assert {"torch", "processor", "fingerprint"} == set(found.machine)
    assert found.machine["torch"][1].startswith("9.9.9")
    assert found.workload["data"][1].endswith("77 samples")
    assert found.asked["seed"] == ("0", "7")
    assert found.recommended is not None
    assert found.recommended.settings["num_workers"] == (4, 2)
    assert found.baseline.settings["amp_dtype"] == ("float32", "bfloat16")


def test_slower_side_is_named() -> None:
    found = compared(make_rich_summary(), make_rich_summary())
    assert found.limits == ("device", "device")
    assert compared(make_summary()).limits == (None, None)


def test_any_two_searches_can_be_compared(any_summary: RunSummary) -> None:
    for found in (compared(any_summary), compared(make_summary(), any_summary)):
        assert Comparison.model_validate_json(found.model_dump_json()) == found


def test_one_sided_results_are_a_change() -> None:
    nothing = make_summary(recommendation=None)
    found = compared(nothing)
    assert found.is_changed
    assert found.recommended is None
    assert found.verdicts == ("faster", "nothing_feasible")
    assert not compared(nothing, nothing).is_changed
    first, *others = nothing.trials
    crashed = first.model_copy(update={"results": (TrialResult(outcome="crashed", reason="no"),)})
    assert compared(nothing.model_copy(update={"trials": (crashed, *others)}), nothing).is_changed


def test_it_fits_80_columns(any_summary: RunSummary) -> None:
    found = compare_summaries(
        any_summary, make_rich_summary(), ("runs/2026-11-25_10-00-00", "runs/b")
    )
    text = comparison_on_console(found)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).startswith(found.headline)
