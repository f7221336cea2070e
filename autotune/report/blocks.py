"""What a report is made of: sections of paragraphs, lists, tables, bars and plots, free of any markup.

Comes in: nothing. Goes out: the blocks that `sections` fill, and that every renderer lays out. Texts may hold anything
that a user's code has said: each renderer makes them plain in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.records.breakdown import Part
from autotune.report.plots.plots import Plot

__all__ = [
    "MEASURED_BY",
    "Block",
    "Bullets",
    "Facts",
    "Figure",
    "Paragraph",
    "Section",
    "Shares",
    "Table",
    "TimeBar",
    "TimeBars",
    "Trace",
    "filled",
]

MEASURED_BY = "measured by"
"""Head of a column that a console, which has no room for it, shows in lines below the table."""


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
    texts: frozenset[str] = frozenset({""})
    """Heads of the columns that hold text: they stand on the left and may wrap, figures stand on the right."""
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
class Shares:
    """Fractions of a whole, by name."""

    title: str
    head: str
    """What they are shares of, in a sentence without its end."""
    shares: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot: a page draws it, a text shows it as a table, a console leaves it out."""

    plot: Plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A sentence, and a traceback where there is one."""

    count: str
    """How many of what, such as "2 crashed"."""
    text: str
    traceback: str = ""


Block = Paragraph | Bullets | Table | Facts | TimeBars | Shares | Figure | Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report below its own heading."""

    title: str
    blocks: tuple[Block, ...]
    is_brief: bool = False
    """Belongs to the short form, which a console shows."""


_CONTENT = {
    Paragraph: "text",
    Bullets: "sentences",
    Table: "rows",
    Facts: "facts",
    TimeBars: "bars",
    Shares: "shares",
    Figure: "plot",
    Trace: "count",
}


def filled(*sections: Section) -> tuple[Section, ...]:
    """The sections that have content, with those blocks that have some."""
    cleared = (
        replace(section, blocks=tuple(block for block in section.blocks if getattr(block, _CONTENT[type(block)])))
        for section in sections
    )
    return tuple(section for section in cleared if section.blocks)
