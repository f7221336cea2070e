"""A comparison on a console: the answer, the figures of both, and what changed."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from autotune.records.run_summary import RunSummary
from autotune.report.comparison import Comparison, compare_summaries
from autotune.report.sections.comparison import comparison_sections, print_comparison
from tests.factories import make_rich_summary, make_summary


def on_console(found: Comparison) -> str:
    console = Console(file=StringIO(), width=80, force_terminal=False)
    print_comparison(found, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_figures_and_settings_of_both_stand_side_by_side() -> None:
    second = make_summary(environment=make_summary().environment.model_copy(update={"torch": "9.9.9"}))
    text = on_console(compare_summaries(make_rich_summary(), second, ("a", "b")))
    assert "Recommended settings" in text
    assert "times first" in text
    assert "Recommended settings: what loader and device reach alone" in text
    alone = next(line.split() for line in text.splitlines() if line.strip().startswith("device alone"))
    assert len(alone) == 4, "two words, the first's figure and the second's"
    assert "What changed of the machine" in text
    assert "9.9.9" in text
    assert "What changed of model and data" not in text


def test_it_fits_eighty_columns(any_summary: RunSummary) -> None:
    found = compare_summaries(any_summary, make_rich_summary(), ("runs/2026-11-25_10-00-00", "runs/b"))
    text = on_console(found)
    assert max(map(len, text.splitlines())) <= 80
    assert found.headline.split()[0] in text


def test_what_does_not_differ_is_left_out() -> None:
    found = compare_summaries(make_summary(), make_summary(), ("a", "b"))
    titles = [section.title for section in comparison_sections(found)]
    assert titles == ["The two searches", "Recommended settings", "Baseline", "What noise is"]
