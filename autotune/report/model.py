"""The report as finished content: calculated and worded once from a RunSummary, laid out by every renderer.

Comes in: a RunSummary and its run folder. Goes out: a frozen ReportModel. Renderers calculate nothing: what a console,
Markdown, a page, a notebook and the JSON document show stands here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.note import Note
from autotune.records.run_summary import RunSummary
from autotune.records.trial import Outcome
from autotune.report.blocks import Block, Bullets, Facts, Figure, Paragraph, Section, Shares, Table, filled
from autotune.report.figures import Column, make_columns
from autotune.report.plots.plots import Plot, list_plots
from autotune.report.sections.devices import device_section
from autotune.report.sections.facts import describe_environment, describe_run, describe_workload, list_files, show_path
from autotune.report.sections.memory import (
    describe_group,
    lines_of_group,
    list_memory_lines,
    memory_table,
    say_memory_line,
    stress_section,
)
from autotune.report.sections.ranks import compare, scaling_sections
from autotune.report.sections.result import result_table
from autotune.report.sections.times import ceiling_section, loader_section, time_section
from autotune.report.sections.trials import (
    confirmation_section,
    failure_section,
    precision_section,
    trial_section,
    trial_table,
)
from autotune.report.text import one_line
from autotune.report.wording.remarks import list_conditions, list_doubts, say_busy, say_rates
from autotune.report.wording.say import say
from autotune.report.wording.summary import (
    list_advice,
    list_changes,
    list_reasons,
    say_course,
    say_headline,
    say_headroom,
)

__all__ = ["ReportModel", "Verdict", "build_report"]

_PARTS = "Parts of the time: profiled in one run, waits for data averaged over all runs; restarts of epochs included."
Verdict = Literal["faster", "already_best", "unconfirmed", "baseline_infeasible", "nothing_feasible"]


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
    """Baseline, recommended and same batch with their figures, each configuration once."""
    changes: tuple[tuple[str, str, str], ...]
    """The settings to change: (name, the baseline's value, the recommended one)."""
    headroom: str
    """How far the rates are from the ceilings, in a sentence or two; "" where these were not measured."""
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
    note_codes: tuple[str, ...]
    """The notes' codes; a note that is stored as a sentence has none."""
    course: str
    """How the search went: trials, outcomes, time, why it ended."""
    outcomes: dict[Outcome, int]
    """Trials by outcome, the most frequent first."""
    trials: Table
    """Every trial in a row."""
    plots: tuple[Plot, ...]
    sections: tuple[Section, ...]
    """All that stands below the result."""

    @property
    def lead(self) -> tuple[Block, ...]:
        """What stands right below the headline: headroom, doubts, the table where there is a figure for it, remarks."""
        warnings = (Paragraph(text=doubt, is_warning=True) for doubt in self.doubts)
        headroom = (Paragraph(text=self.headroom),) if self.headroom else ()
        if self.verdict == "nothing_feasible" and self.columns[0].figures is None:
            return (*headroom, *warnings)
        return (*headroom, *warnings, self.table, Bullets(sentences=self.remarks, is_remark=True))

    def column(self, number: int | None) -> Column | None:
        """The column of a trial's configuration, or None."""
        return next((column for column in self.columns if column.number == number), None)


def build_report(summary: RunSummary, run_dir: Path, *, written: Container[str] = ()) -> ReportModel:
    """Calculate and word a report.

    Args:
        summary: the search.
        run_dir: its run folder.
        written: names of files that will be written from this very report, and need not be there yet.
    """
    columns = make_columns(summary)
    measured = {column.title: column.figures for column in columns if column.figures is not None}
    lines, files = list_memory_lines(summary), list_files(run_dir, written)
    reasons, advice = _plain(list_reasons(summary, columns)), _plain(list_advice(summary))
    stored: tuple[Note | str, ...] = summary.notes  # a str from an older version
    notes, course, conditions = _plain(map(say, stored)), say_course(summary), _plain(list_conditions(measured))
    group = lines_of_group(summary, lines)
    about_lines = describe_group(group, lines)
    plots = list_plots(summary, columns, group, about_lines)
    trials = trial_table(summary)
    importances = dict(sorted(summary.importances.items(), key=lambda item: -item[1]))

    def drawn(*names: str) -> tuple[Figure, ...]:
        return tuple(Figure(plot=plot) for plot in plots if plot.name in names)

    sections = filled(
        *scaling_sections(compare(summary), summary, columns),
        time_section(measured),
        ceiling_section(measured),
        device_section(summary, measured),
        Section(title="Why", blocks=(Bullets(sentences=reasons),), is_brief=True),
        Section(title="Learning rate", blocks=(Bullets(sentences=advice),), is_brief=True),
        Section(title="Notes", blocks=(Bullets(sentences=notes),), is_brief=True),
        loader_section(measured),
        Section(title="Throughput", blocks=drawn("rate-by-batch", "rate-by-workers")),
        Section(title="Memory", blocks=(*drawn("memory"), *memory_table(summary, lines))),
        Section(
            title="The search",
            blocks=(Paragraph(text=course), *drawn("history"), _importances(importances)),
            is_brief=True,
        ),
        precision_section(summary),
        stress_section(summary),
        trial_section(summary, trials),
        confirmation_section(summary),
        failure_section(summary),
        Section(title="Workload", blocks=(Facts(facts=describe_workload(summary.facts)),)),
        Section(title="Machine", blocks=(Facts(facts=describe_environment(summary.environment)),)),
        Section(title="Run", blocks=(Facts(facts=describe_run(summary)),)),
        Section(title="Files", blocks=(Facts(facts=files, are_files=True),), is_brief=True),
    )
    return ReportModel(
        summary=summary,
        run_dir=run_dir,
        folder=one_line(show_path(run_dir)),
        files=files,
        verdict="nothing_feasible" if summary.recommendation is None else summary.recommendation.verdict,
        headline=say_headline(summary, columns),
        columns=columns,
        changes=list_changes(summary),
        headroom=say_headroom(summary, columns),
        doubts=_plain(list_doubts(measured)),
        conditions=conditions,
        table=result_table(columns, summary.limit_bytes),
        remarks=_plain(
            (
                *say_busy(columns),
                *([_PARTS] if any(figures.breakdown is not None for figures in measured.values()) else []),
                *((f"Memory: {summary.memory_source}.", *say_memory_line(summary, lines)) if measured else ()),
                *say_rates(measured),
                *conditions,
            )
        ),
        reasons=reasons,
        lr_advice=advice,
        notes=notes,
        note_codes=tuple(found.code for found in stored if isinstance(found, Note)),
        course=course,
        outcomes=dict(Counter(trial.outcome for trial in summary.trials).most_common()),
        trials=trials,
        plots=plots,
        sections=sections,
    )


def _plain(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, sentences))


def _importances(importances: dict[str, float]) -> Shares:
    head = "how well each setting tells whether a trial is among the best quarter"
    return Shares(title="Settings by importance", head=head, shares=importances)
