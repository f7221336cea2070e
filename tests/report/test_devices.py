"""What the device did during the windows: figures where it tells them, words only where they matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.messages.units import NO_VALUE
from autotune.records.measurement import Measurement
from autotune.records.result import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.blocks import filled
from autotune.report.sections import device_section
from tests.factories import HOT, make_conditions, make_conditions_summary, make_summary, make_trial
from tests.report.cases import CAPPED
from tests.report.forms import (
    as_json,
    as_markdown,
    as_notebook,
    as_page,
    columns_of,
    on_console,
    report_of,
    sentences_of,
    table_of,
)
from tests.report.test_html import Reader
from tests.report.test_markdown import cells_of, table_after

QUIET = make_conditions_summary()


def in_notebook(summary: RunSummary, run_dir: Path) -> str:
    return Reader(as_notebook(summary, run_dir)).text


def on_page(summary: RunSummary, run_dir: Path) -> str:
    return Reader(as_page(summary, run_dir).html).text


FORMS: tuple[Callable[[RunSummary, Path], str], ...] = (
    on_console,
    in_notebook,
    on_page,
    as_markdown,
    as_json,
)


def notes_on(*after: dict[str, Any], retries: int = 0) -> tuple[str, ...]:
    """What is said of a recommendation whose windows were like this."""
    report = report_of(make_conditions_summary(*after, retries=retries))
    return (*report.doubts, *report.conditions)


def measured_of(summary: RunSummary) -> dict[str, tuple[Measurement, ...]]:
    return {column.title: column.runs for column in columns_of(summary) if column.runs}


def rows_of(summary: RunSummary) -> dict[str, tuple[str, ...]]:
    section = device_section(summary, measured_of(summary))
    return {row[0]: row[1:] for row in table_of(section).rows}


def energy_row(summary: RunSummary) -> tuple[str, ...]:
    return next(
        (row[1:] for row in report_of(summary).table.rows if row[0] == "energy a sample"), ()
    )


def test_energy_a_sample_stands_beside_the_rates_where_a_device_tells_it() -> None:
    assert energy_row(QUIET) == ("50 mJ", "33.3 mJ", NO_VALUE), "mean power over the rate"
    assert energy_row(make_summary()) == ()


@pytest.mark.parametrize("form", FORMS[:4])
def test_energy_a_sample_is_in_every_form_for_people(
    form: Callable[[RunSummary, Path], str], tmp_path: Path
) -> None:
    told, untold = form(QUIET, tmp_path), form(make_summary(), tmp_path)
    assert "energy a sample" in told
    assert "33.3 mJ" in told
    assert "energy a sample" not in untold


def test_the_document_has_each_windows_conditions(tmp_path: Path) -> None:
    summary = make_conditions_summary(HOT, retries=7)
    document = json.loads(as_json(summary, tmp_path))
    runs = {column["title"]: column["runs"] for column in document["columns"]}
    assert [run["conditions"]["power_w"] for run in runs["baseline"]] == [255.0] * 3
    reasons = [run["conditions"]["throttle_reasons"] for run in runs["recommended"]]
    assert reasons == [["power_cap", "thermal"], [], []]
    assert [run["memory"]["alloc_retries"] for run in runs["recommended"]] == [7, 7, 7]
    report = report_of(summary)
    assert document["device_notes"] == [*report.doubts, *report.conditions]


def test_trials_and_repeats_have_a_column_of_energy_where_one_tells_it(tmp_path: Path) -> None:
    text = as_markdown(QUIET, tmp_path)
    heads, _, first, second, third, *_ = (cells_of(row) for row in table_after(text, "Trials"))
    place = heads.index("energy a sample")
    assert (first[place], second[place], third[place]) == ("49.8 mJ", "33.2 mJ", NO_VALUE)
    assert len(first) == len(heads)
    heads, _, first, *_ = (
        cells_of(row) for row in table_after(text, "Settings that ran more than once")
    )
    assert first[heads.index("energy a sample")] == "49.8 mJ"
    plain = as_markdown(make_summary(), tmp_path)
    assert "energy a sample" not in cells_of(table_after(plain, "Trials")[0])
    assert cells_of(table_after(plain, "Trials")[0])[-1] == "reason"
    heads = cells_of(table_after(plain, "Settings that ran more than once")[0])
    assert heads[-1] == "peak memory"


def test_windows_without_anything_to_say_get_no_words() -> None:
    assert notes_on() == ()
    clock = {"sm_clock_mhz": (1980, 1935), "others_memory_bytes": 600 * 2**20}
    assert notes_on(clock) == (), "2 %, and a driver's own"


@pytest.mark.parametrize("form", FORMS)
def test_what_moves_rates_is_said_in_every_form(
    form: Callable[[RunSummary, Path], str], tmp_path: Path
) -> None:
    hot = make_conditions_summary(HOT, HOT, retries=7)
    report = report_of(hot)
    assert (len(report.doubts), len(report.conditions)) == (2, 5)
    text = " ".join(form(hot, tmp_path).split()).replace("\\_", "_")
    for sentence in (*report.doubts, *report.conditions):
        assert sentence in text


@pytest.mark.parametrize(
    "after", [HOT, {"throttle_reasons": ("hardware_slowdown",)}, {"sm_clock_mhz": (1980, 1755)}]
)
def test_doubts_are_said_before_the_table_of_the_result(
    after: dict[str, Any], tmp_path: Path
) -> None:
    summary = make_conditions_summary(after)
    text = " ".join(on_console(summary, tmp_path).split())
    doubts = report_of(summary).doubts
    assert doubts
    for doubt in doubts:
        assert text.index(doubt) < text.index("samples/s")
        assert text.count(doubt) == 1


def test_a_power_limit_that_held_some_windows_is_told_and_no_doubt(tmp_path: Path) -> None:
    summary = make_conditions_summary(CAPPED)
    report = report_of(summary)
    assert report.doubts == ()
    (limit,) = report.conditions
    text = " ".join(on_console(summary, tmp_path).split())
    assert text.index(limit) > text.index("samples/s")


@pytest.mark.parametrize(
    ("after", "retries", "said"),
    [
        ({"sm_clock_mhz": (1980, 1755)}, 0, "(-11 %)"),
        ({"sm_clock_mhz": (1755, 1980)}, 0, "(+13 %)"),
        ({"others_memory_bytes": 3 * 2**30}, 0, "3.00 GiB"),
        ({"others_busy_fraction": 0.2}, 0, "20 %"),
        ({"persistence_mode": False}, 0, "nvidia-smi -pm 1"),
        ({"tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0",)}, 0, "NVIDIA_TF32_OVERRIDE=0"),
        ({}, 2, "(6 times)"),
    ],
)
def test_each_thing_that_moves_rates_is_said_by_itself(
    after: dict[str, Any], retries: int, said: str
) -> None:
    (note,) = notes_on(after, retries=retries)
    assert said in note


def test_the_section_sets_the_windows_side_by_side() -> None:
    rows = rows_of(make_conditions_summary(HOT, HOT, retries=7))
    assert rows["power"] == ("255 W", "410 W", NO_VALUE)
    assert rows["highest clock"] == ("1,980 MHz", "1,980 MHz", NO_VALUE)


@pytest.mark.parametrize(("conditions", "numbers"), [(HOT, ["1"]), (CAPPED, [])])
def test_the_section_names_every_trial_that_was_throttled(
    conditions: dict[str, Any], numbers: list[str]
) -> None:
    summary = make_conditions_summary(conditions)
    said = sentences_of(device_section(summary, measured_of(summary)).blocks)
    assert [
        number for sentence in said for number in sentence.rstrip(".").split() if number.isdigit()
    ] == numbers


def test_a_device_that_tells_nothing_has_no_section() -> None:
    plain = make_summary()
    assert filled(device_section(plain, measured_of(plain))) == ()
    assert len(filled(device_section(QUIET, measured_of(QUIET)))) == 1


def test_a_part_that_a_device_does_not_tell_is_left_out() -> None:
    nothing = dict.fromkeys(
        ("sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    )
    runs = measured_of(make_conditions_summary(nothing, nothing, nothing))["recommended"]
    assert all(run.joules_per_sample is None for run in runs)
    assert notes_on(nothing, nothing, nothing) == ()


def test_a_trials_record_keeps_its_conditions() -> None:
    trial = make_conditions_summary(HOT).trials[1]
    again = TrialRecord.model_validate_json(trial.model_dump_json())
    assert again == trial
    assert again.measurement is not None
    assert again.measurement.conditions == make_conditions(**HOT)
    assert make_trial(0, trial.config).measurement is None


def test_single_retries_are_no_want_of_room() -> None:
    assert notes_on(retries=1) == (), "three windows with one each"


def test_windows_that_all_ran_at_the_power_limit_are_no_doubt() -> None:
    capped = make_conditions_summary(CAPPED, CAPPED, CAPPED, before=CAPPED)
    assert rows_of(capped)["throttled"] == ("no", "no", NO_VALUE)
    assert (report_of(capped).doubts, report_of(capped).conditions) == ((), ())
