"""report.md: complete, and safe against what user code has said."""

from __future__ import annotations

import re
from pathlib import Path

from autotune.records.result import RunSummary
from autotune.report.blocks import Plot, TimeBars
from autotune.report.sections import list_memory_lines
from tests.factories import (
    LIMIT,
    TRACEBACK,
    make_rich_summary,
    make_summary,
)
from tests.report.cases import hostile_summary, remarked_guard
from tests.report.forms import as_markdown, report_of

ATTACK = (
    '"><script>alert(1)</script> | [x](javascript:alert(2)) `code` **b** \x1b[31mred\x1b[0m </td>'
)
ATTACK += "\n# title\n| a | b |"


def table_after(text: str, heading: str, *, level: int = 2, head: str = "") -> list[str]:
    """The first table below a heading that begins so, or the first with such a head."""
    lines = text.partition(f"\n{'#' * level} {heading}")[2].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {head}".rstrip()))
    stop = next(
        index for index, line in enumerate(lines[start:], start) if not line.startswith("|")
    )
    return lines[start:stop]


def test_every_verdict_renders(any_summary: RunSummary, tmp_path: Path) -> None:
    text = as_markdown(any_summary, tmp_path)
    assert text.splitlines()[0].endswith(r"resnet \| \[quick\]")
    assert text.endswith("\n")


def test_titles_are_the_pages(any_summary: RunSummary, tmp_path: Path) -> None:
    lines = as_markdown(any_summary, tmp_path).splitlines()
    drawn = TimeBars | Plot
    titles = [
        section.title
        for section in report_of(any_summary, tmp_path).sections
        if not all(isinstance(block, drawn) for block in section.blocks)
    ]
    assert [line[3:] for line in lines if line.startswith("## ")] == titles


def test_hostile_text_is_not_markup(tmp_path: Path) -> None:
    text = as_markdown(hostile_summary(ATTACK), tmp_path)
    assert text.count("alert(1)") >= 10
    plain = re.sub(
        r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL
    )  # tracebacks stand in fences
    assert not re.findall(r"(?<!\\)[<>`\[]", plain)
    headings = re.compile(r"^#+ \S+", flags=re.MULTILINE)
    assert headings.findall(plain) == headings.findall(as_markdown(make_rich_summary(), tmp_path))


def test_every_trial_has_a_row(tmp_path: Path) -> None:
    rows = table_after(as_markdown(make_summary(), tmp_path), "Trials")[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        str(trial.number) for trial in make_summary().trials
    ]


def test_rows_have_as_many_cells_as_heads(any_summary: RunSummary, tmp_path: Path) -> None:
    blocks = re.findall(r"(?:^\|.*\|\n)+", as_markdown(any_summary, tmp_path), flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


def test_fence_is_longer_than_any_inside(tmp_path: Path) -> None:
    text = as_markdown(make_summary(), tmp_path)
    assert f"````text\n{TRACEBACK}\n````\n" in text


def test_memory_line_ends_near_what_was_measured(tmp_path: Path) -> None:
    (row,) = table_after(as_markdown(make_summary(), tmp_path), "Memory", head="precision")[2:]
    (line,) = list_memory_lines(make_summary())
    assert row.split(" | ")[-1] == f"{line.largest_batch(LIMIT, 1024)} |"
    (row,) = table_after(
        as_markdown(make_summary(limit_bytes=10**15), tmp_path), "Memory", head="precision"
    )[2:]
    assert row.split(" | ")[-1] == "over 1,024 |"


def test_remark_on_the_guard_is_given_once(tmp_path: Path) -> None:
    assert as_markdown(remarked_guard(), tmp_path).count("OVERRIDE=1") == 1
    assert "OVERRIDE=1" not in as_markdown(make_rich_summary(), tmp_path)
