"""A comparison on a console: the answer first, within 80 columns, and only what differs."""

from __future__ import annotations

from autotune.records.result import RunSummary
from autotune.report.comparison import compare_summaries, comparison_sections
from tests.factories import make_rich_summary, make_summary
from tests.report.forms import comparison_on_console


def test_it_fits_eighty_columns(any_summary: RunSummary) -> None:
    found = compare_summaries(
        any_summary, make_rich_summary(), ("runs/2026-11-25_10-00-00", "runs/b")
    )
    text = comparison_on_console(found)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).startswith(found.headline)


def test_what_does_not_differ_is_left_out() -> None:
    found = compare_summaries(make_summary(), make_summary(), ("a", "b"))
    titles = [section.title for section in comparison_sections(found)]
    assert titles == ["The two searches", "Recommended settings", "Baseline", "Noise"]
