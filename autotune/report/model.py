"""The report as finished content: calculated and worded once from a RunSummary, laid out by every renderer.

Comes in: a RunSummary and its run folder. Goes out: a frozen ReportModel. Renderers calculate
nothing: what a console, Markdown, a page, a notebook and the JSON document show stands here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.models.memory import MemoryLine
from autotune.records.result import RunSummary
from autotune.report import sections as facts
from autotune.report import sections as memory
from autotune.report import sections as ranks
from autotune.report import sections as times
from autotune.report import sections as trials
from autotune.report import sentences
from autotune.report.blocks import (
    Block,
    Bullets,
    Facts,
    Paragraph,
    Section,
    Table,
    filled,
    list_plots,
)
from autotune.report.figures import Column, make_columns
from autotune.report.sections import device_section, length_section, result_table
from autotune.report.sentences import list_conditions, list_doubts, say_busy, say_rates
from autotune.report.words import one_line

_PARTS = "Parts of the time: profiled in one run, waits for data averaged over all runs; restarts of epochs included."
Verdict = Literal[
    "faster", "already_best", "unconfirmed", "baseline_infeasible", "nothing_feasible"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportModel:
    """All that a report of a search shows."""

    summary: RunSummary
    """What it was made from."""
    run_dir: Path
    folder: str
    """The run folder, relative where it lies below the working directory."""
    files: dict[str, str]
    """The run folder's files that are there: {name: what it holds}."""
    verdict: Verdict
    headline: str
    """The verdict in a sentence or two."""
    columns: tuple[Column, ...]
    """Baseline, recommended, same batch and larger batch with their figures, each configuration
    once."""
    changes: tuple[tuple[str, str, str], ...]
    """The settings to change: (name, the baseline's value, the recommended one)."""
    headroom: str
    """How far the rates are from the ceilings, in a sentence or two; "" where these were not
    measured."""
    doubts: tuple[str, ...]
    """What makes the comparison itself doubtful, a sentence each."""
    conditions: tuple[str, ...]
    """What else moved rates, a sentence each."""
    table: Table
    """The configurations side by side."""
    remarks: tuple[str, ...]
    """Where the table's figures come from, a sentence each."""
    reasons: tuple[str, ...]
    """Why this configuration is recommended, a sentence each."""
    lr_advice: tuple[str, ...]
    """What to do about the learning rate and what goes with it, a sentence each."""
    notes: tuple[str, ...]
    """What a person should know of this run, a sentence each."""
    course: str
    """How the search went: trials, outcomes, time, why it ended."""
    trials: Table
    """Every trial in a row."""
    sections: tuple[Section, ...] = ()
    """All that stands below the result."""

    @property
    def lead(self) -> tuple[Block, ...]:
        """What stands right below the headline: headroom, doubts, the table where there is a figure for it, remarks."""
        warnings = (Paragraph(text=doubt, is_warning=True) for doubt in self.doubts)
        headroom = (Paragraph(text=self.headroom),) if self.headroom else ()
        if self.verdict == "nothing_feasible" and self.columns[0].figures is None:
            return (*headroom, *warnings)
        return (*headroom, *warnings, self.table, Bullets(sentences=self.remarks, is_remark=True))


def build_report(
    summary: RunSummary, run_dir: Path, *, written: Container[str] = ()
) -> ReportModel:
    """Calculate and word a report.

    Args:
        summary: the search.
        run_dir: its run folder.
        written: names of files that will be written from this very report, and need not be there
            yet.
    """
    columns = make_columns(summary)
    measured = {column.title: column.figures for column in columns if column.figures is not None}
    runs = {column.title: column.runs for column in columns if column.runs}
    lines = memory.list_memory_lines(summary)
    conditions = _plain(list_conditions(runs))
    report = ReportModel(
        summary=summary,
        run_dir=run_dir,
        folder=one_line(facts.show_path(run_dir)),
        files=facts.list_files(run_dir, written),
        verdict="nothing_feasible"
        if summary.recommendation is None
        else summary.recommendation.verdict,
        headline=sentences.say_headline(summary, columns),
        columns=columns,
        changes=sentences.list_changes(summary),
        headroom=sentences.say_headroom(summary, columns),
        doubts=_plain(list_doubts(runs)),
        conditions=conditions,
        table=result_table(columns, summary.limit_bytes, summary.run_spread),
        remarks=_plain(
            (
                *say_busy(columns),
                *(
                    [_PARTS]
                    if any(figures.breakdown is not None for figures in measured.values())
                    else []
                ),
                *(
                    (f"Memory: {summary.memory_source}.", *memory.say_memory_line(summary, lines))
                    if measured
                    else ()
                ),
                *say_rates(runs, summary.run_spread),
                *conditions,
            )
        ),
        reasons=_plain(sentences.list_reasons(summary, columns)),
        lr_advice=_plain(sentences.list_advice(summary)),
        notes=_plain(map(str, summary.notes)),
        course=sentences.say_course(summary),
        trials=trials.trial_table(summary),
    )
    return replace(report, sections=_list_sections(report, lines))


def _list_sections(report: ReportModel, lines: Sequence[MemoryLine]) -> tuple[Section, ...]:
    """All that stands below the result; what has no content is left out."""
    summary = report.summary
    measured = {
        column.title: column.figures for column in report.columns if column.figures is not None
    }
    runs = {column.title: column.runs for column in report.columns if column.runs}
    group = memory.lines_of_group(summary, lines)
    plots = list_plots(summary, report.columns, group, memory.describe_group(group, lines))
    return filled(
        *ranks.scaling_sections(summary, report.columns),
        times.time_section(measured),
        times.ceiling_section(measured),
        device_section(summary, runs),
        Section(
            title="Why these settings", blocks=(Bullets(sentences=report.reasons),), is_brief=True
        ),
        Section(
            title="Learning rate", blocks=(Bullets(sentences=report.lr_advice),), is_brief=True
        ),
        Section(
            title="Notes on this run", blocks=(Bullets(sentences=report.notes),), is_brief=True
        ),
        times.loader_section(measured),
        length_section(measured),
        Section(title="Throughput of each trial", blocks=plots["rate"]),
        Section(
            title="Memory by batch size",
            blocks=(*plots["memory"], *memory.memory_table(summary, lines)),
        ),
        Section(
            title="The search, and why it ended",
            blocks=(Paragraph(text=report.course), *plots["score"]),
            is_brief=True,
        ),
        trials.precision_section(summary),
        memory.stress_section(summary),
        trials.trial_section(summary, report.trials),
        trials.repeat_section(summary),
        trials.failure_section(summary),
        Section(title="Workload", blocks=(Facts(facts=facts.describe_workload(summary.facts)),)),
        Section(
            title="Machine", blocks=(Facts(facts=facts.describe_environment(summary.environment)),)
        ),
        Section(
            title="Run: what was asked for", blocks=(Facts(facts=facts.describe_run(summary)),)
        ),
        Section(title="Files", blocks=(Facts(facts=report.files, are_files=True),), is_brief=True),
    )


def _plain(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, texts))
