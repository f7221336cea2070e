"""report.md: complete, and safe against what user code has said."""

from __future__ import annotations

import re
from pathlib import Path

from autotune.core.memory_line import memory_lines
from autotune.core.result import RunSummary
from autotune.report.markdown import render_markdown

from .conftest import LIMIT, TRACEBACK, make_confirmation, make_measurement, make_recommendation, make_summary


def table_after(text: str, heading: str) -> list[str]:
    lines = text.partition(f"\n## {heading}\n")[2].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    stop = next(index for index, line in enumerate(lines[start:], start) if not line.startswith("|"))
    return lines[start:stop]


def test_every_verdict_renders(any_summary: RunSummary, tmp_path: Path) -> None:
    text = render_markdown(any_summary, tmp_path)
    assert text.startswith("# autotune: resnet \\| \\[quick\\]\n")
    assert text.endswith("\n")


def test_every_trial_has_a_row(tmp_path: Path) -> None:
    rows = table_after(render_markdown(make_summary(), tmp_path), "Trials")[2:]
    assert [row.split("|")[1].strip() for row in rows] == [str(trial.number) for trial in make_summary().trials]


def test_every_row_of_a_table_has_as_many_cells_as_its_head(any_summary: RunSummary, tmp_path: Path) -> None:
    blocks = re.findall(r"(?:^\|.*\|\n)+", render_markdown(any_summary, tmp_path), flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


def test_foreign_text_is_escaped(tmp_path: Path) -> None:
    text = render_markdown(make_summary(), tmp_path)
    assert r"\[red\](3, 4)\[/red\] \| want \`x\` not \<b\>this\</b\>" in text
    assert "\x1b" not in text


def test_a_tracebacks_fence_is_longer_than_any_inside(tmp_path: Path) -> None:
    text = render_markdown(make_summary(), tmp_path)
    assert f"````text\n{TRACEBACK}\n````\n" in text


def test_each_round_of_the_confirmation_stands_raw_and_a_failed_one_is_told(tmp_path: Path) -> None:
    summary = make_summary()
    assert summary.recommendation is not None
    first, *rest = summary.recommendation.confirmations
    broken = make_confirmation(7, first.config, 100.0)
    broken = broken.model_copy(update={"rounds": (make_measurement(77.0), None)})
    recommendation = make_recommendation(confirmations=(first, *rest, broken))
    rows = table_after(render_markdown(make_summary(recommendation=recommendation), tmp_path), "Confirmation")[2:]
    assert len(rows) == 11
    assert [row for row in rows if "failed" in row and "| 2 | 7 |" in row]


def test_machine_versions_and_seed_are_told(tmp_path: Path) -> None:
    text = render_markdown(make_summary(seed=17), tmp_path)
    for said in ("NVIDIA H200", "570.86.15", "optuna 5.0.0", "| seed | 17 |", "| autotune | 0.1.0 |"):
        assert said in text


def test_a_memory_line_is_not_followed_far_beyond_what_was_measured(tmp_path: Path) -> None:
    (row,) = table_after(render_markdown(make_summary(), tmp_path), "Memory")[2:]
    (line,) = memory_lines(make_summary().trials)
    assert row.split(" | ")[-1] == f"{line.largest_batch(LIMIT)} |"
    (row,) = table_after(render_markdown(make_summary(limit_bytes=10**15), tmp_path), "Memory")[2:]
    assert row.split(" | ")[-1] == "over 1,024 |"
