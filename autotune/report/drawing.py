"""Draw plots with matplotlib as inline SVG in the page's colours, light or dark.

Takes a Plot; returns an <svg> element. The only user of matplotlib (the extra `report`), without
pyplot, windows, or changes of global settings. Colours are drawn as sentinels that become CSS
variables, and ids carry the plot's name; the same plot always gives the same text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from html import escape
from io import StringIO
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.config.training_config import AMP_DTYPES
from autotune.messages.units import format_rate
from autotune.report.blocks import Mark, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLOURS = ("ink", "muted", "rule", "paper", "bad", *AMP_DTYPES)
_OF = {name: f"#01000{number}" for number, name in enumerate(_COLOURS, 1)}
"""Sentinel colour of each of the page's CSS variables: colours that nothing else draws with."""
_SHAPES = {"float32": "o", "tf32": "s", "bfloat16": "^", "float16": "D"}
_Y_LABELS = {
    "rate": "samples/s",
    "memory": "peak memory, GiB",
    "score": "score (baseline: about 1)",
}
_MOST_TICKS = 8
"""Labels that fit below a plot as wide as a phone. Source: our convention."""
_STYLE = Path(__file__).with_name("report.mplstyle")
"""Sizes and sentinel colours, as a matplotlib style sheet."""


def draw(plot: Plot) -> str:
    """Draw a plot.

    Returns:
        An <svg> element.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with style.context(["default", _STYLE, {"svg.hashsalt": plot.name}], after_reset=True):
        figure = Figure(figsize=(4.6, 3.2))  # inches: 331 points are a phone's width
        axes = figure.add_subplot()
        _draw_trends(axes, plot)
        _draw_best(axes, plot)
        _draw_levels(axes, plot)
        _draw_marks(axes, plot)
        _label(axes, plot)
        _add_legend(figure, axes)
        # execute it only once: a figure that keeps its engine is drawn twice
        ConstrainedLayoutEngine().execute(figure)
        text = StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _inline(text.getvalue(), plot)


def _draw_marks(axes: Axes, plot: Plot) -> None:
    measured = [mark for mark in plot.marks if mark.y is not None]
    for dtype in AMP_DTYPES:
        own = [mark for mark in measured if mark.amp_dtype == dtype]
        good = [mark for mark in own if mark.fate == "feasible"]
        over = [mark for mark in own if mark.fate == "over_memory"]
        shape = {"s": 26, "marker": _SHAPES[dtype], "zorder": 3}
        _scatter(axes, good, c=_OF[dtype], alpha=0.85, linewidths=0, label=dtype, **shape)
        _scatter(
            axes, over, facecolors="none", edgecolors=_OF["bad"], label="over the limit", **shape
        )
    failed = [mark for mark in measured if mark.fate == "failed"]
    _scatter(axes, failed, c=_OF["bad"], s=26, marker="x", zorder=3, label="")
    absent = sorted({mark.x for mark in plot.marks if mark.y is None})
    if absent:
        crosses: dict[str, Any] = {
            "color": _OF["bad"],
            "clip_on": False,
            "label": "failed, cut short",
        }
        axes.plot(absent, [0.0] * len(absent), "x", transform=axes.get_xaxis_transform(), **crosses)
    for role, marker, size in (("baseline", "s", 90), ("recommended", "o", 170)):
        own = [mark for mark in measured if mark.role == role]
        ring = {"facecolors": "none", "edgecolors": _OF["ink"], "linewidths": 1.3, "zorder": 4}
        _scatter(axes, own, s=size, marker=marker, label=role, **ring)


def _scatter(axes: Axes, marks: Sequence[Mark], **style: Any) -> None:
    if marks:
        # matplotlib converts lists number by number
        points = np.array([(mark.x, mark.y or 0.0) for mark in marks])
        axes.scatter(points[:, 0], points[:, 1], **style)


def _draw_trends(axes: Axes, plot: Plot) -> None:
    for trend in plot.trends:
        colour = _OF[trend.amp_dtype]
        xs, ys, _ = zip(*trend.points, strict=True)
        low = [y - error for _, y, error in trend.points]
        high = [y + error for _, y, error in trend.points]
        axes.plot(xs, ys, color=colour, linewidth=1.2)
        axes.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)


def _draw_best(axes: Axes, plot: Plot) -> None:
    if plot.best_so_far:
        xs, ys = zip(*plot.best_so_far, strict=True)
        last = max(mark.x for mark in plot.marks)
        axes.step(
            (*xs, last),
            (*ys, ys[-1]),
            where="post",
            color=_OF["ink"],
            linewidth=1.2,
            label="best so far",
        )


def _draw_levels(axes: Axes, plot: Plot) -> None:
    for level in plot.levels:
        colour = _OF["bad" if level.is_limit else "muted"]
        axes.axhline(
            level.y, color=colour, linewidth=1.1, linestyle="-" if level.is_limit else (0, (5, 3))
        )
        axes.annotate(
            level.label,
            (1.0, level.y),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -11 if level.is_limit else 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=colour,
        )


def _label(axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    axes.set(xlabel=plot.x_label, ylabel=_Y_LABELS[plot.quantity])
    if plot.is_log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(_ticks_of({mark.x for mark in plot.marks}))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=_MOST_TICKS, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if plot.quantity == "rate":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
    axes.set_ylim(0.0, _top(plot))
    axes.margins(x=0.06)


def _ticks_of(values: Collection[float]) -> list[float]:
    """Return at most _MOST_TICKS of some positive values, evenly spread by their logarithms."""
    if not values:
        return []
    low = log(min(values))
    high = log(max(values))
    places = [low + (high - low) * index / (_MOST_TICKS - 1) for index in range(_MOST_TICKS)]
    return sorted({min(values, key=lambda value: abs(log(value) - place)) for place in places})


def _top(plot: Plot) -> float:
    """Return the upper end of the y axis: room above everything but error bands."""
    heights = [mark.y for mark in plot.marks if mark.y is not None]
    heights += [level.y for level in plot.levels] + [
        y for trend in plot.trends for _, y, _ in trend.points
    ]
    return 1.08 * max(heights, default=0.0) or 1.0


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        figure.legend(unique.values(), unique.keys(), loc="outside upper left", ncols=4)


def _inline(svg: str, plot: Plot) -> str:
    """Extract the <svg> element, with the page's colours and font, unique ids, and a label."""
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for name, sentinel in _OF.items():
        text = text.replace(sentinel, f"var(--{name})")
    text = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", text)
    text = re.sub(r"(font: (?:[\w.]+ )*[\d.]+px) [^;\"]+", r"\1 var(--font)", text)
    text = re.sub(r'\bid="', f'id="{plot.name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{plot.name}-", text)
    for side in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", text, count=1)
    label = escape(f"{plot.title}. {plot.caption}")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
