"""Calculate and word a report once, for every renderer.

Takes a RunSummary and its run folder; returns a frozen ReportModel, with all that a console,
Markdown, a page, a notebook and the JSON document show. Renderers calculate nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.models.memory import MemoryLine
from autotune.records.measurement import Measurement
from autotune.records.result import RunSummary
from autotune.report import sections, sentences
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
from autotune.report.words import one_line

_PARTS = "Parts of the time: profiled in one run; waits for data averaged over all runs, including restarts of epochs."
Verdict = Literal[
    "faster", "already_best", "unconfirmed", "baseline_infeasible", "nothing_feasible"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportModel:
    """The content of a search's report."""

    summary: RunSummary
    run_dir: Path
    folder: str
    """Path of the run folder, relative if it is below the working directory."""
    files: dict[str, str]
    """Files in the run folder: {name: content}."""
    verdict: Verdict
    headline: str
    """The verdict in a sentence or two."""
    changes: tuple[tuple[str, str, str], ...]
    """Settings to change: (name, baseline's value, recommended value)."""
    columns: tuple[Column, ...]
    """Baseline, recommended, same batch and larger batch with their figures, each configuration
    once."""
    headroom: str
    """Distance of throughput from the ceilings, in a sentence or two; "" if not measured."""
    doubts: tuple[str, ...]
    """Reasons to doubt the comparison, a sentence each."""
    conditions: tuple[str, ...]
    """Other influences on throughput, a sentence each."""
    table: Table
    """The configurations side by side."""
    footnotes: tuple[str, ...]
    """Footnotes of the table, a sentence each."""
    reasons: tuple[str, ...]
    """Reasons for the recommendation, a sentence each."""
    lr_advice: tuple[str, ...]
    """Changes of the learning rate, betas and eps, a sentence each."""
    notes: tuple[str, ...]
    """Notes on this run, a sentence each."""
    course: str
    """Course of the search: trials, outcomes, time, why it ended."""
    trials: Table
    """A row for each trial."""
    sections: tuple[Section, ...] = ()
    """Everything below the result."""

    @property
    def lead(self) -> tuple[Block, ...]:
        """Blocks right below the headline: headroom, doubts, the table if it has figures, footnotes."""
        warnings = (Paragraph(text=doubt, is_warning=True) for doubt in self.doubts)
        headroom = (Paragraph(text=self.headroom),) if self.headroom else ()
        if self.verdict == "nothing_feasible" and self.columns[0].figures is None:
            return (*headroom, *warnings)
        return (
            *headroom,
            *warnings,
            self.table,
            Bullets(sentences=self.footnotes, is_footnote=True),
        )


def build_report(
    summary: RunSummary, run_dir: Path, *, written: Container[str] = ()
) -> ReportModel:
    """Calculate and word a report.

    Args:
        summary: The search.
        run_dir: Its run folder.
        written: Names of files that will be written from this report, and need not exist yet.
    """
    columns = make_columns(summary)
    measured = {column.title: column.figures for column in columns if column.figures is not None}
    runs = {column.title: column.runs for column in columns if column.runs}
    lines = sections.list_memory_lines(summary)
    conditions = _plain(sentences.list_conditions(runs))
    # Footnotes of the table
    footnotes = [*sentences.describe_busy(columns)]
    if any(figures.breakdown is not None for figures in measured.values()):
        footnotes.append(_PARTS)
    if measured:
        footnotes.append(f"Memory: {summary.memory_source}.")
    footnotes += sentences.describe_throughputs(runs, summary.run_variation)
    # The result first, then the sections, which need it
    report = ReportModel(
        summary=summary,
        run_dir=run_dir,
        folder=one_line(sections.show_path(run_dir)),
        files=sections.list_files(run_dir, written),
        verdict=verdict_of(summary),
        headline=sentences.describe_headline(summary, columns),
        changes=tuple(sentences.list_changes(summary)),
        columns=columns,
        headroom=sentences.describe_headroom(summary, columns),
        doubts=_plain(sentences.list_doubts(runs)),
        conditions=conditions,
        table=sections.result_table(columns, summary.limit_bytes),
        footnotes=(*_plain(footnotes), *conditions),
        reasons=_plain(sentences.list_reasons(summary)),
        lr_advice=_plain(sentences.list_advice(summary)),
        notes=_plain(map(str, summary.notes)),
        course=sentences.describe_course(summary),
        trials=sections.trial_table(summary),
    )
    return replace(report, sections=_list_sections(report, lines, measured, runs))


def verdict_of(summary: RunSummary) -> Verdict:
    """Return the verdict of a search."""
    return "nothing_feasible" if summary.recommendation is None else summary.recommendation.verdict


def _list_sections(
    report: ReportModel,
    lines: Sequence[MemoryLine],
    measured: Mapping[str, Measurement],
    runs: Mapping[str, Sequence[Measurement]],
) -> tuple[Section, ...]:
    """List the sections below the result that have content."""
    summary = report.summary
    group = sections.lines_of_group(summary, lines)
    plots = list_plots(summary, report.columns, group, sections.describe_group(group, lines))
    return filled(
        *sections.scaling_sections(summary, report.columns),
        sections.time_section(measured),
        sections.ceiling_section(measured),
        sections.device_section(summary, runs),
        _list("Why these settings", report.reasons),
        _list("Learning rate", report.lr_advice),
        _list("Notes on this run", report.notes),
        sections.loader_section(measured),
        sections.length_section(measured),
        Section(title="Throughput of each trial", blocks=plots["rate"]),
        Section(
            title="Memory by batch size",
            blocks=(*plots["memory"], *sections.memory_table(summary, lines)),
        ),
        Section(
            title="The search, and why it ended",
            blocks=(Paragraph(text=report.course), *plots["score"]),
            is_short_search=True,
        ),
        sections.precision_section(summary),
        sections.stress_section(summary),
        sections.trial_section(summary, report.trials),
        sections.repeat_section(summary),
        sections.failure_section(summary),
        _facts("Workload", sections.describe_workload(summary.facts)),
        _facts("Machine", sections.describe_environment(summary.environment)),
        _facts("Options of the run", sections.describe_run(summary)),
        Section(
            title="Files", blocks=(Facts(facts=report.files, are_files=True),), is_short_search=True
        ),
    )


def _list(title: str, sentences: tuple[str, ...]) -> Section:
    return Section(title=title, blocks=(Bullets(sentences=sentences),), is_short_search=True)


def _facts(title: str, facts: dict[str, str]) -> Section:
    return Section(title=title, blocks=(Facts(facts=facts),))


def _plain(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, texts))
