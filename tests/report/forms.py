"""Every form of a report, a diagnosis, a comparison and of progress as text, for tests that compare what they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.records.measurement import Interval
from autotune.records.result import Diagnosis, Known, Progress, RunSummary
from autotune.records.trial import TrialRecord
from autotune.report import progress
from autotune.report.blocks import Block, Bullets, Paragraph, Plot, Section, Table, Trace
from autotune.report.comparison import Comparison, print_comparison
from autotune.report.console import print_summary
from autotune.report.diagnosis import print_diagnosis
from autotune.report.figures import Column, make_columns
from autotune.report.html import Page, render_notebook, render_page
from autotune.report.json_document import summary_json
from autotune.report.markdown import render_markdown
from autotune.report.model import ReportModel, build_report
from autotune.report.progress import ProgressMode, make_progress
from tests.factories import make_trials, run_again, run_once

NOWHERE = Path("/nowhere")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(StringIO):
    """Play a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def report_of(summary: RunSummary, run_dir: Path = NOWHERE) -> ReportModel:
    return build_report(summary, run_dir)


def columns_of(summary: RunSummary) -> tuple[Column, ...]:
    return make_columns(summary)


def plots_of(summary: RunSummary) -> tuple[Plot, ...]:
    blocks = (block for section in report_of(summary).sections for block in section.blocks)
    return tuple(block for block in blocks if isinstance(block, Plot))


def table_of(section: Section) -> Table:
    """Return a section's first table."""
    return next(block for block in section.blocks if isinstance(block, Table))


def sentences_of(blocks: Iterable[Block]) -> list[str]:
    """List the sentences of blocks."""
    said: list[str] = []
    for block in blocks:
        match block:
            case Paragraph():
                said.append(block.text)
            case Bullets():
                said += block.sentences
            case Plot():
                said.append(block.caption)
            case Trace():
                said.append(f"{block.count} {block.text}")
    return said


def on_console_of(show: Callable[[Console], object], width: int = 80) -> str:
    """Return what is printed on a console without colours."""
    file = StringIO()
    show(Console(file=file, width=width, force_terminal=False))
    return file.getvalue()


def on_console(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return on_console_of(lambda console: print_summary(report_of(summary, run_dir), console))


def diagnosis_on_console(diagnosis: Diagnosis, *, is_full: bool = False) -> str:
    return on_console_of(lambda console: print_diagnosis(diagnosis, console, is_full=is_full))


def comparison_on_console(comparison: Comparison) -> str:
    return on_console_of(lambda console: print_comparison(comparison, console))


def as_markdown(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return render_markdown(report_of(summary, run_dir))


def as_page(summary: RunSummary, run_dir: Path = NOWHERE) -> Page:
    return render_page(report_of(summary, run_dir))


def as_notebook(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return render_notebook(report_of(summary, run_dir))


def as_json(summary: RunSummary, run_dir: Path = NOWHERE) -> str:
    return summary_json(report_of(summary, run_dir))


def make_step(last: TrialRecord | None, **parts: Any) -> Progress:
    """Make progress in the middle of a search; keywords change fields."""
    trials = make_trials()
    given: dict[str, Any] = {
        "phase": "search",
        "done": 7,
        "total": 40,
        "elapsed_s": 30.0,
        "remaining_s": 80.0,
        "baseline": trials[0],
        "best": trials[1],
        "last": last,
    }
    return Progress(**{**given, **parts})


def make_steps() -> list[Progress]:
    """Make the progress of a whole search: the probe, trials of each outcome, further runs of the best two."""
    trials, again = run_once(make_trials()), make_trials()
    start = {"baseline": None, "best": None, "done": 0}
    return [
        make_step(None, phase="probe", total=1, **start),
        make_step(None, **start),
        make_step(trials[0], done=1, best=trials[0]),
        *(make_step(trial, done=trial.number + 1, known=known(0.91, 3.4)) for trial in trials[1:]),
        make_step(run_again(trials[0], 5049.0), done=10, known=known(1.24, 2.9)),
        make_step(run_again(trials[2], None), done=10, known=known(1.24, 2.9)),
        make_step(None, phase="confirm", done=0, known=known(1.24, 2.9)),
        make_step(again[1], phase="confirm", done=1, known=known(1.61, 2.6, is_proven=True)),
    ]


def known(low: float, high: float, *, is_proven: bool = False) -> Known:
    """Make what is known of trial 1 over the baseline."""
    return Known(
        number=1, speedup=Interval(value=sqrt(low * high), low=low, high=high), is_proven=is_proven
    )


def show_progress(
    mode: ProgressMode, steps: Iterable[Progress], stderr: StringIO | None = None
) -> tuple[str, str]:
    """Return what is written to stdout and to stderr; pytest's own capturing stays out of it."""
    stdout, stderr = StringIO(), StringIO() if stderr is None else stderr
    with redirect_stdout(stdout), redirect_stderr(stderr), make_progress(mode) as step_done:
        for step in steps:
            step_done(step)
    return stdout.getvalue(), "" if stderr.closed else stderr.getvalue()


def live_line(step: Progress) -> str:
    """Return the line of a terminal whose clock stands still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "monotonic", lambda: 0.0)
        _, stderr = show_progress("auto", [step], Terminal())
    (line,) = {
        line for line in ESCAPES.sub("", stderr).replace("\r", "\n").splitlines() if line.strip()
    }
    return line.strip()
