"""The blocks that a report is made of, free of markup: paragraphs, tables, plots, and plots as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal

from autotune.config.training_config import AMP_DTYPES, AmpDtype
from autotune.messages.units import (
    NO_VALUE,
    format_bytes,
    format_count,
    format_fraction,
    format_rate,
    show,
    text_bar,
)
from autotune.models.memory import MemoryLine, memory_kind
from autotune.records.breakdown import Part
from autotune.records.result import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.figures import Column, Role, role_of
from autotune.report.words import PART_NAMES

# What the report's plots show, as plain numbers: throughput by batch and by workers, memory by
# batch, the history.
#
# Comes in: a RunSummary, its columns and fitted memory lines. Goes out: Plots, which `drawing`
# draws and `tables` lists row by row. A trial that measured nothing is a mark without a height; a
# drawing has it on the axis, to show where trials fail.


Fate = Literal["feasible", "over_memory", "failed"]
Quantity = Literal["rate", "memory", "score"]
"""What stands on a y axis: samples/s, GiB of the highest memory, the score."""

_LEVEL_IN_SIGHT = 1.6
"""A ceiling higher than this many times the fastest trial is named below the plot: drawn, it would
flatten the marks. Our convention."""
BYTES_PER_GIB = 2**30
_TREND_STEPS = 24
"""Points of a fitted line: our convention, a straight line with a smooth error band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One trial."""

    x: float
    y: float | None
    """None where nothing was measured."""
    amp_dtype: AmpDtype
    fate: Fate
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line."""

    label: str
    y: float
    is_limit: bool = False
    """A limit that must not be passed; otherwise a ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A fitted line, with what it may be off by."""

    amp_dtype: AmpDtype
    points: tuple[tuple[float, float, float], ...]
    """(x, y, half of the error band), from left to right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot."""

    name: str
    title: str
    x_label: str
    quantity: Quantity
    caption: str = ""
    """What there is to know, in a sentence or two that hold for a drawing and for a table; "" for
    nothing."""
    marks: tuple[Mark, ...]
    """Every trial; none where no trial measured anything."""
    levels: tuple[Level, ...] = ()
    trends: tuple[Trend, ...] = ()
    best_so_far: tuple[tuple[float, float], ...] = ()
    """(trial that counts, best score up to it), drawn as steps."""
    is_log: bool = False
    """Powers of two on the x axis."""


def list_plots(
    summary: RunSummary,
    columns: Sequence[Column],
    lines: Sequence[MemoryLine],
    about_lines: str = "",
) -> dict[Quantity, tuple[Plot, ...]]:
    """Every plot by what it shows; one by the loader's workers where their number varied.

    Args:
        summary: the search.
        columns: baseline and recommended settings, of which the latter's ceilings are shown.
        lines: the fitted memory lines to draw.
        about_lines: what to know of them; "" or with a space before.
    """
    settings = ["micro_batch_size"]
    if (
        len({trial.config.num_workers for trial in summary.trials}) > 1
    ):  # one number of them would be one upright line
        settings.append("num_workers")
    return {
        "rate": tuple(_rates(summary, columns, setting) for setting in settings),
        "memory": (_memory(summary, lines, about_lines),),
        "score": (_history(summary),),
    }


def _rates(summary: RunSummary, columns: Sequence[Column], setting: str) -> Plot:
    is_batch = setting == "micro_batch_size"
    marks = _marks(summary, "rate", setting)
    levels, caption = _ceilings(summary, columns, marks)
    return Plot(
        name="rate-by-batch" if is_batch else "rate-by-workers",
        title=f"Throughput against {'batch size' if is_batch else 'loader workers'}",
        x_label="micro batch" if is_batch else setting,
        quantity="rate",
        caption=f"Rates are those of the search's trials, one run each.{caption}",
        marks=marks,
        levels=levels,
        is_log=is_batch,
    )


def _memory(summary: RunSummary, lines: Sequence[MemoryLine], about_lines: str) -> Plot:
    marks = _marks(summary, "memory", "micro_batch_size")
    limit = summary.limit_bytes / BYTES_PER_GIB
    is_near = limit <= _LEVEL_IN_SIGHT * _highest(marks)
    far = "" if is_near else f" The limit of {show(summary.limit_bytes, 'bytes')} is far above."
    return Plot(
        name="memory",
        title="Memory against batch size",
        x_label="micro batch",
        quantity="memory",
        caption=f"Fitted lines are shown with their error.{about_lines}{far}"
        if lines
        else far.strip(),
        marks=marks,
        levels=(Level(label="limit", y=limit, is_limit=True),) if is_near else (),
        trends=tuple(_trend(line, summary) for line in lines),
    )


def _history(summary: RunSummary) -> Plot:
    marks = _marks(summary, "score")
    counted = [(mark.x, mark.y) for mark in marks if mark.y is not None and mark.fate == "feasible"]
    highest = accumulate((score for _, score in counted), max)
    failed = sum(mark.y is None for mark in marks)
    line = (
        "The best so far is among trials that ran well within the limit."
        if counted
        else "No trial ran well."
    )
    without = f" Without a score: {format_count(failed, 'trial')}." if failed else ""
    return Plot(
        name="history",
        title="Score of each trial",
        x_label="trial",
        quantity="score",
        caption=line + without,
        marks=marks,
        best_so_far=tuple(zip((number for number, _ in counted), highest, strict=True)),
    )


def _marks(summary: RunSummary, quantity: Quantity, setting: str = "") -> tuple[Mark, ...]:
    """Each trial's, by a setting or by its number; none where no trial measured anything."""
    marks = tuple(
        Mark(
            x=getattr(trial.config, setting) if setting else trial.number,
            y=_height(trial, quantity),
            amp_dtype=trial.config.amp_dtype,
            fate="feasible"
            if trial.is_feasible
            else "over_memory"
            if trial.outcome == "over_memory"
            else "failed",
            role=role_of(trial.number, summary),
        )
        for trial in summary.trials
    )
    return marks if any(mark.y is not None for mark in marks) else ()


def _height(trial: TrialRecord, quantity: Quantity) -> float | None:
    if quantity == "score":
        return None if trial.score is None else trial.score.value
    if trial.measurement is None:
        return None
    return (
        trial.measurement.samples_per_s
        if quantity == "rate"
        else trial.measurement.peak_memory_bytes / BYTES_PER_GIB
    )


def _highest(marks: Sequence[Mark]) -> float:
    return max((mark.y for mark in marks if mark.y is not None), default=0.0)


def _ceilings(
    summary: RunSummary, columns: Sequence[Column], marks: Sequence[Mark]
) -> tuple[tuple[Level, ...], str]:
    """The recommended settings' ceilings: those in sight as lines; whose they are, and the others, in words."""
    found = summary.recommendation
    figures = next(
        (known.figures for known in columns if found is not None and known.number == found.number),
        None,
    )
    rates = {side: getattr(figures, f"{side}_ceiling", None) for side in ("loader", "device")}
    levels = [
        Level(label=f"{side} alone", y=rate) for side, rate in rates.items() if rate is not None
    ]
    near = tuple(level for level in levels if level.y <= _LEVEL_IN_SIGHT * _highest(marks))
    above = ", ".join(
        f"{level.label} {show(level.y, 'plain_rate')}" for level in levels if level not in near
    )
    words = " Ceilings are those of the recommended settings." if levels else ""
    return near, words + f" Far above: {above} samples/s." * bool(above)


def _trend(line: MemoryLine, summary: RunSummary) -> Trend:
    """From the smallest batch measured to the largest tried of its kind, failed ones included.

    Every batch that was tried in between has a point, whatever its precision.
    """
    tried = [trial.config for trial in summary.trials]
    first = line.batches[0]
    last = max(
        config.micro_batch_size
        for config in tried
        if memory_kind(config) == memory_kind(line.config)
    )
    batches = {
        round(first + (last - first) * step / _TREND_STEPS) for step in range(_TREND_STEPS + 1)
    }
    batches |= {
        config.micro_batch_size for config in tried if first <= config.micro_batch_size <= last
    }
    told = ((batch, *line.predict(batch)) for batch in sorted(batches))
    points = tuple(
        (batch, peak / BYTES_PER_GIB, error / BYTES_PER_GIB) for batch, peak, error in told
    )
    return Trend(amp_dtype=line.config.amp_dtype, points=points)


def thin_out(values: Sequence[float], most: int) -> list[float]:
    """So many of the values at the most, evenly among them, both ends included."""
    gaps = min(most, len(values)) - 1
    return (
        [values[round(index * (len(values) - 1) / gaps)] for index in range(gaps + 1)]
        if gaps > 0
        else [*values]
    )


# What a report is made of: sections of paragraphs, lists, tables, bars and plots, free of any
# markup.
#
# Comes in: cells and facts by their names. Goes out: the blocks that `sections` fill, and that
# every renderer lays out. Texts may hold anything that a user's code has said: each renderer makes
# them plain in its own way.


MEASURED_BY = "measured by"
"""Head of a column that a console, which has no room for it, shows in lines below the table."""
_WORDS = (
    "advice device evidence outcome precision reason result searched setting settings value what"
)
TEXT_HEADS = frozenset({"", MEASURED_BY, *_WORDS.split()})
"""Heads of the columns that hold text: they stand on the left and may wrap, figures stand on the
right."""


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
    """A word for each row that a layout may show it by: "baseline", "recommended", "failed",
    "setting", or ""."""


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
    unknown = [
        head for head in optional if all(row.get(head, NO_VALUE) == NO_VALUE for row in rows)
    ]
    given = heads or (tuple(rows[0]) if rows else ())
    shown = tuple(head for head in given if head not in unknown)
    cells = tuple(tuple(row.get(head, NO_VALUE) for head in shown) for row in rows)
    return Table(heads=shown, rows=cells, row_kinds=tuple(kinds))


def side_by_side(columns: Mapping[str, Mapping[str, str]]) -> Table:
    """The same facts of several configurations, by their titles; those that no configuration has are left out."""
    names = next(iter(columns.values()), {})
    rows = ((name, *(facts[name] for facts in columns.values())) for name in names)
    return Table(
        heads=("", *columns), rows=tuple(row for row in rows if set(row[1:]) != {NO_VALUE})
    )


def known_facts(facts: Mapping[str, str]) -> Facts:
    """The facts that have a value."""
    return Facts(
        facts={name: value for name, value in facts.items() if value not in {"", NO_VALUE}}
    )


def filled(*sections: Section) -> tuple[Section, ...]:
    """The sections that have content, with those blocks that have some."""
    cleared = (
        replace(section, blocks=tuple(filter(_has_content, section.blocks))) for section in sections
    )
    return tuple(section for section in cleared if section.blocks)


def _has_content(block: Block) -> bool:
    """Whether nothing that a block must have is empty."""
    return all(getattr(block, field.name) for field in fields(block) if field.default is MISSING)


# What a page draws, as tables for a text that can't: bars of time, and each plot row by row.
#
# Comes in: TimeBars, and Plots. Goes out: blocks without markup. A bar is a run of full blocks. A
# row of a plot's table holds the trials at one place of its x axis; what is a line in the drawing
# is a column or a sentence here.


_Places = dict[float, list[Mark]]
"""The trials at each place of the x axis, from left to right."""

_HEADS: dict[Quantity, str] = {
    "rate": "best samples/s",
    "memory": "largest peak memory",
    "score": "score",
}
_FATES: dict[Fate, str] = {
    "failed": " (failed)",
    "over_memory": " (over the limit)",
    "feasible": "",
}
"""What is said beside a figure; those that count stand last."""


def bar_table(bars: TimeBars) -> Table:
    """Bars beside one another: the whole, then each part; a bar's length is its time, the share is of its own whole."""
    whole = ("in all", *(f"{text_bar(bar.length)} {bar.caption}" for bar in bars.bars))
    rows = [(name, *(_part(bar, part) for bar in bars.bars)) for part, name in PART_NAMES.items()]
    return Table(heads=("", *(bar.title for bar in bars.bars)), rows=(whole, *rows))


def plot_blocks(plot: Plot) -> tuple[Block, ...]:
    """A plot's table, and in words what is no row of it."""
    places = _places(plot)
    shown = _thinned(plot, places)
    left_out = f"{len(shown)} of {len(places)} rows are shown." if len(shown) < len(places) else ""
    sentences = (*_list_heights(plot), plot.caption, left_out)
    return tabulate(_row(plot, x, marks) for x, marks in shown.items()), Paragraph(
        text=" ".join(filter(None, sentences))
    )


def _part(bar: TimeBar, part: Part) -> str:
    fraction = dict(bar.parts)[part]
    return f"{text_bar(bar.length * fraction)} {format_fraction(fraction)}".strip()


def _places(plot: Plot) -> _Places:
    marks = sorted(plot.marks, key=lambda mark: mark.x)
    return {x: list(there) for x, there in groupby(marks, key=lambda mark: mark.x)}


def _thinned(plot: Plot, places: _Places) -> _Places:
    """Some of many places: evenly among them, both ends included, and those of note."""
    kept = set(thin_out(list(places), 30))  # a page
    kept |= {mark.x for mark in plot.marks if mark.role}
    kept |= {x for (_, before), (x, best) in pairwise(plot.best_so_far) if best > before}
    return {x: marks for x, marks in places.items() if x in kept}


def _row(plot: Plot, x: float, marks: Sequence[Mark]) -> dict[str, str]:
    """A place's cells by their heads: what was measured there in each precision, and what its fitted line says."""
    row = {plot.x_label: f"{x:,.0f}"}
    head = _HEADS[plot.quantity]
    if plot.quantity == "score":
        return row | {
            head: _format_highest(marks, plot.quantity),
            "best so far": _format_best(plot, x),
        }
    measured = {mark.amp_dtype for mark in plot.marks if mark.y is not None}
    trends = {trend.amp_dtype: trend for trend in plot.trends}
    for dtype in filter(measured.__contains__, AMP_DTYPES):
        own = [mark for mark in marks if mark.amp_dtype == dtype]
        row[f"{head}, {dtype}"] = _format_highest(own, plot.quantity)
        if dtype in trends:
            row[f"fitted line, {dtype}"] = _format_trend(trends[dtype], x, plot.quantity)
    row["trials"] = f"{len(marks):,}"
    row["over the limit"] = f"{sum(mark.fate == 'over_memory' for mark in marks):,}"
    row["failed, cut short"] = f"{sum(mark.y is None for mark in marks):,}"
    return row


def _format_height(y: float, quantity: Quantity) -> str:
    """A height on the y axis as the rest of the report says it."""
    if quantity == "rate":
        return format_rate(y)
    return format_bytes(round(y * BYTES_PER_GIB)) if quantity == "memory" else f"{y:.3f}"


def _format_highest(marks: Sequence[Mark], quantity: Quantity) -> str:
    """The best of what counts, and of other trials where nothing does; of memory the highest of all."""
    order = list(_FATES)
    known = [(order.index(mark.fate), mark.y) for mark in marks if mark.y is not None]
    if not known:
        return NO_VALUE
    worth, y = max(known, key=lambda pair: pair[1]) if quantity == "memory" else max(known)
    return f"{_format_height(y, quantity)}{_FATES[order[worth]]}"


def _format_trend(trend: Trend, x: float, quantity: Quantity) -> str:
    found = next(((y, error) for at, y, error in trend.points if at == x), None)
    return (
        NO_VALUE
        if found is None
        else " ± ".join(_format_height(value, quantity) for value in found)
    )


def _format_best(plot: Plot, x: float) -> str:
    reached = [best for at, best in plot.best_so_far if at <= x]
    return _format_height(reached[-1], plot.quantity) if reached else NO_VALUE


def _list_heights(plot: Plot) -> Iterator[str]:
    """Where the baseline and the recommended settings stand, and the horizontal lines."""
    unit = " samples/s" * (plot.quantity == "rate")  # what no head says here
    for mark in plot.marks:
        if mark.role and mark.y is not None:
            yield f"{mark.role.capitalize()}: {_format_height(mark.y, plot.quantity)}{unit} at {plot.x_label} {mark.x:,.0f}."
    for level in plot.levels:
        yield f"{level.label.capitalize()}: {_format_height(level.y, plot.quantity)}{unit}."
