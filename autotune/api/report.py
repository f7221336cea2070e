"""report.md and report.html: written at the end of a search, and anew from a run folder alone.

Comes in: a summary. Goes out: the files, and what went wrong with them in a sentence, since neither may cost the
result. Apart from search.py, whose imports take longer than a report does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.errors import RunFolderError
from autotune.files.run_folder import RunFolder, read_summary
from autotune.protocol.disk import write_atomic
from autotune.records.run_summary import RunSummary
from autotune.report.model import ReportModel, build_report
from autotune.report.render.html import render_page
from autotune.report.render.markdown import render_markdown
from autotune.report.text import one_line

__all__ = ["rebuild_report", "write_reports"]


def write_reports(summary: RunSummary, folder: RunFolder) -> str:
    """Write both; what went wrong, or "". Raises nothing but interrupts."""
    return _remark_of(lambda: _write(_build(summary, folder), folder))


def rebuild_report(run_dir: Path) -> tuple[ReportModel, str]:
    """Write both from a run folder alone; the report, and what went wrong with the files."""
    folder = RunFolder(run_dir)
    summary = read_summary(run_dir)
    report = _build(summary, folder)
    remark = _remark_of(lambda: _write(report, folder))
    return (build_report(summary, run_dir) if remark else report), remark  # a file that it names may be missing


def _build(summary: RunSummary, folder: RunFolder) -> ReportModel:
    return build_report(summary, folder.path, written=(folder.report.name, folder.page.name))


def _write(report: ReportModel, folder: RunFolder) -> str:
    write_atomic(folder.report, render_markdown(report).encode())
    page = render_page(report)
    write_atomic(folder.page, page.html.encode())
    return page.remark


def _remark_of(write: Callable[[], str]) -> str:
    try:
        return write()
    except RunFolderError as error:
        return f"The reports could not be written: {error}"
    except Exception as error:  # noqa: BLE001 - no report may cost a finished search its result
        return f"The reports could not be made: {one_line(f'{type(error).__name__}: {error}')}"
