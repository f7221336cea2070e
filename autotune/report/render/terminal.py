"""The summary, the machine and a checked configuration on a console, within 80 columns.

Comes in: core's finished objects and a rich Console. Goes out: text on that console. Every text is a rich Text, never a
str, so that brackets in a user's message are printed and not obeyed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.records.run_summary import RunSummary
from autotune.report.content import (
    describe_environment,
    describe_workload,
    group_failures,
    list_advice,
    list_files,
    list_reasons,
    list_remarks,
    say_course,
    say_headline,
    show_path,
)
from autotune.report.figures import Column, Row, make_columns, make_rows
from autotune.report.formatting import format_count, format_setting, format_value, name_outcome, one_line, shorten
from autotune.report.render.console_blocks import print_section
from autotune.report.sections.devices import figures_by_title, say_doubts
from autotune.report.sections.headroom import say_standing
from autotune.report.sections.ranks import scaling_sections
from autotune.report.wording.say import say
from autotune.settings.environment import Environment
from autotune.settings.search_space import Choices, Domain
from autotune.settings.workload import WorkloadFacts
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["print_check", "print_environment", "print_summary"]

_LONGEST_REASON = 180  # cells: three lines at 80 columns; the report has the whole
_GROUPS_SHOWN = 6


def print_summary(summary: RunSummary, *, run_dir: Path, console: Console) -> None:
    """The result: headline, table, whether more devices help, advice, failures, notes, files."""
    columns = make_columns(summary)
    found = summary.recommendation
    style = "bold green" if found is not None and found.verdict == "faster" else "bold"
    console.print()
    console.print(Text(say_headline(summary), style=style))
    for sentence in say_standing(summary):
        console.print(Text(sentence))
    for doubt in say_doubts(figures_by_title(columns)):
        console.print(Text(doubt, style="bold"))
    if found is not None or columns[0].figures is not None:
        console.print()
        console.print(_result_table(columns, make_rows(columns, summary.limit_bytes)))
        console.print()
        for remark in list_remarks(summary, columns):
            console.print(Text(remark, style="dim"))
    for section in scaling_sections(summary):
        print_section(section, console)
    _print_list(console, "Why", list_reasons(summary))
    _print_list(console, "Learning rate", list_advice(summary))
    console.print()
    console.print(Text(say_course(summary)))
    _print_failures(console, summary)
    _print_list(console, "Notes", map(say, summary.notes))
    _print_files(console, run_dir)


def print_environment(environment: Environment, console: Console) -> None:
    """The machine as trials see it."""
    console.print(_facts_grid(describe_environment(environment)))


def print_check(
    environment: Environment, facts: WorkloadFacts, space: ResolvedSpace, console: Console, *, stale: str | None = None
) -> None:
    """What a search would try: the machine, the workload, each setting's values; and why a former result is stale."""
    console.print(_facts_grid({**describe_environment(environment), **describe_workload(facts)}))
    console.print()
    console.print(_space_table(space))
    console.print()
    count = format_count(space.size, "combination")
    console.print(Text(f"{count}, less those that rules exclude or that run alike."))
    _print_list(console, "Notes", map(say, space.notes))
    if stale is not None:
        console.print()
        console.print(Text(one_line(stale), style="bold"))


def _result_table(columns: Iterable[Column], rows: Iterable[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    for column in columns:
        style = "green" if column.title == "recommended" else None
        table.add_column(Text(column.title), justify="right", style=style, overflow="fold", max_width=20)
    previous: Row | None = None
    for row in rows:
        if row.is_setting and previous is not None and not previous.is_setting:
            table.add_section()
        style = "dim" if row.label.startswith(" ") else None
        table.add_row(Text(row.label), *map(Text, row.cells), style=style)
        previous = row
    return table


def _space_table(space: ResolvedSpace) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("setting", no_wrap=True)
    table.add_column("baseline", justify="right", overflow="fold")
    table.add_column("searched", overflow="fold")
    searched = space.parameters
    for name in sorted(space.domains, key=lambda one: (one not in searched, one)):
        domain = space.domains[name]
        values = _describe_domain(domain)
        if name not in searched:
            values = f"follows the batch: {values}" if len(domain) > 1 else f"fixed: {values}"
        style = None if name in searched else "dim"
        table.add_row(Text(name), Text(format_setting(name, space.baseline)), Text(values), style=style)
    lr = "not searched; follows the global batch" if space.objective.lr_rule != "none" else "fixed"
    table.add_row(Text("lr"), Text(format_setting("lr", space.baseline)), Text(lr), style="dim")
    return table


def _describe_domain(domain: Domain) -> str:
    if isinstance(domain, Choices):
        return ", ".join(map(format_value, domain.values))
    return f"{domain.low} to {domain.high}{', evenly in the logarithm' if domain.log else ''}"


def _facts_grid(facts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(Text(name), Text(one_line(value)))
    return grid


def _print_list(console: Console, title: str, sentences: Iterable[str]) -> None:
    lines = [(Text("·"), Text(one_line(sentence))) for sentence in sentences]
    if lines:
        _print_block(console, title, _grid(lines, gap=1))


def _print_failures(console: Console, summary: RunSummary) -> None:
    groups = group_failures(summary)
    lines = []
    for group in groups[:_GROUPS_SHOWN]:
        count = f"{len(group.trials)} {name_outcome(group.outcome)}"
        lines.append((Text(count), Text(shorten(f"{group.numbers}: {group.reason}", _LONGEST_REASON))))
    if len(groups) > _GROUPS_SHOWN:
        lines.append((Text("…"), Text(f"{len(groups) - _GROUPS_SHOWN} more kinds, in report.md")))
    if lines:
        _print_block(console, "Failures", _grid(lines))


def _print_files(console: Console, run_dir: Path) -> None:
    lines = [(Text(name), Text(purpose)) for name, purpose in list_files(run_dir).items()]
    if lines:
        _print_block(console, f"Files in {one_line(show_path(run_dir))}", _grid(lines))


def _print_block(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Group(Text(title, style="bold", overflow="fold"), Padding.indent(body, 2)))


def _grid(lines: Iterable[tuple[Text, Text]], *, gap: int = 2) -> Table:
    grid = Table.grid(padding=(0, gap))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(*line)
    return grid
