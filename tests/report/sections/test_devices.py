"""What the device did during the windows: figures where it tells them, words only where they matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import autotune
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.figures import Figures
from autotune.report.sections.devices import device_section
from autotune.report.sections.diagnosis import print_diagnosis, render_diagnosis
from autotune.report.wording.units import NO_VALUE, format_energy
from autotune.testing import FakeLauncher
from tests.factories import HOT, make_conditions, make_conditions_summary, make_summary, make_trial
from tests.report.forms import as_json, as_markdown, as_notebook, as_page, columns_of, on_console, report_of
from tests.report.render.test_html import Reader
from tests.report.render.test_markdown import cells_of, table_after

QUIET = make_conditions_summary()
CAPPED: dict[str, Any] = {"throttle_reasons": ("power_cap",)}


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


def remarks_on(*after: dict[str, Any], retries: int = 0) -> tuple[str, ...]:
    """What is said of a recommendation whose windows were like this."""
    report = report_of(make_conditions_summary(*after, retries=retries))
    return (*report.doubts, *report.conditions)


def measured_of(summary: RunSummary) -> dict[str, Figures]:
    return {column.title: column.figures for column in columns_of(summary) if column.figures is not None}


def rows_of(summary: RunSummary) -> dict[str, tuple[str, ...]]:
    section = device_section(summary, measured_of(summary))
    return {row[0]: row[1:] for row in section.blocks[0].rows}  # type: ignore[union-attr] # a table


def energy_row(summary: RunSummary) -> tuple[str, ...]:
    return next((row[1:] for row in report_of(summary).table.rows if row[0] == "energy a sample"), ())


def test_energy_a_sample_stands_beside_the_rates_where_a_device_tells_it() -> None:
    assert energy_row(QUIET) == ("50 mJ", "33.3 mJ", NO_VALUE), "mean power over the rate"
    assert any(remark.startswith("Energy: ") for remark in report_of(QUIET).remarks)
    plain = make_summary()
    assert energy_row(plain) == ()
    assert not any(remark.startswith("Energy: ") for remark in report_of(plain).remarks)


@pytest.mark.parametrize("form", FORMS[:4])
def test_energy_a_sample_is_in_every_form_for_people(form: Callable[[RunSummary, Path], str], tmp_path: Path) -> None:
    told, untold = form(QUIET, tmp_path), form(make_summary(), tmp_path)
    assert "energy a sample" in told
    assert "33.3 mJ" in told
    assert "energy a sample" not in untold


def test_the_document_has_energy_and_each_windows_conditions(tmp_path: Path) -> None:
    document = json.loads(as_json(make_conditions_summary(HOT, retries=7), tmp_path))
    best, baseline = document["best"]["figures"], document["baseline"]["figures"]
    assert baseline["joules_per_sample"] == pytest.approx(0.05, rel=0.001)
    assert [window["throttle_reasons"] for window in best["conditions"]] == [["power_cap", "thermal"], [], []]
    assert (best["alloc_retries"], best["allocated_bytes"]) == (21, 2 * 2**30)
    assert any("throttled" in remark for remark in document["device_remarks"])
    same = document["same_batch"]["figures"]
    assert (same["joules_per_sample"], same["conditions"], same["alloc_retries"]) == (None, [], None)


def test_trials_and_rounds_have_a_column_of_energy_where_one_tells_it(tmp_path: Path) -> None:
    text = as_markdown(QUIET, tmp_path)
    heads, _, first, second, *_ = (cells_of(row) for row in table_after(text, "Trials"))
    place = heads.index("energy a sample")
    assert (first[place], second[place]) == ("49.8 mJ", NO_VALUE)
    assert len(first) == len(heads)
    heads, _, first, *_ = (cells_of(row) for row in table_after(text, "Confirmation"))
    assert first[heads.index("energy a sample")] == "50.5 mJ"
    plain = as_markdown(make_summary(), tmp_path)
    assert "energy a sample" not in cells_of(table_after(plain, "Trials")[0])
    assert cells_of(table_after(plain, "Trials")[0])[-1] == "reason"
    assert cells_of(table_after(plain, "Confirmation")[0])[-1] == "peak memory"


def test_windows_without_anything_to_say_get_no_words() -> None:
    assert remarks_on() == ()
    assert remarks_on({"sm_clock_mhz": (1980, 1935), "others_memory_bytes": 600 * 2**20}) == (), (
        "2 %, and a driver's own"
    )


@pytest.mark.parametrize("form", FORMS)
def test_throttled_windows_are_said_in_every_form(form: Callable[[RunSummary, Path], str], tmp_path: Path) -> None:
    said = "The device was throttled during these measurements: recommended (2 of 3 windows: heat)"
    hot = " ".join(form(make_conditions_summary(HOT, HOT), tmp_path).split())
    assert said in hot
    assert "less certain than the intervals suggest" in hot
    assert "was throttled" not in form(QUIET, tmp_path)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (HOT, "was throttled"),
        ({"throttle_reasons": ("hardware_slowdown",)}, "windows: slowdown by the"),
        ({"sm_clock_mhz": (1980, 1755)}, "clock changed within"),
    ],
)
def test_doubts_are_said_before_the_table_of_the_result(after: dict[str, Any], said: str, tmp_path: Path) -> None:
    text = " ".join(on_console(make_conditions_summary(after), tmp_path).split())
    assert text.index(said) < text.index("samples/s")
    assert text.count(said) == 1


def test_a_power_limit_that_held_some_windows_is_told_and_no_doubt(tmp_path: Path) -> None:
    text = on_console(make_conditions_summary(CAPPED), tmp_path)
    assert text.index("Some windows ran at the device's power limit") > text.index("samples/s")


@pytest.mark.parametrize(
    ("after", "retries", "said"),
    [
        ({"sm_clock_mhz": (1980, 1755)}, 0, "clock changed within a window, and rates with it: recommended (-11 %)."),
        ({"sm_clock_mhz": (1755, 1980)}, 0, "recommended (+13 %)."),
        ({"others_memory_bytes": 3 * 2**30}, 0, "before each, memory: baseline 480 MiB, recommended 3.00 GiB."),
        ({"others_busy_fraction": 0.2}, 0, "before each, of the time: baseline 0 %, recommended 20 %."),
        ({"persistence_mode": False}, 0, "Persistence mode is off"),
        ({"tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0",)}, 0, "NVIDIA_TF32_OVERRIDE=0 is set here"),
        ({"tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0",)}, 0, "unset it unless that is intended."),
        ({}, 2, "so many times in its windows: recommended (6)."),
    ],
)
def test_each_thing_that_moves_rates_is_said_by_itself(after: dict[str, Any], retries: int, said: str) -> None:
    remarks = remarks_on(after, retries=retries)
    assert len(remarks) == 1
    assert said in remarks[0]


@pytest.mark.parametrize("form", FORMS)
def test_what_moves_rates_is_said_in_every_form(form: Callable[[RunSummary, Path], str], tmp_path: Path) -> None:
    text = " ".join(form(make_conditions_summary(HOT, retries=7), tmp_path).split()).replace("\\_", "_")
    for said in (
        "clock changed",
        "started or ended on the device",
        "allocator ran out of room",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 are set",
    ):
        assert said in text
    assert "Persistence mode is off" in text


def test_the_section_sets_the_windows_side_by_side() -> None:
    rows = rows_of(make_conditions_summary(HOT, HOT, retries=7))
    assert rows["power"] == ("255 W", "410 W", NO_VALUE)
    assert rows["clock"] == ("1,980 MHz", "1,755 to 1,980 MHz", NO_VALUE)
    assert rows["highest clock"] == ("1,980 MHz", "1,980 MHz", NO_VALUE)
    assert rows["temperature"] == ("41 to 55 °C", "41 to 87 °C", NO_VALUE)
    assert rows["at its power limit"] == ("no", "2 of 3 windows", NO_VALUE)
    assert rows["throttled"] == ("no", "2 of 3 windows: heat", NO_VALUE)
    assert rows["memory in use before"] == ("480 MiB", "3.00 GiB", NO_VALUE)
    assert rows["allocator's retries"] == ("0", "21", NO_VALUE)
    assert rows["tensors at their peak"] == ("2.00 GiB", "2.00 GiB", NO_VALUE)


def test_the_section_names_every_trial_that_was_throttled(tmp_path: Path) -> None:
    assert "Trials that were throttled: 2." in as_markdown(make_conditions_summary(HOT), tmp_path)
    assert "Trials that were throttled" not in as_markdown(make_conditions_summary(CAPPED), tmp_path)


def test_a_device_that_tells_nothing_has_no_section(tmp_path: Path) -> None:
    assert "Device during the windows" not in as_markdown(make_summary(), tmp_path)
    assert "Device during the windows" in as_markdown(QUIET, tmp_path)


def test_a_part_that_a_device_does_not_tell_is_left_out() -> None:
    nothing = dict.fromkeys(("sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w"))
    figures = measured_of(make_conditions_summary(nothing, nothing, nothing))["recommended"]
    assert figures.joules_per_sample is None
    assert remarks_on(nothing, nothing, nothing) == ()


def test_a_trials_record_keeps_its_conditions() -> None:
    trial = make_conditions_summary(HOT).trials[2]
    again = TrialRecord.model_validate_json(trial.model_dump_json())
    assert again == trial
    assert again.measurement is not None
    assert again.measurement.conditions == make_conditions(**HOT)
    assert make_trial(0, trial.config).measurement is None


def test_a_diagnosis_tells_the_same_of_its_one_window() -> None:
    diagnosis = autotune.diagnose(object, list, progress=False, launcher=FakeLauncher(noise=0.0)).diagnosis
    run = diagnosis.evidence.measurement.model_copy(update={"conditions": make_conditions(**HOT)})
    evidence = diagnosis.evidence.model_copy(update={"measurement": run})
    hot = diagnosis.model_copy(update={"evidence": evidence})
    console = Console(file=StringIO(), width=80, color_system=None)
    print_diagnosis(hot, console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue()
    assert max(map(len, lines.splitlines())) <= 80
    text = " ".join(lines.split())
    assert "at its power limit 1 of 1 window" in text
    assert "throttled 1 of 1 window: heat" in text
    assert "NVIDIA_TF32_OVERRIDE=0 and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 are set here" in text
    assert run.joules_per_sample is not None
    assert f"energy a sample {format_energy(run.joules_per_sample)}" in text
    assert "Persistence mode is off" in render_diagnosis(hot)
    assert "throttled" not in render_diagnosis(diagnosis)


def test_retries_are_told_as_want_of_room_from_two_in_a_window_on() -> None:
    assert remarks_on(retries=1) == (), "three windows with one each"
    assert rows_of(make_conditions_summary(retries=1))["allocator's retries"] == ("0", "3", NO_VALUE)


@pytest.mark.parametrize("form", FORMS)
def test_windows_that_all_ran_at_the_power_limit_are_no_doubt(
    form: Callable[[RunSummary, Path], str], tmp_path: Path
) -> None:
    capped = make_conditions_summary(CAPPED, CAPPED, CAPPED, before=CAPPED)
    assert rows_of(capped)["at its power limit"] == ("3 of 3 windows", "3 of 3 windows", NO_VALUE)
    assert rows_of(capped)["throttled"] == ("no", "no", NO_VALUE)
    text = " ".join(form(capped, tmp_path).split())
    assert "was throttled" not in text
    assert "Some windows ran at the device's power limit" not in text


@pytest.mark.parametrize("form", FORMS)
def test_windows_of_which_some_ran_at_the_power_limit_are_a_doubt(
    form: Callable[[RunSummary, Path], str], tmp_path: Path
) -> None:
    text = " ".join(form(make_conditions_summary(CAPPED, CAPPED), tmp_path).split())
    assert "at the device's power limit, others did not: baseline 0 of 3 windows, recommended 2 of 3 windows." in text
    assert "was throttled" not in text
