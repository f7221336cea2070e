"""What the plots show: every trial, its fate, the limit and the ceilings."""

from __future__ import annotations

import pytest

from autotune.records.result import RunSummary
from autotune.report.blocks import Plot
from tests.factories import BASELINE, make_measurement, make_rich_summary, make_summary, make_trial
from tests.report.forms import plots_of


def by_name(summary: RunSummary) -> dict[str, Plot]:
    return {plot.name: plot for plot in plots_of(summary)}


def test_every_trial_has_a_mark(any_summary: RunSummary) -> None:
    for plot in plots_of(any_summary):
        assert len(plot.marks) == len(any_summary.trials)


def test_failed_trial_has_no_height() -> None:
    marks = by_name(make_summary())["rate-by-batch"].marks
    assert (marks[5].x, marks[5].y, marks[5].fate) == (256, None, "failed")
    assert (marks[3].y, marks[3].fate) == (12500.0, "over_memory")


def test_marks_have_roles() -> None:
    roles = [mark.role for mark in by_name(make_summary())["rate-by-workers"].marks]
    assert roles[:3] == ["baseline", "recommended", ""]


def test_constant_workers_have_no_plot() -> None:
    rich = make_summary()
    assert "rate-by-workers" in by_name(rich)
    alike = [
        trial.model_copy(update={"config": trial.config.model_copy(update={"num_workers": 2})})
        for trial in rich.trials
    ]
    assert {*by_name(rich)} - {*by_name(make_summary(trials=tuple(alike)))} == {"rate-by-workers"}


def test_only_levels_in_sight_are_drawn() -> None:
    plot = by_name(make_rich_summary())["rate-by-batch"]
    assert [(level.label, level.y) for level in plot.levels] == [("device alone", 12_800.0)]
    near = by_name(make_summary())["memory"].levels
    assert [(level.label, level.y, level.is_limit) for level in near] == [("limit", 16.0, True)]
    assert by_name(make_summary(limit_bytes=10**15))["memory"].levels == ()


def test_memory_line_has_an_error_band() -> None:
    trials = [
        make_trial(
            index,
            BASELINE.model_copy(update={"micro_batch_size": batch}),
            measurement=make_measurement(1000.0, gib=1 + batch / 64),
        )
        for index, batch in enumerate((32, 64, 128))
    ]
    (trend,) = by_name(make_summary(trials=tuple(trials)))["memory"].trends
    assert (trend.points[0][0], trend.points[-1][0]) == (32, 128)
    assert [trend.points[0][1], trend.points[-1][1]] == pytest.approx([1.5, 3.0], rel=0.01)
    assert all(abs(gib - 1 - batch / 64) < error < 0.2 * gib for batch, gib, error in trend.points)


def test_best_so_far_is_feasible() -> None:
    summary = make_summary()
    scored = [
        trial.model_copy(update={"score": trial.score.model_copy(update={"value": value})})
        for trial, value in zip(summary.trials[:4], (1.0, 3.0, 2.0, 9.0), strict=True)
        if trial.score is not None
    ]
    plot = by_name(make_summary(trials=(*scored, *summary.trials[4:])))["history"]
    assert plot.best_so_far == ((0.0, 1.0), (1.0, 3.0), (2.0, 3.0))


def test_nothing_measured_has_no_plot() -> None:
    assert plots_of(make_summary(trials=(), recommendation=None)) == ()
