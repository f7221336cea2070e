"""The blocks of a report on a console: tables, facts and lists that fit its width.

Comes in: blocks and Sections. Goes out: text on a rich Console. Every text is a rich Text, never a str, so that
brackets in a user's message are printed and not obeyed. What a console can't show (plots, bars of time) is left to the
page.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from autotune.report.blocks import MEASURED_BY, TEXT_HEADS, Block, Bullets, Facts, Paragraph, Section, Table, Trace
from autotune.report.text import one_line, shorten

__all__ = ["print_block", "print_section"]

_WIDEST_LABEL, _WIDEST_FIGURE = 30, 20
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
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    shown = [place for place, head in enumerate(block.heads) if head != MEASURED_BY]
    for place in shown:
        head = block.heads[place]
        is_text, is_label = head in TEXT_HEADS, head in {"", "what"}
        may_wrap = any(" to " in row[place] or ", " in row[place] for row in block.rows)
        grid.add_column(
            Text("" if is_label else head),
            justify="left" if is_text else "right",
            style="green" if head == "recommended" else None,
            overflow="fold",
            no_wrap=not is_text and not may_wrap,  # an interval that finds no room may break at its "to"
            max_width=_WIDEST_LABEL if is_label else None if is_text else _WIDEST_FIGURE,
        )
    for row, kind, following in zip_longest(block.rows, block.row_kinds, block.row_kinds[1:], fillvalue=""):
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
    lines = [(trace.count, shorten(trace.text, _LONGEST_REASON)) for trace in traces[:_MOST_FAILURES]]
    more = len(traces) - _MOST_FAILURES
    return _lines([*lines, *([("…", f"{more} more kinds, in report.md")] if more > 0 else [])])


def _lines(pairs: Iterable[tuple[str, str]], *, style: str | None = None, gap: int = 2) -> Grid:
    grid = Grid.grid(padding=(0, gap))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name), Text(one_line(value)))
    return grid
