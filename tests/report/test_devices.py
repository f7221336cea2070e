"""The device during the windows: figures where it reports them, sentences only where they matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.messages.units import NO_VALUE
from autotune.records.result import RunSummary
from autotune.report.blocks import Section
from tests.factories import HOT, make_conditions_summary, make_summary
from tests.report.cases import CAPPED
from tests.report.forms import (
    as_json,
    as_markdown,
    as_notebook,
    as_page,
    on_console,
    report_of,
    sentences_of,
    table_of,
)
from tests.report.test_html import Reader

QUIET = make_conditions_summary()
FORMS: tuple[Callable[[RunSummary, Path], str], ...] = (
    on_console,
    lambda summary, run_dir: Reader(as_notebook(summary, run_dir)).text,
    lambda summary, run_dir: Reader(as_page(summary, run_dir).html).text,
    as_markdown,
    as_json,
)


def notes_on(*after: dict[str, Any], retries: int = 0) -> tuple[str, ...]:
    """Return the sentences on a recommendation whose windows were like this."""
    report = report_of(make_conditions_summary(*after, retries=retries))
    return (*report.doubts, *report.conditions)


def section_of(summary: RunSummary) -> Section | None:
    sections = {section.title: section for section in report_of(summary).sections}
    return sections.get("Device during the windows")


def rows_of(summary: RunSummary) -> dict[str, tuple[str, ...]]:
    section = section_of(summary)
    assert section is not None
    return {row[0]: row[1:] for row in table_of(section).rows}


@pytest.mark.parametrize("form", FORMS[:4])
def test_energy_is_shown_where_it_is_reported(
    form: Callable[[RunSummary, Path], str], tmp_path: Path
) -> None:
    known = form(QUIET, tmp_path)
    assert "33.3 mJ" in known, "mean power over the throughput"
    assert "energy a sample" in known
    assert "energy a sample" not in form(make_summary(), tmp_path)


def test_document_has_each_windows_conditions(tmp_path: Path) -> None:
    summary = make_conditions_summary(HOT, retries=7)
    document = json.loads(as_json(summary, tmp_path))
    runs = {column["title"]: column["runs"] for column in document["columns"]}
    assert [run["conditions"]["power_w"] for run in runs["baseline"]] == [255.0] * 3
    reasons = [run["conditions"]["throttle_reasons"] for run in runs["recommended"]]
    assert reasons == [["power_cap", "thermal"], [], []]
    assert [run["memory"]["alloc_retries"] for run in runs["recommended"]] == [7, 7, 7]
    report = report_of(summary)
    assert document["device_notes"] == [*report.doubts, *report.conditions]


@pytest.mark.parametrize("form", FORMS)
def test_what_moves_throughput_is_in_every_form(
    form: Callable[[RunSummary, Path], str], tmp_path: Path
) -> None:
    hot = make_conditions_summary(HOT, HOT, retries=7)
    report = report_of(hot)
    assert (len(report.doubts), len(report.conditions)) == (2, 5)
    text = " ".join(form(hot, tmp_path).split()).replace("\\_", "_")
    assert all(sentence in text for sentence in (*report.doubts, *report.conditions))


@pytest.mark.parametrize(
    ("after", "is_doubt"),
    [
        (HOT, True),
        ({"throttle_reasons": ("hardware_slowdown",)}, True),
        ({"sm_clock_mhz": (1980, 1755)}, True),
        (CAPPED, False),
    ],
)
def test_doubts_come_before_the_table(
    after: dict[str, Any], is_doubt: bool, tmp_path: Path
) -> None:
    summary = make_conditions_summary(after)
    text = " ".join(on_console(summary, tmp_path).split())
    report = report_of(summary)
    assert bool(report.doubts) == is_doubt
    for sentence in report.doubts or report.conditions:
        assert (text.index(sentence) < text.index("samples/s")) == is_doubt
        assert text.count(sentence) == 1


@pytest.mark.parametrize(
    ("after", "retries", "shown"),
    [
        ({"sm_clock_mhz": (1980, 1755)}, 0, "(-11 %)"),
        ({"sm_clock_mhz": (1755, 1980)}, 0, "(+13 %)"),
        ({"others_memory_bytes": 3 * 2**30}, 0, "3.00 GiB"),
        ({"others_busy_fraction": 0.2}, 0, "20 %"),
        ({"persistence_mode": False}, 0, "nvidia-smi -pm 1"),
        ({"tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0",)}, 0, "NVIDIA_TF32_OVERRIDE=0"),
        ({}, 2, "(6 times)"),
        ({}, 0, None),
        ({"sm_clock_mhz": (1980, 1935), "others_memory_bytes": 600 * 2**20}, 0, None),
        ({}, 1, None),
    ],
)
def test_each_influence_has_a_sentence(
    after: dict[str, Any], retries: int, shown: str | None
) -> None:
    found = notes_on(after, retries=retries)
    assert len(found) == (shown is not None)
    assert shown is None or shown in found[0]


@pytest.mark.parametrize(("conditions", "numbers"), [(HOT, ["1"]), (CAPPED, [])])
def test_section_has_the_windows_and_throttled_trials(
    conditions: dict[str, Any], numbers: list[str]
) -> None:
    summary = make_conditions_summary(conditions)
    assert rows_of(summary)["power"][0] == "255 W"
    assert rows_of(summary)["highest clock"] == ("1,980 MHz", "1,980 MHz", NO_VALUE)
    section = section_of(summary)
    assert section is not None
    words = " ".join(sentences_of(section.blocks)).replace(".", "").split()
    assert [word for word in words if word.isdigit()] == numbers


def test_figures_that_are_not_reported_are_left_out() -> None:
    assert section_of(make_summary()) is None
    fields = ("sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    nothing = dict.fromkeys(fields)
    assert notes_on(nothing, nothing, nothing) == ()
    rows = rows_of(make_conditions_summary(nothing, nothing, nothing))
    assert rows["power"] == ("255 W", NO_VALUE, NO_VALUE)


def test_power_limit_in_all_windows_is_no_doubt() -> None:
    capped = make_conditions_summary(CAPPED, CAPPED, CAPPED, before=CAPPED)
    assert rows_of(capped)["throttled"] == ("no", "no", NO_VALUE)
    assert (report_of(capped).doubts, report_of(capped).conditions) == ((), ())
