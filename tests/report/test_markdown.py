"""report.md: complete, and safe against what user code has said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autotune.records.result import RunSummary
from autotune.records.trial import Failure
from autotune.report.blocks import Plot
from autotune.report.sections import list_memory_lines
from tests.factories import (
    FAST,
    LIMIT,
    SERVER,
    TRACEBACK,
    make_facts,
    make_rich_summary,
    make_summary,
    make_trial,
    make_trials,
    run_again,
)
from tests.report.cases import remarked_guard
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


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_every_verdict_renders(any_summary: RunSummary, tmp_path: Path) -> None:
    text = as_markdown(any_summary, tmp_path)
    assert text.splitlines()[0].endswith(r"resnet \| \[quick\]")
    assert text.endswith("\n")


def test_every_title_of_the_page_is_in_the_markdown(
    any_summary: RunSummary, tmp_path: Path
) -> None:
    lines = as_markdown(any_summary, tmp_path).splitlines()
    sections = report_of(any_summary, tmp_path).sections
    assert [line[3:] for line in lines if line.startswith("## ")] == [
        section.title for section in sections
    ]
    titles = [
        block.title for section in sections for block in section.blocks if isinstance(block, Plot)
    ]
    assert len(titles) >= 3
    assert [line[4:] for line in lines if line.startswith("### ")] == titles


def test_no_text_of_a_user_is_obeyed_anywhere(tmp_path: Path) -> None:
    rich = make_rich_summary()
    crash: dict[str, Any] = {"reason": ATTACK, "failure": Failure(signature=ATTACK, traceback="")}
    environment = SERVER.model_copy(update={"device_name": ATTACK, "versions": {ATTACK: ATTACK}})
    hostile = {
        "name": ATTACK,
        "notes": (ATTACK,),
        "memory_source": ATTACK,
        "stopped_because": ATTACK,
    }
    more = {"environment": environment, "facts": make_facts(step_source=ATTACK)}
    trials = (*rich.trials, make_trial(11, FAST, "crashed", **crash))
    text = as_markdown(rich.model_copy(update={**hostile, **more, "trials": trials}), tmp_path)
    assert text.count("alert(1)") >= 10
    plain = re.sub(
        r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL
    )  # tracebacks stand in fences
    assert not re.findall(r"(?<!\\)[<>`\[]", plain)
    assert re.findall(r"^#+ \S+", text, flags=re.MULTILINE) == re.findall(
        r"^#+ \S+", as_markdown(rich, tmp_path), flags=re.MULTILINE
    )


def test_every_trial_has_a_row(tmp_path: Path) -> None:
    rows = table_after(as_markdown(make_summary(), tmp_path), "Trials")[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        str(trial.number) for trial in make_summary().trials
    ]


def test_every_row_of_a_table_has_as_many_cells_as_its_head(
    any_summary: RunSummary, tmp_path: Path
) -> None:
    blocks = re.findall(r"(?:^\|.*\|\n)+", as_markdown(any_summary, tmp_path), flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


def test_foreign_text_is_escaped(tmp_path: Path) -> None:
    text = as_markdown(make_summary(), tmp_path)
    assert r"\[red\](3, 4)\[/red\]" in text
    assert r"\`x\` not \<b\>this\</b\>" in text
    assert "\x1b" not in text


def test_a_tracebacks_fence_is_longer_than_any_inside(tmp_path: Path) -> None:
    text = as_markdown(make_summary(), tmp_path)
    assert f"````text\n{TRACEBACK}\n````\n" in text


def test_every_run_of_what_ran_more_than_once_is_a_row_in_their_order(tmp_path: Path) -> None:
    first, *others = make_trials()
    trials = (run_again(first, None), *others)
    rows = table_after(
        as_markdown(make_summary(trials=trials), tmp_path), "Settings that ran more than once"
    )[2:]
    shown = [cells_of(row)[:2] for row in rows]
    assert sorted(shown[:3]) == [["1", "0"], ["1", "1"], ["1", "2"]]
    assert shown[3:] == [
        ["2", "0"],
        ["2", "1"],
        ["2", "2"],
        ["3", "0"],
        ["3", "1"],
        ["3", "2"],
        ["4", "0"],
    ]
    assert "crashed" in rows[-1]


def test_a_memory_line_is_not_followed_far_beyond_what_was_measured(tmp_path: Path) -> None:
    (row,) = table_after(as_markdown(make_summary(), tmp_path), "Memory", head="precision")[2:]
    (line,) = list_memory_lines(make_summary())
    assert row.split(" | ")[-1] == f"{line.largest_batch(LIMIT, 1024)} |"
    (row,) = table_after(
        as_markdown(make_summary(limit_bytes=10**15), tmp_path), "Memory", head="precision"
    )[2:]
    assert row.split(" | ")[-1] == "over 1,024 |"


def test_what_makes_the_precision_guard_less_than_it_seems_is_said_once(tmp_path: Path) -> None:
    assert as_markdown(remarked_guard(), tmp_path).count("OVERRIDE=1") == 1
    assert "OVERRIDE=1" not in as_markdown(make_rich_summary(), tmp_path)
