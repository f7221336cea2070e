"""The blocks of a section on a console: tables, facts and lists that fit its width.

Comes in: Sections and blocks. Goes out: rich renderables. Every text is a rich Text, never a str, so that brackets in
a user's message are printed and not obeyed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from autotune.report.blocks import Block, Bullets, Facts, Paragraph, Section, Table
from autotune.report.formatting import one_line

__all__ = ["MEASURED_BY", "print_section", "text_bar"]

_BAR_CELLS = 30
"""Of a bar of blocks that stands for the whole."""
MEASURED_BY = "measured by"
"""A column that is told below its table."""


def print_section(section: Section, console: Console) -> None:
    """A section's title and its blocks, below an empty line."""
    console.print()
    console.print(Text(section.title, style="bold"))
    for block in section.blocks:
        console.print(Padding.indent(_grid(block), 2))


def text_bar(fraction: float) -> str:
    """A share as a bar of full blocks."""
    return "█" * round(_BAR_CELLS * fraction)


def _grid(block: Block) -> RenderableType:
    if isinstance(block, Paragraph):
        return Text(one_line(block.text))
    if isinstance(block, Bullets):
        return _lines([("·", sentence) for sentence in block.sentences], style=None)
    if isinstance(block, Facts):
        return _lines(list(block.facts.items()), style="dim")
    assert isinstance(block, Table)  # noqa: S101 - the console is given no other
    if MEASURED_BY in block.heads:
        return Group(_table_grid(block), *_sources(block))
    return _table_grid(block)


def _sources(block: Table) -> list[Text]:
    """What stands in the column "measured by", in lines below the table: beside it there is no room."""
    place, names = block.heads.index(MEASURED_BY), dict[str, list[str]]()
    for row in block.rows:
        names.setdefault(one_line(row[place]), []).append(row[0])
    return [Text(f"{', '.join(parts)}: {source}", style="dim") for source, parts in names.items()]


def _table_grid(block: Table) -> Grid:
    shown = [place for place, head in enumerate(block.heads) if head != MEASURED_BY]
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    for place in shown:
        head = block.heads[place]
        is_text, is_interval = head in block.texts, any(" to " in row[place] for row in block.rows)
        narrow = not is_text or head in {"", "what"}
        grid.add_column(
            Text("" if head == "what" else head),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not (is_text or is_interval),  # an interval that finds no room may break at its "to"
            max_width=_BAR_CELLS if narrow else None,
        )
    for row in block.rows:
        grid.add_row(*(Text(one_line(row[place])) for place in shown))
    return grid


def _lines(pairs: Sequence[tuple[str, str]], *, style: str | None) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name), Text(one_line(value)))
    return grid
