"""How busy the device was, as a report's tables show it: one source for all columns, and it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.messages.units import NO_VALUE
from autotune.models.evidence import assumed_variation
from autotune.records.measurement import (
    NVML_SOURCE,
    PROFILER_SOURCE,
    WAIT_SOURCE,
    BusyReading,
    Measurement,
)
from autotune.records.result import RunSummary
from autotune.records.trial import TrialRecord, TrialResult
from autotune.report.blocks import TimeBars, Trace
from autotune.report.figures import headroom_in, join_runs, list_busy
from tests.factories import (
    BASELINE,
    FAST,
    make_breakdown,
    make_measurement,
    make_recommendation,
    make_summary,
    make_trial,
    make_window,
)
from tests.report.forms import as_markdown, columns_of, report_of

NVML = {NVML_SOURCE: 0.6}


def make_run(told: dict[str, float], *, rate: float = 1000.0) -> Measurement:
    """A run whose score is made from the first source."""
    source, fraction = next(iter(told.items()), (None, None))
    readings = tuple(BusyReading(source=name, fraction=share) for name, share in told.items())
    run = make_measurement(rate, busy=fraction, busy_readings=readings)
    return run.model_copy(update={"busy_source": source})


def make_pair(before: list[Measurement], after: list[Measurement], **parts: object) -> RunSummary:
    """A baseline and a recommendation with these runs."""
    found = make_recommendation(same_batch=None, same_batch_number=None)
    trials = (trial_of(0, BASELINE, before), trial_of(1, FAST, after))
    return make_summary(**{"trials": trials, "recommendation": found, **parts})


def trial_of(number: int, config: TrainingConfig, runs: list[Measurement]) -> TrialRecord:
    first, *others = runs
    trial = make_trial(number, config, measurement=first)
    for place, run in enumerate(others, 1):
        trial = trial.with_run(TrialResult(outcome="ok", measurement=run, at_s=float(place)))
    return trial


def test_the_profiled_run_shows_whether_the_host_holds_the_loop() -> None:
    """Two runs of minGPT on an H200; of the second NVML alone tells how busy the device was."""
    known: dict[str, Any] = {
        "device_ceiling": 2_856.0,
        "data_wait_fraction": 0.0,
        "window": make_window(host_ahead_s=0.0),
    }
    profiled = make_run({PROFILER_SOURCE: 0.42}, rate=2_855.0).model_copy(
        update={
            **known,
            "loader_ceiling": 40_370.0,
            "host_ceiling": 3_037.0,
            "breakdown": make_breakdown(idle=0.57),
        }
    )
    other = make_run({NVML_SOURCE: 0.85}, rate=2_258.0).model_copy(update=known)
    headroom = headroom_in(join_runs([other, profiled], assumed_variation("cuda")))
    assert headroom is not None
    assert headroom.limit == "host"
    assert headroom.share_of_device == pytest.approx(0.42)


def busy_row(summary: RunSummary) -> tuple[str, ...]:
    return next(row[1:] for row in report_of(summary).table.rows if row[0] == "busy")


def footnotes_of(summary: RunSummary) -> tuple[str, ...]:
    return report_of(summary).footnotes


def figures_of(summary: RunSummary, number: int) -> Measurement | None:
    return next(column.figures for column in columns_of(summary) if column.number == number)


def test_the_profilers_reading_is_shown_where_all_columns_have_it() -> None:
    before, after = (
        make_run({NVML_SOURCE: 0.6, PROFILER_SOURCE: 0.55}),
        make_run({NVML_SOURCE: 0.9, PROFILER_SOURCE: 0.8}),
    )
    summary = make_pair([before, make_run(NVML)], [after, make_run(NVML)])
    assert busy_row(summary) == ("55 %", "80 %")
    assert f"Busy: {PROFILER_SOURCE}." in footnotes_of(summary)


def test_one_column_without_the_profilers_reading_has_all_shown_by_the_next_best() -> None:
    summary = make_pair(
        [make_run({NVML_SOURCE: 0.6, PROFILER_SOURCE: 0.55})], [make_run({NVML_SOURCE: 0.9})]
    )
    assert busy_row(summary) == ("60 %", "90 %")
    assert f"Busy: {NVML_SOURCE}." in footnotes_of(summary)


def test_a_column_that_fell_back_to_the_waits_has_all_shown_by_them() -> None:
    summary = make_pair(
        [make_run({WAIT_SOURCE: 0.7})], [make_run({NVML_SOURCE: 0.8, WAIT_SOURCE: 0.95})]
    )
    assert busy_row(summary) == ("70 %", "95 %")
    assert f"Busy: {WAIT_SOURCE}." in footnotes_of(summary)


def test_sources_that_share_nothing_are_shown_as_they_are_and_said_not_to_compare() -> None:
    summary = make_pair([make_run({"its own": 0.5})], [make_run({NVML_SOURCE: 0.9})])
    assert busy_row(summary) == ("50 %", "90 %")
    assert "its own" in footnotes_of(summary)[0]
    assert NVML_SOURCE in footnotes_of(summary)[0]


def test_a_configuration_that_told_nothing_does_not_choose_the_source() -> None:
    summary = make_pair([make_run({})], [make_run({NVML_SOURCE: 0.9, PROFILER_SOURCE: 0.8})])
    assert busy_row(summary) == (NO_VALUE, "80 %")
    assert list_busy(columns_of(summary))[0] is None


def test_the_profilers_reading_is_found_in_whichever_run_holds_it() -> None:
    """Of the runs of a trial one alone is profiled: the first, or that of what leads."""
    profiled = make_run({PROFILER_SOURCE: 0.3, NVML_SOURCE: 0.5})
    summary = make_pair([profiled, make_run(NVML)], [make_run(NVML), profiled])
    assert busy_row(summary) == ("30 %", "30 %")


def test_the_figures_keep_the_scores_own_source() -> None:
    figures = figures_of(
        make_pair([make_run({NVML_SOURCE: 0.6, PROFILER_SOURCE: 0.55})], [make_run(NVML)]), 0
    )
    assert figures is not None
    assert (figures.busy_fraction, figures.busy_source) == (0.6, NVML_SOURCE)


def test_a_mean_over_runs_is_of_one_source() -> None:
    runs = [
        make_run({WAIT_SOURCE: 1.0}),
        make_run({NVML_SOURCE: 0.5}),
        make_run({NVML_SOURCE: 0.7}),
    ]
    figures = figures_of(make_pair(runs, [make_run(NVML)]), 0)
    assert figures is not None
    assert figures.busy_fraction == pytest.approx(0.6)
    assert figures.busy_source == NVML_SOURCE


def test_two_sources_that_disagree_are_both_said_beside_the_result() -> None:
    summary = make_pair(
        [make_run({NVML_SOURCE: 0.9, PROFILER_SOURCE: 0.7})], [make_run({NVML_SOURCE: 0.8})]
    )
    (said,) = (
        note for note in footnotes_of(summary) if PROFILER_SOURCE in note and NVML_SOURCE in note
    )
    assert {"20", "90", "70"} <= set(said.split())


def test_trials_and_repeats_name_the_source_that_their_scores_take(tmp_path: Path) -> None:
    profiled = {NVML_SOURCE: 0.6, PROFILER_SOURCE: 0.55}
    summary = make_pair(
        [make_run(profiled), make_run({WAIT_SOURCE: 0.9})], [make_run(profiled), make_run(profiled)]
    )
    text = as_markdown(summary, tmp_path)
    trials, _, repeats = text.partition("## Trials")[2].partition(
        "## Settings that ran more than once"
    )
    assert NVML_SOURCE in trials
    assert WAIT_SOURCE not in trials
    assert f"{NVML_SOURCE}; \\# 0: {WAIT_SOURCE}" in repeats


def test_waits_for_data_are_one_figure_in_table_time_bars_and_reasons() -> None:
    """The run that was profiled waited 36 %, the mean of the runs is 34 %: the mean is shown everywhere."""

    def waiting(fraction: float, *, profiled: bool = False) -> Measurement:
        run = make_run(NVML).model_copy(update={"data_wait_fraction": fraction})
        return (
            run.model_copy(
                update={"breakdown": make_breakdown(wait=fraction, copy=0.02, idle=0.05)}
            )
            if profiled
            else run
        )

    before = [waiting(0.36, profiled=True), waiting(0.33), waiting(0.33)]
    report = report_of(make_pair(before, [waiting(0.05, profiled=True), waiting(0.03)]))
    row = next(row[1:] for row in report.table.rows if row[0] == "waiting for data")
    assert row == ("34 %", "4.0 %")
    assert any("4.0 %" in reason and "34 %" in reason for reason in report.reasons)
    bars = next(
        block
        for section in report.sections
        for block in section.blocks
        if isinstance(block, TimeBars)
    )
    assert [dict(bar.parts)["data_wait"] for bar in bars.bars] == [
        pytest.approx(0.34),
        pytest.approx(0.04),
    ]
    assert [sum(fraction for _, fraction in bar.parts) for bar in bars.bars] == [
        pytest.approx(1),
        pytest.approx(1),
    ]


def test_without_the_parts_of_the_time_the_loops_waits_are_the_one_figure() -> None:
    report = report_of(make_summary())
    assert next(row[1:3] for row in report.table.rows if row[0] == "data wait") == (
        "3.4 %",
        "3.4 %",
    )
    assert any(reason.count("3.4 %") == 2 for reason in report.reasons)


def test_what_is_compared_with_the_memory_limit_is_written_in_its_unit() -> None:
    limit = int(21.2 * 2**30)
    report = report_of(make_summary(limit_bytes=limit))
    rows = {row[0].strip(): row[1:] for row in report.table.rows}
    assert rows["peak memory"] == ("3.0 GiB", "9.4 GiB", "3.0 GiB")
    assert "of 21.2 GiB" in rows
    over = make_trial(3, FAST, "over_memory", measurement=make_measurement(9e3, gib=21.22))
    report = report_of(make_summary(limit_bytes=limit, trials=(*make_summary().trials[:3], over)))
    reason = report.trials.rows[-1][-1]
    assert {"21.2", "21.22", "GiB"} <= set(reason.replace(",", "").split()), (
        "not in the MiB of the record's own reason"
    )
    (failure,) = (section for section in report.sections if section.title.startswith("Failures"))
    (trace,) = failure.blocks
    assert isinstance(trace, Trace)
    assert trace.text == f"trial 3: {reason}"
