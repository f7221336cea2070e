"""Join the runs of each configuration of a report into one measurement.

Takes a RunSummary; returns its Columns: baseline, recommended, same batch, larger batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal, TypeVar

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.scaling import first_known, most_measured_ranks
from autotune.frozen import FrozenModel
from autotune.models.evidence import rate_of_runs
from autotune.records.breakdown import PARTS, Share, TimeBreakdown
from autotune.records.ceilings import EXCEEDED_FROM, SIDES, CeilingBook, Headroom, headroom_of
from autotune.records.measurement import (
    BusyReading,
    Interval,
    Measurement,
    best_common_source,
    join_loads,
    keep_ceilings,
    source_rank,
)
from autotune.records.result import RunSummary, RunVariation
from autotune.records.trial import TrialRecord, runs_of
from autotune.tuning.outcomes import busy_while_host_bound
from autotune.tuning.probe import with_settled_ceilings

Role = Literal["", "baseline", "recommended"]
_T = TypeVar("_T")


class Column(FrozenModel):
    """A configuration of the report. Part of the JSON documents."""

    title: str
    """Role: "baseline", "recommended", "same batch", "larger batch"."""
    number: int
    """Number of its trial; 0 is the baseline."""
    config: TrainingConfig
    """Every setting; a recommendation's learning rate is scaled to the global batch."""
    runs: tuple[Measurement, ...]
    """Measurement of each run."""
    figures: Measurement | None
    """The runs as one: mean throughput with its 95 % interval, mean waits, the highest memory, and
    the first run that has each other figure. null if nothing was measured."""
    speedup: Interval | None
    """Estimated throughput over the baseline's; null for the baseline, and if the baseline is no
    reference."""


def find_trial(summary: RunSummary, number: int | None) -> TrialRecord | None:
    """Return the trial with this number, or None."""
    return next((trial for trial in summary.trials if trial.number == number), None)


def role_of(number: int, summary: RunSummary) -> Role:
    """Return the role of a trial: "recommended", which may be the baseline, "baseline", or ""."""
    if summary.recommendation is not None and number == summary.recommendation.number:
        return "recommended"
    return "baseline" if number == 0 else ""


def make_columns(summary: RunSummary) -> tuple[Column, ...]:
    """Return baseline, recommended, and the best at the same and at a larger batch, each once."""
    columns = {0: _column(summary, "baseline", 0, summary.baseline, None)}

    def add(title: str, number: int, config: TrainingConfig, speedup: Interval | None) -> None:
        if number not in columns:
            columns[number] = _column(summary, title, number, config, speedup)

    found = summary.recommendation
    if found is not None:
        add("recommended", found.number, found.config, found.speedup)
        if found.same_batch_number is not None and found.same_batch is not None:
            add("same batch", found.same_batch_number, found.same_batch, found.same_batch_speedup)
        if (larger := found.larger_batch) is not None:
            add("larger batch", larger.number, larger.config, larger.speedup)
    return tuple(columns.values())


def recommended_figures(summary: RunSummary, columns: Iterable[Column]) -> Measurement | None:
    """Return the figures of the recommended configuration; None if there are none."""
    found = summary.recommendation
    number = None if found is None else found.number
    return next((column.figures for column in columns if column.number == number), None)


def _column(
    summary: RunSummary, title: str, number: int, config: TrainingConfig, speedup: Interval | None
) -> Column:
    runs = runs_of(summary.trials, number)
    figures = None
    if runs:
        # ceilings come from all runs that share the settings that they depend on
        book = CeilingBook()
        for trial in summary.trials:
            for run in trial.runs:
                keep_ceilings(book, trial.config, run)
        joined = join_runs(runs, summary.run_variation)
        figures = _without_exceeded(with_settled_ceilings(joined, config, book), config, book)
    return Column(
        title=title, number=number, config=config, runs=runs, figures=figures, speedup=speedup
    )


def _without_exceeded(
    figures: Measurement, config: TrainingConfig, book: CeilingBook
) -> Measurement:
    """Drop ceilings that throughput exceeds: other processes slowed that side during its measurement.

    Judged by the mean, since the joined interval includes run-to-run variation.
    """
    reached = {f"{side}_ceiling": book.shown(side, config) for side in SIDES}
    reached["host_ceiling"] = 0.0  # the book has none
    exceeded: dict[str, None] = {}
    for name, shown in reached.items():
        ceiling = getattr(figures, name)
        if ceiling is not None and max(figures.samples_per_s, shown) > EXCEEDED_FROM * ceiling:
            exceeded[name] = None
    return figures.model_copy(update=exceeded)


def join_runs(runs: Sequence[Measurement], spread: RunVariation) -> Measurement:
    """Join the runs of a configuration; other figures are those of the first run that has them.

    Args:
        runs: At least one measurement.
        spread: Run-to-run variation.
    """
    # a profiled run comes first: its parts of the time and its window belong together
    ordered = sorted(runs, key=lambda run: run.breakdown is None)
    first = {
        name: first_known(getattr(run, name) for run in ordered)
        for name in Measurement.model_fields
    }
    rate = rate_of_runs(runs, spread)
    source = min(drop_none(run.busy_source for run in runs), key=source_rank, default=None)
    readings = [run.busy_readings for run in runs if run.busy_readings]
    waiting = _mean(run.data_wait_fraction for run in runs)
    joined = {
        "samples_per_s": rate.value,
        "samples_per_s_ci": (rate.low, rate.high),
        "busy_fraction": _mean(run.busy_fraction for run in runs if run.busy_source == source),
        "busy_source": source,
        "busy_readings": min(
            readings, key=lambda read: min(source_rank(each.source) for each in read), default=()
        ),
        "host_load": join_loads(run.host_load for run in runs),
        "data_wait_fraction": waiting,
        "peak_memory_bytes": max(run.peak_memory_bytes for run in runs),
        "breakdown": _with_mean_waits(ordered[0], waiting),
        "ranks": most_measured_ranks(runs),
    }
    return runs[0].model_copy(update={**first, **joined})


def headroom_in(figures: Measurement) -> Headroom | None:
    """Return the headroom; None if the loader's or the device's ceiling was not measured."""
    if not figures.loader_ceiling or not figures.device_ceiling:
        return None
    return headroom_of(
        figures.samples_per_s,
        loader_ceiling=figures.loader_ceiling,
        device_ceiling=figures.device_ceiling,
        copy_ceiling=figures.copy_ceiling,
        host_ceiling=figures.host_ceiling,
        host_bound_busy=busy_while_host_bound(figures),
    )


def drop_none(figures: Iterable[_T | None]) -> list[_T]:
    """Return the figures that are not None."""
    return [figure for figure in figures if figure is not None]


def _mean(figures: Iterable[float | None]) -> float | None:
    known = drop_none(figures)
    return fmean(known) if known else None


def _with_mean_waits(run: Measurement, waiting: float | None) -> TimeBreakdown | None:
    """Scale a run's time breakdown so that its waits for data are the mean over all runs.

    Waits vary by a few per cent from run to run. They are scaled in proportion to the loop's own
    waits, which every run measures; the other parts keep their proportions in the rest of the time.
    """
    parts = run.breakdown
    if (
        parts is None
        or waiting is None
        or not run.data_wait_fraction
        or not 0 < parts.data_wait.fraction < 1
    ):
        return parts
    wait = min(1.0, parts.data_wait.fraction * waiting / run.data_wait_fraction)
    scales = dict.fromkeys(PARTS, (1 - wait) / (1 - parts.data_wait.fraction))
    scales["data_wait"] = wait / parts.data_wait.fraction
    shares = {
        name: Share(fraction=share.fraction * scales[name], source=share.source)
        for name, share in parts.shares().items()
    }
    return TimeBreakdown(**shares, restart_fraction=parts.restart_fraction * scales["data_wait"])


def list_waits(columns: Sequence[Column]) -> tuple[float | None, ...]:
    """Return each column's share of time waiting for data.

    From the time breakdowns if all columns except those of other batches have one, else the loop's
    own.
    """
    is_by_parts = all(
        column.figures.breakdown is not None
        for column in columns
        if column.figures is not None and not column.title.endswith(" batch")
    )
    waits: list[float | None] = []
    for column in columns:
        wait = None
        if column.figures is not None:
            parts = column.figures.breakdown
            wait = column.figures.data_wait_fraction
            if is_by_parts:
                wait = None if parts is None else parts.data_wait.fraction
        waits.append(wait)
    return tuple(waits)


def list_busy(columns: Sequence[Column]) -> tuple[BusyReading | None, ...]:
    """Return how busy each column's device was, by the best common source, else by its own."""
    known = [{} if column.figures is None else _busy_of(column.figures) for column in columns]
    source = best_common_source([readings for readings in known if readings])
    return tuple(
        next(iter(readings.values()), None) if source is None else readings.get(source)
        for readings in known
    )


def _busy_of(figures: Measurement) -> dict[str, BusyReading]:
    """Return each source's reading, first the one used for scores, which is a mean over runs."""
    readings = {reading.source: reading for reading in figures.busy_readings}
    if figures.busy_fraction is None or figures.busy_source is None:
        return readings
    own = BusyReading(fraction=figures.busy_fraction, source=figures.busy_source)
    readings.pop(own.source, None)
    return {own.source: own, **readings}
