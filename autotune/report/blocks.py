"""What a report is made of: sections of paragraphs, lists, tables, bars and plots, free of any markup.

`sections` fills them from a RunSummary; `markdown` and `page` lay the same blocks out. Texts may hold anything that a
user's code has said: each layout makes them plain in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.breakdown import Part

__all__ = [
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
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A few sentences."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """Sentences, each for itself."""

    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells below their heads; every row has as many cells as there are heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: frozenset[str] = frozenset()
    """Heads of the columns that hold text: they stand on the left and may wrap, figures stand on the right."""
    row_kinds: tuple[str, ...] = ()
    """A word for each row that a layout may show it by: "baseline", "recommended", "failed", or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and their values."""

    facts: dict[str, str]


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
    """A place for the plot of this name: a page draws it, a text tells it as a table."""

    name: str


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
