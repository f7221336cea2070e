"""Print reports on a terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from autotune.config.environment import Environment
from autotune.config.plan import Choices, Domain, WorkloadFacts
from autotune.messages.units import format_count
from autotune.report.blocks import (
    TEXT_HEADS,
    Block,
    Bullets,
    Facts,
    Paragraph,
    Section,
    Table,
    Trace,
)
from autotune.report.model import ReportModel
from autotune.report.sections import describe_environment, describe_workload
from autotune.report.words import format_setting, format_value, one_line, shorten
from autotune.space.space import ResolvedSpace

# Blocks and sections. Every text is a rich Text, never a str, so that brackets in a user's message
# are printed literally. Plots and bars are left to the page.

_WIDEST_LABEL = 30
_WIDEST_FIGURE = 20
"""Terminal cells, so that a label and two figures fit 80 columns. Source: our convention."""
_LONGEST_REASON = 180
"""Terminal cells: three lines of 80 columns; report.md has the whole. Source: our convention."""
_MOST_FAILURES = 6
"""Kinds of failures shown: less than a screen. Source: our convention."""


def print_section(section: Section, console: Console) -> None:
    """Print a section below an empty line; nothing if a console can show none of its blocks."""
    traces = [block for block in section.blocks if isinstance(block, Trace)]
    grids = (*map(_grid_of, section.blocks), _traces(traces) if traces else None)
    shown = [Padding.indent(grid, 2) for grid in grids if grid is not None]
    if shown:
        console.print(Group(Text(), Text(section.title, style="bold"), *shown))


def print_block(block: Block, console: Console) -> None:
    """Print a block, as far as a console can show it; a table has empty lines around it."""
    grid = _grid_of(block)
    if grid is not None:
        console.print(Padding(grid, (1, 0) if isinstance(block, Table) else 0, expand=False))


def wrap_lines(text: str, console: Console, most: int, *, indent: str = "") -> list[str]:
    """Wrap foreign text into at most `most` lines, the last one cut with an ellipsis.

    Args:
        text: The text.
        console: The console, whose width the lines keep to.
        most: Number of lines.
        indent: Put before each line.
    """
    width = max(console.width - len(indent), 1)
    lines = [line.plain.rstrip() for line in Text(one_line(text)).wrap(console, width)]
    if len(lines) > most:
        lines = [*lines[: most - 1], shorten(f"{lines[most - 1]} …", width)]
    return [indent + line for line in lines if line]


def _grid_of(block: Block) -> RenderableType | None:
    match block:
        case Paragraph():
            return Text(one_line(block.text), style="bold" if block.is_warning else "")
        case Bullets(is_footnote=True):
            return Text("\n".join(map(one_line, block.sentences)), style="dim")
        case Bullets():
            return _lines((("·", sentence) for sentence in block.sentences), gap=1)
        case Facts():
            return _lines(block.facts.items(), style="dim")
        case Table():
            return _table(block)
    return None


def _table(block: Table) -> Grid:
    grid = Grid(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold"
    )
    for place, head in enumerate(block.heads):
        is_text = head in TEXT_HEADS
        is_label = head in {"", "what"}
        max_width = None if is_text else _WIDEST_FIGURE
        if is_label:
            max_width = _WIDEST_LABEL
        # an interval may break at its "to", a list at its commas
        may_wrap = any(" to " in row[place] or ", " in row[place] for row in block.rows)
        grid.add_column(
            Text("" if is_label else head),
            justify="left" if is_text else "right",
            style="green" if head == "recommended" else None,
            overflow="fold",
            no_wrap=not is_text and not may_wrap,
            max_width=max_width,
        )
    kinds = block.row_kinds or ("",) * len(block.rows)
    for row, kind, following in zip(block.rows, kinds, (*kinds[1:], ""), strict=True):
        label, *cells = row
        is_detail = label.startswith("  ")
        grid.add_row(
            Text(label if is_detail else one_line(label)),
            *(Text(one_line(cell)) for cell in cells),
            style="dim" if is_detail else None,
            end_section=following == "setting" and kind != "setting",
        )
    return grid


def _traces(traces: list[Trace]) -> Grid:
    lines = [
        (trace.count, shorten(trace.text, _LONGEST_REASON)) for trace in traces[:_MOST_FAILURES]
    ]
    more = len(traces) - _MOST_FAILURES
    if more > 0:
        lines.append(("…", f"{more} more kinds, in report.md"))
    return _lines(lines)


def _lines(pairs: Iterable[tuple[str, str]], *, style: str | None = None, gap: int = 2) -> Grid:
    grid = Grid.grid(padding=(0, gap))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name), Text(one_line(value)))
    return grid


# The summary of a search, the machine, and a checked configuration.


def print_summary(report: ReportModel, console: Console) -> None:
    """Print the short form of a report: headline, table, brief sections, files."""
    console.print()
    style = "bold green" if report.verdict == "faster" else "bold"
    console.print(Text(report.headline, style=style))
    for block in report.lead:
        print_block(block, console)
    for section in report.sections:
        if section.is_short_search and section.title != "Files":
            print_section(section, console)
    if report.files:
        print_section(
            Section(title=f"Files in {report.folder}", blocks=(Facts(facts=report.files),)), console
        )


def print_environment(environment: Environment, console: Console) -> None:
    """Print the machine as trials see it."""
    print_block(Facts(facts=describe_environment(environment)), console)


def print_check(
    environment: Environment,
    facts: WorkloadFacts,
    space: ResolvedSpace,
    console: Console,
    *,
    stale: str | None = None,
) -> None:
    """Print what a search would try: machine, workload, and each setting's values.

    Args:
        environment: The machine.
        facts: The workload.
        space: The resolved space.
        console: The console to print on.
        stale: Why an earlier result no longer applies, if there is one.
    """
    print_block(Facts(facts=describe_environment(environment) | describe_workload(facts)), console)
    print_block(_space_table(space), console)
    count = format_count(space.size, "combination")
    console.print(Text(f"{count}, less those that rules exclude or that run alike."))
    if space.notes:
        print_section(
            Section(title="Notes", blocks=(Bullets(sentences=tuple(map(str, space.notes))),)),
            console,
        )
    if stale is not None:
        console.print()
        print_block(Paragraph(text=str(stale), is_warning=True), console)


def _space_table(space: ResolvedSpace) -> Table:
    values = {name: _describe_domain(space.domains[name]) for name in sorted(space.parameters)}
    for name in sorted(space.domains.keys() - values):
        prefix = "follows the batch" if len(space.domains[name]) > 1 else "fixed"
        values[name] = f"{prefix}: {_describe_domain(space.domains[name])}"
    values["lr"] = _describe_lr(space)
    rows = tuple(
        (name, format_setting(name, space.baseline), searched) for name, searched in values.items()
    )
    return Table(heads=("setting", "baseline", "searched"), rows=rows)


def _describe_lr(space: ResolvedSpace) -> str:
    script = space.facts.script
    if script is not None and "lr" not in script.placeholders:
        return "the script's own; {lr} in the command lets it follow the batch"
    if space.objective.lr_rule == "none":
        return "fixed"
    return "not searched; follows the global batch"


def _describe_domain(domain: Domain) -> str:
    if isinstance(domain, Choices):
        return ", ".join(map(format_value, domain.values))
    scale = ", evenly in the logarithm" if domain.log else ""
    return f"{domain.low} to {domain.high}{scale}"
