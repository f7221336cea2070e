"""What is told of a search, and when: headline, headroom, course. The sentences themselves stand in golden files."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Ceilings, Interval
from autotune.records.result import RunSummary
from autotune.report.sentences import describe_course
from tests.factories import FAST, make_measurement, make_recommendation, make_summary, make_trial
from tests.report.cases import ceilings, larger_batch, loaded, single_runs
from tests.report.forms import report_of

TWICE = Interval(value=2.0, low=1.9, high=2.1)
PAID = "6 min 40 s"


def headroom(summary: RunSummary) -> str:
    return report_of(summary).headroom


@pytest.mark.parametrize(
    ("others", "told"), [((0.9, 0.1), "0.9"), ((0.0, 0.5), "0.5"), ((0.3, 0.8), "0.8")]
)
def test_a_ratio_of_loaded_windows_is_doubted(others: tuple[float, float], told: str) -> None:
    report = report_of(loaded(*others))
    assert told in report.headline
    (doubt,) = report.doubts
    assert all(f"{share:.1f}" in doubt for share in others)


def test_a_quiet_machine_is_not_mentioned() -> None:
    report = report_of(loaded(0.1, 0.1))
    assert report.headline == report_of(single_runs()).headline
    assert report.doubts == ()


def test_uncertain_larger_batch_is_left_out() -> None:
    summary = larger_batch()
    assert summary.recommendation is not None
    assert summary.recommendation.larger_batch is not None
    larger = summary.recommendation.larger_batch.model_copy(update={"break_even": None})
    found = summary.recommendation.model_copy(update={"larger_batch": larger})
    assert report_of(summary).headline != report_of(make_summary()).headline
    assert (
        report_of(make_summary(recommendation=found)).headline == report_of(make_summary()).headline
    )


def test_without_ceilings_there_is_no_headroom() -> None:
    assert headroom(single_runs()) == ""
    assert headroom(single_runs(ceilings(None, 500.0))) == "", "a lone ceiling, far below the rate"


def test_infeasible_baseline_has_no_headroom() -> None:
    best = ceilings(9000.0, 4100.0)
    found: dict[str, Any] = {"verdict": "baseline_infeasible", "speedup": None}
    told = headroom(single_runs(ceilings(2000.0, 2000.0), best, **found))
    assert told == headroom(single_runs({}, best, **found)) != ""


def test_ceiling_is_of_a_run_with_the_same_side() -> None:
    """The device's ceiling of the same step, measured in a trial with other loader settings."""
    other = FAST.model_copy(update={"num_workers": 2})
    ceiling = Ceiling(samples_per_s=8000.0, samples=800, seconds=0.1, batches=8)
    donor = make_measurement(3000.0, ceilings=Ceilings(device=ceiling), device_ceiling=8000.0)
    summary = single_runs({}, ceilings(4100.0))
    assert headroom(summary) == ""
    summary = summary.model_copy(
        update={"trials": (*summary.trials, make_trial(2, other, measurement=donor))}
    )
    assert "98 %" in headroom(summary)


rates = st.one_of(
    st.floats(min_value=1e-3, max_value=1e9), st.floats(min_value=500.0, max_value=10_000.0)
)


@given(own=st.tuples(rates, rates), best=st.tuples(rates, rates))
def test_no_share_is_above_the_whole(own: tuple[float, float], best: tuple[float, float]) -> None:
    """Noise reads as 100 %; a ceiling that a rate exceeds by more is none."""
    told = headroom(single_runs(ceilings(*own), ceilings(*best)))
    shares = [float(share) for share in re.findall(r"([\d.]+) % of", told)]
    assert all(share <= 100 for share in shares)
    assert not {"unknown", "nan", "inf"} & set(re.findall(r"\w+", told))


def test_break_even_of_a_gain() -> None:
    """What took T takes T / 2 now: half of 400 s is what the search took."""
    found = make_recommendation(verdict="faster", speedup=TWICE)
    assert PAID in describe_course(
        make_summary(recommendation=found, wall_s=200.0, promised_s=150.0)
    )
    resumed = make_summary(recommendation=found, wall_s=200.0, promised_s=None)
    assert PAID not in describe_course(resumed), "how long it took in all is not known"


def test_unproven_gain_has_no_break_even() -> None:
    for verdict in ("already_best", "unconfirmed"):
        found = make_recommendation(verdict=verdict, speedup=TWICE)
        assert PAID not in describe_course(
            make_summary(recommendation=found, wall_s=200.0, promised_s=150.0)
        )
