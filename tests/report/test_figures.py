"""How busy the device was, as a report's tables show it: one source for all columns, and it is named."""

from __future__ import annotations

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
from autotune.report.figures import headroom_in, join_runs
from autotune.report.model import ReportModel
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
from tests.report.forms import columns_of, report_of

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


def test_host_limit_is_read_from_the_profiled_run() -> None:
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


@pytest.mark.parametrize(("device", "kept"), [(990.0, 990.0), (900.0, None)])
def test_ceiling_below_the_mean_is_left_out(device: float, kept: float | None) -> None:
    """Though run-to-run variation makes the joined interval far wider."""
    run = make_run({}).model_copy(update={"loader_ceiling": 9000.0, "device_ceiling": device})
    figures = figures_of(make_pair([run], [run], run_variation=assumed_variation("cpu")), 0)
    assert figures is not None
    assert figures.samples_per_s_ci[0] < 900
    assert figures.device_ceiling == kept


def row_of(report: ReportModel, name: str) -> tuple[str, ...]:
    return next(row[1:] for row in report.table.rows if row[0] == name)


def figures_of(summary: RunSummary, number: int) -> Measurement | None:
    return next(column.figures for column in columns_of(summary) if column.number == number)


BOTH = {NVML_SOURCE: 0.6, PROFILER_SOURCE: 0.55}
NVML_RUN = make_run(NVML)


@pytest.mark.parametrize(
    ("before", "after", "shown", "source"),
    [
        ([BOTH, NVML], [{NVML_SOURCE: 0.9, PROFILER_SOURCE: 0.8}], "55 % 80 %", PROFILER_SOURCE),
        ([BOTH], [{NVML_SOURCE: 0.9}], "60 % 90 %", NVML_SOURCE),
        ([{WAIT_SOURCE: 0.7}], [{NVML_SOURCE: 0.8, WAIT_SOURCE: 0.95}], "70 % 95 %", WAIT_SOURCE),
        ([{"its own": 0.5}], [{NVML_SOURCE: 0.9}], "50 % 90 %", "its own"),
        ([{}], [BOTH], f"{NO_VALUE} 55 %", PROFILER_SOURCE),
        ([BOTH, NVML], [NVML, BOTH], "55 % 55 %", PROFILER_SOURCE),
    ],
    ids=["best", "next best", "waits", "unlike", "no reading", "any run"],
)
def test_busy_is_of_the_best_common_source(
    before: list[dict[str, float]], after: list[dict[str, float]], shown: str, source: str
) -> None:
    report = report_of(make_pair([*map(make_run, before)], [*map(make_run, after)]))
    assert " ".join(row_of(report, "busy")) == shown
    assert source in report.footnotes[0]


@pytest.mark.parametrize(
    ("runs", "busy"),
    [([BOTH], 0.6), ([{WAIT_SOURCE: 1.0}, {NVML_SOURCE: 0.5}, {NVML_SOURCE: 0.7}], 0.6)],
    ids=["own source", "mean of one source"],
)
def test_joined_runs_keep_the_source_of_scores(runs: list[dict[str, float]], busy: float) -> None:
    figures = figures_of(make_pair([*map(make_run, runs)], [NVML_RUN]), 0)
    assert figures is not None
    assert figures.busy_fraction == pytest.approx(busy)
    assert figures.busy_source == NVML_SOURCE


def test_waits_for_data_are_one_figure() -> None:
    """The run that was profiled waited 36 %, the mean of the runs is 34 %: the mean is shown everywhere."""

    def waiting(fraction: float, *, profiled: bool = False) -> Measurement:
        parts = make_breakdown(wait=fraction, copy=0.02, idle=0.05) if profiled else None
        return NVML_RUN.model_copy(update={"data_wait_fraction": fraction, "breakdown": parts})

    before = [waiting(0.36, profiled=True), waiting(0.33), waiting(0.33)]
    report = report_of(make_pair(before, [waiting(0.05, profiled=True), waiting(0.03)]))
    assert row_of(report, "waiting for data") == ("34 %", "4.0 %")
    (bars,) = (
        block.bars
        for section in report.sections
        for block in section.blocks
        if isinstance(block, TimeBars)
    )
    assert [dict(bar.parts)["data_wait"] for bar in bars] == pytest.approx([0.34, 0.04])
    assert [sum(dict(bar.parts).values()) for bar in bars] == pytest.approx([1, 1])
    # without breakdowns: the loop's own
    assert row_of(report_of(make_summary()), "waiting for data")[:2] == ("3.4 %", "3.4 %")


def test_memory_is_in_the_unit_of_the_limit() -> None:
    limit = int(21.2 * 2**30)
    over = make_trial(3, FAST, "over_memory", measurement=make_measurement(9e3, gib=21.22))
    report = report_of(make_summary(limit_bytes=limit, trials=(*make_summary().trials[:3], over)))
    assert row_of(report, "peak memory") == ("3.0 GiB", "9.4 GiB", "3.0 GiB")
    reason = report.trials.rows[-1][-1]
    assert {"21.2", "21.22", "GiB"} <= set(reason.replace(",", "").split())
    (failure,) = (section for section in report.sections if section.title.startswith("Failures"))
    (trace,) = failure.blocks
    assert isinstance(trace, Trace)
    assert trace.text == f"trial 3: {reason}"
