"""Print reports on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from autotune.config.environment import Environment
from autotune.config.plan import Choices, Domain, WorkloadFacts
from autotune.messages.units import format_count
from autotune.report.blocks import (
    MEASURED_BY,
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

# The blocks of a report on a console: tables, facts and lists that fit its width.
#
# Comes in: blocks and Sections. Goes out: text on a rich Console. Every text is a rich Text, never
# a str, so that brackets in a user's message are printed and not obeyed. What a console can't show
# (plots, bars of time) is left to the page.


_WIDEST_LABEL = 30
_WIDEST_FIGURE = 20
"""Cells, so that a label and two figures fit 80 columns: our convention."""
_LONGEST_REASON = 180  # cells: three lines at 80 columns, our convention; the report has the whole
_MOST_FAILURES = 6  # our convention: with their reasons less than a screen


def print_section(section: Section, console: Console) -> None:
    """A section's title and its blocks, below an empty line; nothing where a console can show none of them."""
    traces = [block for block in section.blocks if isinstance(block, Trace)]
    grids = (*map(_grid_of, section.blocks), _traces(traces) if traces else None)
    shown = [Padding.indent(grid, 2) for grid in grids if grid is not None]
    if shown:
        console.print(Group(Text(), Text(section.title, style="bold"), *shown))


def print_block(block: Block, console: Console) -> None:
    """A block by itself, as far as a console can show it; a table stands between empty lines."""
    grid = _grid_of(block)
    if grid is not None:
        console.print(Padding(grid, (1, 0) if isinstance(block, Table) else 0, expand=False))


def _grid_of(block: Block) -> RenderableType | None:
    match block:
        case Paragraph():
            return Text(one_line(block.text), style="bold" if block.is_warning else "")
        case Bullets(is_remark=True):
            return Text("\n".join(map(one_line, block.sentences)), style="dim")
        case Bullets():
            return _lines((("·", sentence) for sentence in block.sentences), gap=1)
        case Facts():
            return _lines(block.facts.items(), style="dim")
        case Table():
            return Group(_table(block), *_sources(block))
    return None


def _table(block: Table) -> Grid:
    """A table without its column of sources."""
    grid = Grid(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold"
    )
    shown = [place for place, head in enumerate(block.heads) if head != MEASURED_BY]
    for place in shown:
        head = block.heads[place]
        is_text = head in TEXT_HEADS
        is_label = head in {"", "what"}
        may_wrap = any(" to " in row[place] or ", " in row[place] for row in block.rows)
        grid.add_column(
            Text("" if is_label else head),
            justify="left" if is_text else "right",
            style="green" if head == "recommended" else None,
            overflow="fold",
            no_wrap=not is_text
            and not may_wrap,  # an interval that finds no room may break at its "to"
            max_width=_WIDEST_LABEL if is_label else None if is_text else _WIDEST_FIGURE,
        )
    for row, kind, following in zip_longest(
        block.rows, block.row_kinds, block.row_kinds[1:], fillvalue=""
    ):
        label, *cells = (row[place] for place in shown)
        is_detail = label.startswith("  ")
        grid.add_row(
            Text(label if is_detail else one_line(label)),
            *(Text(one_line(cell)) for cell in cells),
            style="dim" if is_detail else None,
            end_section=following == "setting" and kind != "setting",
        )
    return grid


def _sources(block: Table) -> list[Text]:
    """What stands in the column "measured by", in lines below the table: beside it there is no room."""
    names: dict[str, list[str]] = {}
    for row in block.rows if MEASURED_BY in block.heads else ():
        names.setdefault(one_line(row[block.heads.index(MEASURED_BY)]), []).append(row[0])
    return [Text(f"{', '.join(parts)}: {source}", style="dim") for source, parts in names.items()]


def _traces(traces: list[Trace]) -> Grid:
    lines = [
        (trace.count, shorten(trace.text, _LONGEST_REASON)) for trace in traces[:_MOST_FAILURES]
    ]
    more = len(traces) - _MOST_FAILURES
    return _lines([*lines, *([("…", f"{more} more kinds, in report.md")] if more > 0 else [])])


def _lines(pairs: Iterable[tuple[str, str]], *, style: str | None = None, gap: int = 2) -> Grid:
    grid = Grid.grid(padding=(0, gap))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name), Text(one_line(value)))
    return grid


# The summary, the machine and a checked configuration on a console, within 80 columns.
#
# Comes in: a ReportModel, or what `autotune check` has found, and a rich Console. Goes out: text on
# that console.


def print_summary(report: ReportModel, console: Console) -> None:
    """The short form of a report: headline, table, whether more devices help, reasons, advice, failures, files."""
    console.print()
    console.print(
        Text(report.headline, style="bold green" if report.verdict == "faster" else "bold")
    )
    for block in report.lead:
        print_block(block, console)
    for section in report.sections:
        if section.is_brief and section.title != "Files":
            print_section(section, console)
    if report.files:
        print_section(
            Section(title=f"Files in {report.folder}", blocks=(Facts(facts=report.files),)), console
        )


def print_environment(environment: Environment, console: Console) -> None:
    """The machine as trials see it."""
    print_block(Facts(facts=describe_environment(environment)), console)


def print_check(
    environment: Environment,
    facts: WorkloadFacts,
    space: ResolvedSpace,
    console: Console,
    *,
    stale: str | None = None,
) -> None:
    """What a search would try: the machine, the workload, each setting's values; and why a former result is stale."""
    print_block(Facts(facts=describe_environment(environment) | describe_workload(facts)), console)
    print_block(_space_table(space), console)
    console.print(
        Text(
            f"{format_count(space.size, 'combination')}, less those that rules exclude or that run "
            "alike."
        )
    )
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
    return (
        "not searched; follows the global batch" if space.objective.lr_rule != "none" else "fixed"
    )


def _describe_domain(domain: Domain) -> str:
    if isinstance(domain, Choices):
        return ", ".join(map(format_value, domain.values))
    return f"{domain.low} to {domain.high}{', evenly in the logarithm' if domain.log else ''}"
