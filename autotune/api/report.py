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

__all__ = ["open_report", "rewrite_reports", "write_reports"]


def write_reports(summary: RunSummary, folder: RunFolder) -> str:
    """Write both; what went wrong, or "". Raises nothing but interrupts."""
    return _remark_of(lambda: _write(_build(summary, folder), folder))


def open_report(run_dir: Path) -> ReportModel:
    """The report of a run folder, by the folder alone, as it is once its files are written anew.

    Raises:
        ConfigError: the folder holds no finished search, or one that can't be read; the message names the file.
    """
    return _build(read_summary(run_dir), RunFolder(run_dir))


def rewrite_reports(report: ReportModel, run_dir: Path) -> tuple[ReportModel, str]:
    """Write both anew; the report, without a file that is missing, and what went wrong, or "".

    Drawing takes as long as all else: whoever reads along should be shown the report before.
    """
    remark = _remark_of(lambda: _write(report, RunFolder(run_dir)))
    return (build_report(report.summary, run_dir) if remark else report), remark


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
