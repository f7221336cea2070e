"""The report's sections, in order: the same content for report.html and report.md, their plots included.

Comes in: a RunSummary and its run folder. Goes out: Sections of blocks without markup. Where the time goes is in
`time_sections`; what several devices bring in `rank_sections`; what was run, and what was checked, in `trial_sections`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Block, Bullets, Facts, Figure, Paragraph, Section, Shares, Table
from autotune.report.content import (
    describe_environment,
    describe_workload,
    list_advice,
    list_files,
    list_reasons,
    list_remarks,
)
from autotune.report.figures import Column, Row, make_columns, make_rows
from autotune.report.formatting import describe_settings, format_bytes, format_duration
from autotune.report.sections.devices import device_section, figures_by_title, say_doubts
from autotune.report.sections.headroom import say_standing
from autotune.report.sections.ranks import scaling_sections
from autotune.report.sections.times import ceiling_section, loader_section, time_section
from autotune.report.sections.trials import (
    confirmation_section,
    failure_section,
    guard_section,
    memory_section,
    stress_section,
    trial_section,
)
from autotune.report.wording.say import say

__all__ = ["list_sections", "result_blocks", "result_table"]


def result_blocks(summary: RunSummary) -> tuple[Block, ...]:
    """What stands right below the headline: the standing, the table, remarks on it."""
    columns = make_columns(summary)
    standing, doubts = say_standing(summary), say_doubts(figures_by_title(columns))
    return (
        *((Paragraph(text=" ".join(standing)),) if standing else ()),
        *(Paragraph(text=doubt) for doubt in doubts),
        result_table(columns, make_rows(columns, summary.limit_bytes)),
        Bullets(sentences=list_remarks(summary, columns)),
    )


def result_table(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """The configurations side by side."""
    return Table(
        heads=("", *(column.title for column in columns)),
        rows=tuple((row.label.strip(), *row.cells) for row in rows),
        texts=frozenset({""}),
        row_kinds=tuple("setting" if row.is_setting else "" for row in rows),
    )


def list_sections(
    summary: RunSummary, run_dir: Path, *, own_file: str, drawn: Container[str] = ()
) -> tuple[Section, ...]:
    """Every section that has something to say, with what says it.

    Args:
        summary: what is told.
        run_dir: the run folder.
        own_file: the report's own name, which may not be there yet.
        drawn: names of the plots that can be shown, drawn or as tables.
    """
    sections = (
        *scaling_sections(summary),
        time_section(summary),
        ceiling_section(summary),
        device_section(summary),
        Section(title="Why", blocks=(Bullets(sentences=list_reasons(summary)),)),
        Section(title="Learning rate", blocks=(Bullets(sentences=list_advice(summary)),)),
        Section(title="Notes", blocks=(Bullets(sentences=tuple(map(say, summary.notes))),)),
        loader_section(summary),
        Section(title="Throughput", blocks=(Figure(name="rate-by-batch"), Figure(name="rate-by-workers"))),
        memory_section(summary),
        Section(title="The search", blocks=(Figure(name="history"), _importances(summary))),
        guard_section(summary),
        stress_section(summary),
        trial_section(summary),
        confirmation_section(summary),
        failure_section(summary),
        Section(title="Workload", blocks=(Facts(facts=describe_workload(summary.facts)),)),
        Section(title="Machine", blocks=(Facts(facts=describe_environment(summary.environment)),)),
        Section(title="Run", blocks=(Facts(facts=_describe_run(summary)),)),
        Section(title="Files", blocks=(Facts(facts={own_file: "this report", **_other_files(run_dir, own_file)}),)),
    )
    told = (
        replace(section, blocks=tuple(block for block in section.blocks if _says_something(block, drawn)))
        for section in sections
    )
    return tuple(section for section in told if section.blocks)


def _importances(summary: RunSummary) -> Shares:
    ordered = sorted(summary.importances.items(), key=lambda item: -item[1])
    head = "how much each setting tells whether a trial is among the best quarter"
    return Shares(title="Settings by importance", head=head, shares=dict(ordered))


def _describe_run(summary: RunSummary) -> dict[str, str]:
    objective, budget = summary.objective, summary.budget
    timeout = "none" if budget.timeout_s is None else format_duration(budget.timeout_s)
    return {
        "autotune": summary.autotune_version,
        "seed": str(summary.seed),
        "baseline": describe_settings(summary.baseline),
        "memory limit": f"{format_bytes(summary.limit_bytes)}, {summary.memory_source}",
        "busy weight": f"{objective.busy_weight:g}",
        "global batch": f"{objective.global_batch}, at most {objective.max_batch_scale:g} times the baseline's",
        "lr rule": objective.lr_rule,
        "budget": f"at most {budget.max_trials} trials, time-out: {timeout}",
    }


def _other_files(run_dir: Path, own_file: str) -> dict[str, str]:
    return {name: purpose for name, purpose in list_files(run_dir).items() if name != own_file}


def _says_something(block: Block, drawn: Container[str]) -> bool:
    """Whether a block is more than an empty frame."""
    if isinstance(block, Figure):
        return block.name in drawn
    if isinstance(block, Bullets):
        return bool(block.sentences)
    if isinstance(block, Table):
        return bool(block.rows)
    return bool(block.shares) if isinstance(block, Shares) else True
