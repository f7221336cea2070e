"""What the report's plots show, as plain numbers: throughput by batch and by workers, memory by batch, the history.

Comes in: a RunSummary, its columns and fitted memory lines. Goes out: Plots, which `drawing` draws and `tables` lists
row by row. A trial that measured nothing is a mark without a height; a drawing has it on the axis, to show where trials
fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from autotune.analysis.memory.lines import MemoryLine, memory_kind
from autotune.messages.units import format_count, show
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.figures import Column, Role, role_of
from autotune.settings.training_config import AmpDtype

__all__ = ["BYTES_PER_GIB", "Fate", "Level", "Mark", "Plot", "Quantity", "Trend", "list_plots", "thin_out"]

Fate = Literal["feasible", "over_memory", "failed"]
Quantity = Literal["rate", "memory", "score"]
"""What stands on a y axis: samples/s, GiB of the highest memory, the score."""

_LEVEL_IN_SIGHT = 1.6
"""A ceiling higher than this many times the fastest trial is named below the plot: drawn, it would flatten the marks.
Our convention."""
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
    """What there is to know, in a sentence or two that hold for a drawing and for a table; "" for nothing."""
    marks: tuple[Mark, ...]
    """Every trial; none where no trial measured anything."""
    levels: tuple[Level, ...] = ()
    trends: tuple[Trend, ...] = ()
    best_so_far: tuple[tuple[float, float], ...] = ()
    """(trial that counts, best score up to it), drawn as steps."""
    is_log: bool = False
    """Powers of two on the x axis."""


def list_plots(
    summary: RunSummary, columns: Sequence[Column], lines: Sequence[MemoryLine], about_lines: str = ""
) -> dict[Quantity, tuple[Plot, ...]]:
    """Every plot by what it shows; one by the loader's workers where their number varied.

    Args:
        summary: the search.
        columns: baseline and recommended settings, of which the latter's ceilings are shown.
        lines: the fitted memory lines to draw.
        about_lines: what to know of them; "" or with a space before.
    """
    settings = ["micro_batch_size"]
    if len({trial.config.num_workers for trial in summary.trials}) > 1:  # one number of them would be one upright line
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
        caption=f"Fitted lines are shown with their error.{about_lines}{far}" if lines else far.strip(),
        marks=marks,
        levels=(Level(label="limit", y=limit, is_limit=True),) if is_near else (),
        trends=tuple(_trend(line, summary) for line in lines),
    )


def _history(summary: RunSummary) -> Plot:
    marks = _marks(summary, "score")
    counted = [(mark.x, mark.y) for mark in marks if mark.y is not None and mark.fate == "feasible"]
    highest = accumulate((score for _, score in counted), max)
    failed = sum(mark.y is None for mark in marks)
    line = "The best so far is among trials that ran well within the limit." if counted else "No trial ran well."
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
            fate="feasible" if trial.is_feasible else "over_memory" if trial.outcome == "over_memory" else "failed",
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
        trial.measurement.samples_per_s if quantity == "rate" else trial.measurement.peak_memory_bytes / BYTES_PER_GIB
    )


def _highest(marks: Sequence[Mark]) -> float:
    return max((mark.y for mark in marks if mark.y is not None), default=0.0)


def _ceilings(summary: RunSummary, columns: Sequence[Column], marks: Sequence[Mark]) -> tuple[tuple[Level, ...], str]:
    """The recommended settings' ceilings: those in sight as lines; whose they are, and the others, in words."""
    found = summary.recommendation
    figures = next((known.figures for known in columns if found is not None and known.number == found.number), None)
    rates = {side: getattr(figures, f"{side}_ceiling", None) for side in ("loader", "device")}
    levels = [Level(label=f"{side} alone", y=rate) for side, rate in rates.items() if rate is not None]
    near = tuple(level for level in levels if level.y <= _LEVEL_IN_SIGHT * _highest(marks))
    above = ", ".join(f"{level.label} {show(level.y, 'plain_rate')}" for level in levels if level not in near)
    words = " Ceilings are those of the recommended settings." if levels else ""
    return near, words + f" Far above: {above} samples/s." * bool(above)


def _trend(line: MemoryLine, summary: RunSummary) -> Trend:
    """From the smallest batch measured to the largest tried of its kind, failed ones included.

    Every batch that was tried in between has a point, whatever its precision.
    """
    tried = [trial.config for trial in summary.trials]
    first = line.batches[0]
    last = max(config.micro_batch_size for config in tried if memory_kind(config) == memory_kind(line.config))
    batches = {round(first + (last - first) * step / _TREND_STEPS) for step in range(_TREND_STEPS + 1)}
    batches |= {config.micro_batch_size for config in tried if first <= config.micro_batch_size <= last}
    told = ((batch, *line.predict(batch)) for batch in sorted(batches))
    points = tuple((batch, peak / BYTES_PER_GIB, error / BYTES_PER_GIB) for batch, peak, error in told)
    return Trend(amp_dtype=line.config.amp_dtype, points=points)


def thin_out(values: Sequence[float], most: int) -> list[float]:
    """So many of the values at the most, evenly among them, both ends included."""
    gaps = min(most, len(values)) - 1
    return [values[round(index * (len(values) - 1) / gaps)] for index in range(gaps + 1)] if gaps > 0 else [*values]
