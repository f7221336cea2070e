"""Build the blocks of a report, free of markup: paragraphs, tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from autotune.config.training_config import AmpDtype, TrainingConfig
from autotune.messages.units import NO_VALUE
from autotune.models.memory import MemoryLine, memory_kind
from autotune.records.breakdown import Part
from autotune.records.result import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.figures import Column, Role, recommended_figures, role_of

# Plots as plain numbers: throughput by batch and by workers, memory by batch, the history.
# `drawing` draws them. A trial without a measurement is a mark without a height; a drawing shows it
# on the axis, to show where trials fail.

Fate = Literal["feasible", "over_memory", "failed"]
Quantity = Literal["rate", "memory", "score"]
"""Quantity on the y axis: samples/s, peak memory in GiB, or the score."""

_LEVEL_IN_SIGHT = 1.6
"""A ceiling or limit over this many times the highest trial is left out, since drawing it would
flatten the marks; a table has it. Source: our convention."""
BYTES_PER_GIB = 2**30
_TREND_POINTS = 25
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
    """A sentence or two on what is drawn."""
    marks: tuple[Mark, ...]
    """Every trial; empty if no trial measured anything."""
    levels: tuple[Level, ...] = ()
    trends: tuple[Trend, ...] = ()
    best_so_far: tuple[tuple[float, float], ...] = ()
    """(number of a feasible trial, best score up to it), drawn as steps."""
    is_log: bool = False
    """The x axis has powers of two."""


def list_plots(
    summary: RunSummary, columns: Sequence[Column], lines: Sequence[MemoryLine], about_lines: str
) -> dict[Quantity, tuple[Plot, ...]]:
    """Return every plot by its quantity.

    Args:
        summary: The search.
        columns: Its configurations; the recommended one's ceilings are shown.
        lines: The fitted memory lines to draw.
        about_lines: Remarks on them; "" or with a leading space.
    """
    return {
        "rate": tuple(_rate_plots(summary, columns)),
        "memory": (_memory_plot(summary, lines, about_lines),),
        "score": (_score_plot(summary),),
    }


def _rate_plots(summary: RunSummary, columns: Sequence[Column]) -> Iterator[Plot]:
    """Plot throughput over the batch and the workers, with the recommended settings' ceilings as lines."""
    marks = _marks(summary, "rate", lambda config: config.micro_batch_size)
    caption = "Throughput of each trial's first run."
    figures = recommended_figures(summary, columns)
    near = tuple(
        Level(label=f"{side} alone", y=rate)
        for side in ("loader", "device")
        if (rate := getattr(figures, f"{side}_ceiling", None)) is not None
        and rate <= _LEVEL_IN_SIGHT * _highest(marks)
    )
    if near:
        caption += " Ceilings are those of the recommended settings."
    by_batch = Plot(
        name="rate-by-batch",
        title="Throughput by batch size",
        x_label="micro batch",
        quantity="rate",
        caption=caption,
        marks=marks,
        levels=near,
        is_log=True,
    )
    yield by_batch
    # a single number of workers would be a vertical line
    if len({trial.config.num_workers for trial in summary.trials}) > 1:
        yield replace(
            by_batch,
            name="rate-by-workers",
            title="Throughput by number of loader workers",
            x_label="num_workers",
            marks=_marks(summary, "rate", lambda config: config.num_workers),
            is_log=False,
        )


def _memory_plot(summary: RunSummary, lines: Sequence[MemoryLine], about_lines: str) -> Plot:
    marks = _marks(summary, "memory", lambda config: config.micro_batch_size)
    limit = Level(label="limit", y=summary.limit_bytes / BYTES_PER_GIB, is_limit=True)
    return Plot(
        name="memory",
        title="Memory by batch size",
        x_label="micro batch",
        quantity="memory",
        caption=f"Fitted lines are shown with their error.{about_lines}" if lines else "",
        marks=marks,
        levels=(limit,) if limit.y <= _LEVEL_IN_SIGHT * _highest(marks) else (),
        trends=tuple(_trend(line, summary) for line in lines),
    )


def _score_plot(summary: RunSummary) -> Plot:
    marks = _marks(summary, "score")
    counted = [(mark.x, mark.y) for mark in marks if mark.y is not None and mark.fate == "feasible"]
    highest = accumulate((score for _, score in counted), max)
    return Plot(
        name="history",
        title="Score of each trial",
        x_label="trial",
        quantity="score",
        caption="The best so far counts only trials that ran well within the limit.",
        marks=marks,
        best_so_far=tuple(zip((number for number, _ in counted), highest, strict=True)),
    )


def _marks(
    summary: RunSummary,
    quantity: Quantity,
    setting: Callable[[TrainingConfig], int] | None = None,
) -> tuple[Mark, ...]:
    """Return a mark for each trial, by a setting or by its number; none if no trial has a height."""
    marks = tuple(
        Mark(
            x=trial.number if setting is None else setting(trial.config),
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


def _trend(line: MemoryLine, summary: RunSummary) -> Trend:
    """Return a line from its smallest measured batch to the largest tried of its kind."""
    kind = memory_kind(line.config)
    configs = [trial.config for trial in summary.trials]
    last = max(config.micro_batch_size for config in configs if memory_kind(config) == kind)
    points = []
    for batch in sorted({*map(round, np.linspace(line.batches[0], last, _TREND_POINTS))}):
        peak, error = line.predict(batch)
        points.append((batch, peak / BYTES_PER_GIB, error / BYTES_PER_GIB))
    return Trend(amp_dtype=line.config.amp_dtype, points=tuple(points))


# The blocks that `sections` fill and renderers lay out. Texts may hold anything that a user's code
# printed: each renderer makes them safe in its own way.


_WORDS = (
    "advice device evidence outcome place precision reason recurs result searched setting settings "
    "value what"
)
TEXT_HEADS = frozenset({"", *_WORDS.split()})
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
    """Bars to compare at a glance; the table of results has their figures."""

    bars: tuple[TimeBar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A sentence with an optional traceback."""

    count: str
    """Number and outcome of trials: "2 crashed"."""
    text: str
    traceback: str = ""


Block = Paragraph | Bullets | Table | Facts | TimeBars | Plot | Trace
"""A block. Bars and plots are drawn on a page, and left out elsewhere: tables have their figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report with its own heading."""

    title: str
    blocks: tuple[Block, ...]
    is_short_search: bool = False
    """Part of the short form, which a console shows."""


def footnotes(sentences: Iterable[str]) -> Bullets:
    """Return footnotes of the table above."""
    return Bullets(sentences=tuple(sentences), is_footnote=True)


def tabulate(
    rows: Iterable[Mapping[str, str]],
    heads: Iterable[str] = (),
    *,
    kinds: Iterable[str] = (),
    empty: str = NO_VALUE,
) -> Table:
    """Build a table from rows of cells by head, without columns that no row has a value for.

    Args:
        rows: Cells by their heads; a missing cell is `empty`.
        heads: Columns in order; by default those of the rows.
        kinds: A kind for each row, or none.
        empty: Text of a cell without a value.
    """
    rows = list(rows)
    shown = [
        head
        for head in tuple(heads) or dict.fromkeys(head for row in rows for head in row)
        if any(row.get(head, empty) != empty for row in rows)
    ]
    cells = tuple(tuple(row.get(head, empty) for head in shown) for row in rows)
    return Table(heads=tuple(shown), rows=cells, row_kinds=tuple(kinds))


def side_by_side(columns: Mapping[str, Mapping[str, str]]) -> Table:
    """Tabulate facts of several configurations by title, without those that none of them has."""
    names = next(iter(columns.values()), {})
    rows = ((name, *(facts[name] for facts in columns.values())) for name in names)
    return Table(
        heads=("", *columns), rows=tuple(row for row in rows if set(row[1:]) != {NO_VALUE})
    )


def facts_with_values(facts: Mapping[str, str]) -> Facts:
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
