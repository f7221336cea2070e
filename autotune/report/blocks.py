"""What a report is made of: sections of paragraphs, lists, tables, bars and plots, free of any markup.

Comes in: cells and facts by their names. Goes out: the blocks that `sections` fill, and that every renderer lays out.
Texts may hold anything that a user's code has said: each renderer makes them plain in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace

from autotune.messages.units import NO_VALUE
from autotune.records.breakdown import Part
from autotune.report.plots.plots import Plot

__all__ = [
    "MEASURED_BY",
    "TEXT_HEADS",
    "Block",
    "Bullets",
    "Facts",
    "Paragraph",
    "Section",
    "Table",
    "TimeBar",
    "TimeBars",
    "Trace",
    "filled",
    "known_facts",
    "side_by_side",
    "tabulate",
]

MEASURED_BY = "measured by"
"""Head of a column that a console, which has no room for it, shows in lines below the table."""
_WORDS = "advice device evidence outcome precision reason result searched setting settings value what"
TEXT_HEADS = frozenset({"", MEASURED_BY, *_WORDS.split()})
"""Heads of the columns that hold text: they stand on the left and may wrap, figures stand on the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A few sentences."""

    text: str
    is_warning: bool = False
    """Without it the figures below are read wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """Sentences, each for itself."""

    sentences: tuple[str, ...]
    is_remark: bool = False
    """On the table above: shown in smaller or paler type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells below their heads; every row has as many cells as there are heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    row_kinds: tuple[str, ...] = ()
    """A word for each row that a layout may show it by: "baseline", "recommended", "failed", "setting", or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and their values."""

    facts: dict[str, str]
    are_files: bool = False
    """The names are those of files beside the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBar:
    """Where the time of one configuration goes."""

    title: str
    caption: str
    """Its time for some samples."""
    length: float
    """Share of the longest bar, in 0..1."""
    parts: tuple[tuple[Part, float], ...]
    """Fractions of the bar, in order; they add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBars:
    """Bars to compare at a glance; a table beside them holds the figures and their sources."""

    bars: tuple[TimeBar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A sentence, and a traceback where there is one."""

    count: str
    """How many of what, such as "2 crashed"."""
    text: str
    traceback: str = ""


Block = Paragraph | Bullets | Table | Facts | TimeBars | Plot | Trace
"""A Plot is drawn on a page and a table in a text; a console leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report below its own heading."""

    title: str
    blocks: tuple[Block, ...]
    is_brief: bool = False
    """Belongs to the short form, which a console shows."""


def tabulate(
    rows: Iterable[Mapping[str, str]],
    heads: Sequence[str] = (),
    *,
    kinds: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> Table:
    """Rows of cells, each by its head; of a cell that a row lacks nothing is known.

    Args:
        rows: the cells.
        heads: the columns in order; where not given, those of the first row.
        kinds: a word for each row, or none.
        optional: heads of columns that are left out where no row has a value for them.
    """
    rows = list(rows)
    unknown = [head for head in optional if all(row.get(head, NO_VALUE) == NO_VALUE for row in rows)]
    given = heads or (tuple(rows[0]) if rows else ())
    shown = tuple(head for head in given if head not in unknown)
    cells = tuple(tuple(row.get(head, NO_VALUE) for head in shown) for row in rows)
    return Table(heads=shown, rows=cells, row_kinds=tuple(kinds))


def side_by_side(columns: Mapping[str, Mapping[str, str]]) -> Table:
    """The same facts of several configurations, by their titles; those that no configuration has are left out."""
    names = next(iter(columns.values()), {})
    rows = ((name, *(facts[name] for facts in columns.values())) for name in names)
    return Table(heads=("", *columns), rows=tuple(row for row in rows if set(row[1:]) != {NO_VALUE}))


def known_facts(facts: Mapping[str, str]) -> Facts:
    """The facts that have a value."""
    return Facts(facts={name: value for name, value in facts.items() if value not in {"", NO_VALUE}})


def filled(*sections: Section) -> tuple[Section, ...]:
    """The sections that have content, with those blocks that have some."""
    cleared = (replace(section, blocks=tuple(filter(_has_content, section.blocks))) for section in sections)
    return tuple(section for section in cleared if section.blocks)


def _has_content(block: Block) -> bool:
    """Whether nothing that a block must have is empty."""
    return all(getattr(block, field.name) for field in fields(block) if field.default is MISSING)
