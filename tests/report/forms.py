"""Every form of a report made from a RunSummary, for tests that compare what they show."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from autotune.records.run_summary import RunSummary
from autotune.report.figures import Column, make_columns
from autotune.report.model import ReportModel, build_report
from autotune.report.plots.plots import Plot
from autotune.report.render.html import Page, render_page
from autotune.report.render.json_document import summary_json
from autotune.report.render.markdown import render_markdown
from autotune.report.render.notebook import render_notebook
from autotune.report.render.terminal import print_summary

NOWHERE = Path("/nowhere")


def report_of(summary: RunSummary, run_dir: Path = NOWHERE) -> ReportModel:
    return build_report(summary, run_dir)


def columns_of(summary: RunSummary) -> tuple[Column, ...]:
    return make_columns(summary)


def plots_of(summary: RunSummary) -> tuple[Plot, ...]:
    blocks = (block for section in report_of(summary).sections for block in section.blocks)
    return tuple(block for block in blocks if isinstance(block, Plot))


def on_console(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    console = Console(file=StringIO(), width=80, force_terminal=False)
    print_summary(report_of(summary, run_dir), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def as_markdown(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return render_markdown(report_of(summary, run_dir))


def as_page(summary: RunSummary, run_dir: Path = NOWHERE) -> Page:
    return render_page(report_of(summary, run_dir))


def as_notebook(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return render_notebook(report_of(summary, run_dir))


def as_json(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return summary_json(report_of(summary, run_dir))
