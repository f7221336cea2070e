"""Build the blocks of a report, free of markup: paragraphs, tables, plots, and plots as tables."""

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

# Plots as plain numbers: throughput by batch and by workers, memory by batch, the history.
# `drawing` draws them, `plot_blocks` lists them row by row. A trial without a measurement is a mark
# without a height; a drawing shows it on the axis, to show where trials fail.

Fate = Literal["feasible", "over_memory", "failed"]
Quantity = Literal["rate", "memory", "score"]
"""Quantity on the y axis: samples/s, peak memory in GiB, or the score."""

_LEVEL_IN_SIGHT = 1.6
"""A ceiling over this many times the fastest trial is named in the caption, since drawing it would
flatten the marks. Source: our convention."""
BYTES_PER_GIB = 2**30
_TREND_STEPS = 24
"""Points of a fitted line, for a smooth error band. Source: our convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One trial."""

    x: float
    y: float | None
    """None if nothing was measured."""
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
    """A fitted line with its error band."""

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
    """A sentence or two that apply to a drawing and to a table."""
    marks: tuple[Mark, ...]
    """Every trial; empty if no trial measured anything."""
    levels: tuple[Level, ...] = ()
    trends: tuple[Trend, ...] = ()
    best_so_far: tuple[tuple[float, float], ...] = ()
    """(number of a feasible trial, best score up to it), drawn as steps."""
    is_log: bool = False
    """The x axis has powers of two."""


def list_plots(
    summary: RunSummary,
    columns: Sequence[Column],
    lines: Sequence[MemoryLine],
    about_lines: str = "",
) -> dict[Quantity, tuple[Plot, ...]]:
    """Return every plot by its quantity.

    Args:
        summary: The search.
        columns: Its configurations; the recommended one's ceilings are shown.
        lines: The fitted memory lines to draw.
        about_lines: Remarks on them; "" or with a leading space.
    """
    settings = ["micro_batch_size"]
    # a single number of workers would be a vertical line
    if len({trial.config.num_workers for trial in summary.trials}) > 1:
        settings.append("num_workers")
    return {
        "rate": tuple(_rates(summary, columns, setting) for setting in settings),
        "memory": (_memory(summary, lines, about_lines),),
        "score": (_history(summary),),
    }


def _rates(summary: RunSummary, columns: Sequence[Column], setting: str) -> Plot:
    marks = _marks(summary, "rate", setting)
    levels, caption = _ceilings(summary, columns, marks)
    plot = Plot(
        name="rate-by-batch",
        title="Throughput by batch size",
        x_label="micro batch",
        quantity="rate",
        caption=f"Throughput of each trial's first run.{caption}",
        marks=marks,
        levels=levels,
        is_log=True,
    )
    if setting == "micro_batch_size":
        return plot
    return replace(
        plot,
        name="rate-by-workers",
        title="Throughput by number of loader workers",
        x_label=setting,
        is_log=False,
    )


def _memory(summary: RunSummary, lines: Sequence[MemoryLine], about_lines: str) -> Plot:
    marks = _marks(summary, "memory", "micro_batch_size")
    captions = [f"Fitted lines are shown with their error.{about_lines}"] if lines else []
    levels: tuple[Level, ...] = ()
    limit = summary.limit_bytes / BYTES_PER_GIB
    if limit <= _LEVEL_IN_SIGHT * _highest(marks):
        levels = (Level(label="limit", y=limit, is_limit=True),)
    else:
        captions.append(f"The limit of {show(summary.limit_bytes, 'bytes')} is far above.")
    return Plot(
        name="memory",
        title="Memory by batch size",
        x_label="micro batch",
        quantity="memory",
        caption=" ".join(captions),
        marks=marks,
        levels=levels,
        trends=tuple(_trend(line, summary) for line in lines),
    )


def _history(summary: RunSummary) -> Plot:
    marks = _marks(summary, "score")
    counted = [(mark.x, mark.y) for mark in marks if mark.y is not None and mark.fate == "feasible"]
    highest = accumulate((score for _, score in counted), max)
    caption = "No trial ran well."
    if counted:
        caption = "The best so far counts only trials that ran well within the limit."
    failed = sum(mark.y is None for mark in marks)
    if failed:
        caption += f" Without a score: {format_count(failed, 'trial')}."
    return Plot(
        name="history",
        title="Score of each trial",
        x_label="trial",
        quantity="score",
        caption=caption,
        marks=marks,
        best_so_far=tuple(zip((number for number, _ in counted), highest, strict=True)),
    )


def _marks(summary: RunSummary, quantity: Quantity, setting: str = "") -> tuple[Mark, ...]:
    """Return a mark for each trial, by a setting or by its number; none if no trial has a height."""
    marks = tuple(
        Mark(
            x=getattr(trial.config, setting) if setting else trial.number,
            y=_height(trial, quantity),
            amp_dtype=trial.config.amp_dtype,
            fate=_fate_of(trial),
            role=role_of(trial.number, summary),
        )
        for trial in summary.trials
    )
    return marks if any(mark.y is not None for mark in marks) else ()


def _fate_of(trial: TrialRecord) -> Fate:
    if trial.is_feasible:
        return "feasible"
    return "over_memory" if trial.outcome == "over_memory" else "failed"


def _height(trial: TrialRecord, quantity: Quantity) -> float | None:
    if quantity == "score":
        return None if trial.score is None else trial.score.value
    if trial.measurement is None:
        return None
    if quantity == "rate":
        return trial.measurement.samples_per_s
    return trial.measurement.peak_memory_bytes / BYTES_PER_GIB


def _highest(marks: Sequence[Mark]) -> float:
    return max((mark.y for mark in marks if mark.y is not None), default=0.0)


def _ceilings(
    summary: RunSummary, columns: Sequence[Column], marks: Sequence[Mark]
) -> tuple[tuple[Level, ...], str]:
    """Return the recommended settings' ceilings as lines, and a caption with those far above."""
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
    if above:
        words += f" Far above: {above} samples/s."
    return near, words


def _trend(line: MemoryLine, summary: RunSummary) -> Trend:
    """Return a line from its smallest measured batch to the largest tried of its kind.

    Every batch tried in between has a point, whatever its precision.
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
    points = []
    for batch in sorted(batches):
        peak, error = line.predict(batch)
        points.append((batch, peak / BYTES_PER_GIB, error / BYTES_PER_GIB))
    return Trend(amp_dtype=line.config.amp_dtype, points=tuple(points))


def thin_out(values: Sequence[float], most: int) -> list[float]:
    """Return at most `most` of the values, evenly spaced by their places, both ends included."""
    gaps = min(most, len(values)) - 1
    if gaps <= 0:
        return list(values)
    return [values[round(index * (len(values) - 1) / gaps)] for index in range(gaps + 1)]


# The blocks that `sections` fill and renderers lay out. Texts may hold anything that a user's code
# printed: each renderer makes them safe in its own way.


MEASURED_BY = "measured by"
"""Head of a column that a console, for want of room, shows in lines below the table."""
_WORDS = (
    "advice device evidence outcome precision reason result searched setting settings value what"
)
TEXT_HEADS = frozenset({"", MEASURED_BY, *_WORDS.split()})
"""Heads of text columns, which are left-aligned and may wrap; figures are right-aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A few sentences."""

    text: str
    is_warning: bool = False
    """Readers would misread the figures below without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """A list of sentences."""

    sentences: tuple[str, ...]
    is_footnote: bool = False
    """Footnotes of the table above, in smaller or paler type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells, one for each head."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    row_kinds: tuple[str, ...] = ()
    """A kind for each row, for its style: "baseline", "recommended", "failed", "setting", or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and their values."""

    facts: dict[str, str]
    are_files: bool = False
    """The names are files next to the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBar:
    """The time breakdown of a configuration."""

    title: str
    caption: str
    """Its time for a number of samples."""
    length: float
    """Share of the longest bar, in 0..1."""
    parts: tuple[tuple[Part, float], ...]
    """Fractions of the bar, in order; they add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBars:
    """Bars to compare at a glance; a table next to them has the figures and their sources."""

    bars: tuple[TimeBar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A sentence with an optional traceback."""

    count: str
    """Number and outcome of trials: "2 crashed"."""
    text: str
    traceback: str = ""


Block = Paragraph | Bullets | Table | Facts | TimeBars | Plot | Trace
"""A block; a Plot is drawn on a page, is a table in Markdown, and is left out on a console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report with its own heading."""

    title: str
    blocks: tuple[Block, ...]
    is_short_search: bool = False
    """Part of the short form, which a console shows."""


def tabulate(
    rows: Iterable[Mapping[str, str]],
    heads: Sequence[str] = (),
    *,
    kinds: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> Table:
    """Build a table from rows of cells by head; a missing cell is NO_VALUE.

    Args:
        rows: Cells by their heads.
        heads: Columns in order; by default those of the first row.
        kinds: A kind for each row, or none.
        optional: Columns to leave out if no row has a value for them.
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
    """Tabulate facts of several configurations by title, without those that none of them has."""
    names = next(iter(columns.values()), {})
    rows = ((name, *(facts[name] for facts in columns.values())) for name in names)
    return Table(
        heads=("", *columns), rows=tuple(row for row in rows if set(row[1:]) != {NO_VALUE})
    )


def known_facts(facts: Mapping[str, str]) -> Facts:
    """Return the facts that have a value."""
    return Facts(
        facts={name: value for name, value in facts.items() if value not in {"", NO_VALUE}}
    )


def filled(*sections: Section) -> tuple[Section, ...]:
    """Return the sections that have content, without their empty blocks."""
    cleared = (
        replace(section, blocks=tuple(filter(_has_content, section.blocks))) for section in sections
    )
    return tuple(section for section in cleared if section.blocks)


def _has_content(block: Block) -> bool:
    """Return whether every required field of a block has content."""
    return all(getattr(block, field.name) for field in fields(block) if field.default is MISSING)


# Drawings as tables, for text: a row holds the trials at one place of the x axis; a line of the
# drawing becomes a column or a sentence.

_Places = dict[float, list[Mark]]
"""Trials at each place of the x axis, from left to right."""

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
"""Remark next to a figure; in increasing order of preference."""


def bar_table(bars: TimeBars) -> Table:
    """Tabulate bars: the whole, then each part, with its share of its own bar."""
    whole = ("in all", *(f"{text_bar(bar.length)} {bar.caption}" for bar in bars.bars))
    rows = [(name, *(_part(bar, part) for bar in bars.bars)) for part, name in PART_NAMES.items()]
    return Table(heads=("", *(bar.title for bar in bars.bars)), rows=(whole, *rows))


def plot_blocks(plot: Plot) -> tuple[Block, ...]:
    """Return a plot's table, and a paragraph with its caption, lines and marks of note."""
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
    """Return places evenly spaced, both ends included, and those of note."""
    kept = set(thin_out(list(places), 30))  # a page
    kept |= {mark.x for mark in plot.marks if mark.role}
    kept |= {x for (_, before), (x, best) in pairwise(plot.best_so_far) if best > before}
    return {x: marks for x, marks in places.items() if x in kept}


def _row(plot: Plot, x: float, marks: Sequence[Mark]) -> dict[str, str]:
    """Return a place's cells by head: the figures and the fitted line of each precision."""
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
    """Format a height on the y axis in the units of the report."""
    if quantity == "rate":
        return format_rate(y)
    return format_bytes(round(y * BYTES_PER_GIB)) if quantity == "memory" else f"{y:.3f}"


def _format_highest(marks: Sequence[Mark], quantity: Quantity) -> str:
    """Format the best feasible mark, or the best of the others; of memory the highest of all."""
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
    """Yield the figures of the baseline, of the recommended settings, and of horizontal lines."""
    unit = " samples/s" if plot.quantity == "rate" else ""
    for mark in plot.marks:
        if mark.role and mark.y is not None:
            y = _format_height(mark.y, plot.quantity)
            yield f"{mark.role.capitalize()}: {y}{unit} at {plot.x_label} {mark.x:,.0f}."
    for level in plot.levels:
        yield f"{level.label.capitalize()}: {_format_height(level.y, plot.quantity)}{unit}."
