"""What a page draws, as tables for a text that can't: bars of time, and each plot row by row.

Comes in: TimeBars, and Plots. Goes out: blocks without markup. A bar is a run of full blocks. A row of a plot's table
holds the trials at one place of its x axis; what is a line in the drawing is a column or a sentence here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from autotune.messages.units import NO_VALUE, format_bytes, format_fraction, format_rate, text_bar
from autotune.records.breakdown import Part
from autotune.report.blocks import Block, Paragraph, Table, TimeBar, TimeBars, tabulate
from autotune.report.plots.plots import BYTES_PER_GIB, Fate, Mark, Plot, Quantity, Trend, thin_out
from autotune.report.wording.names import PART_NAMES
from autotune.settings.training_config import AMP_DTYPES

__all__ = ["bar_table", "plot_blocks"]

_Places = dict[float, list[Mark]]
"""The trials at each place of the x axis, from left to right."""

_HEADS: dict[Quantity, str] = {"rate": "best samples/s", "memory": "largest peak memory", "score": "score"}
_FATES: dict[Fate, str] = {"failed": " (failed)", "over_memory": " (over the limit)", "feasible": ""}
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
    sentences = (*_say_heights(plot), plot.caption, left_out)
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
    row, head = {plot.x_label: f"{x:,.0f}"}, _HEADS[plot.quantity]
    if plot.quantity == "score":
        return row | {head: _say_highest(marks, plot.quantity), "best so far": _say_best(plot, x)}
    measured = {mark.amp_dtype for mark in plot.marks if mark.y is not None}
    trends = {trend.amp_dtype: trend for trend in plot.trends}
    for dtype in filter(measured.__contains__, AMP_DTYPES):
        own = [mark for mark in marks if mark.amp_dtype == dtype]
        row[f"{head}, {dtype}"] = _say_highest(own, plot.quantity)
        if dtype in trends:
            row[f"fitted line, {dtype}"] = _say_trend(trends[dtype], x, plot.quantity)
    row["trials"] = f"{len(marks):,}"
    row["over the limit"] = f"{sum(mark.fate == 'over_memory' for mark in marks):,}"
    row["failed, cut short"] = f"{sum(mark.y is None for mark in marks):,}"
    return row


def _say(y: float, quantity: Quantity) -> str:
    """A height on the y axis as the rest of the report says it."""
    if quantity == "rate":
        return format_rate(y)
    return format_bytes(round(y * BYTES_PER_GIB)) if quantity == "memory" else f"{y:.3f}"


def _say_highest(marks: Sequence[Mark], quantity: Quantity) -> str:
    """The best of what counts, and of other trials where nothing does; of memory the highest of all."""
    order = list(_FATES)
    known = [(order.index(mark.fate), mark.y) for mark in marks if mark.y is not None]
    if not known:
        return NO_VALUE
    worth, y = max(known, key=lambda pair: pair[1]) if quantity == "memory" else max(known)
    return f"{_say(y, quantity)}{_FATES[order[worth]]}"


def _say_trend(trend: Trend, x: float, quantity: Quantity) -> str:
    found = next(((y, error) for at, y, error in trend.points if at == x), None)
    return NO_VALUE if found is None else " ± ".join(_say(value, quantity) for value in found)


def _say_best(plot: Plot, x: float) -> str:
    reached = [best for at, best in plot.best_so_far if at <= x]
    return _say(reached[-1], plot.quantity) if reached else NO_VALUE


def _say_heights(plot: Plot) -> Iterator[str]:
    """Where the baseline and the recommended settings stand, and the horizontal lines."""
    unit = " samples/s" * (plot.quantity == "rate")  # what no head says here
    for mark in plot.marks:
        if mark.role and mark.y is not None:
            yield f"{mark.role.capitalize()}: {_say(mark.y, plot.quantity)}{unit} at {plot.x_label} {mark.x:,.0f}."
    for level in plot.levels:
        yield f"{level.label.capitalize()}: {_say(level.y, plot.quantity)}{unit}."
