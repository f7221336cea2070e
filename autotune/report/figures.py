"""The result's table: which configurations stand side by side, what each measured, and the rows that compare them.

Comes in: a RunSummary. Goes out: Columns and Rows of plain text, in the same order for every form of the report. Where
a configuration was confirmed, its figures are those of the confirmation; otherwise its trial's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from autotune.analysis.selection_rules import rate_of_runs
from autotune.diagnosis.strategies import best_known_ranks
from autotune.records.breakdown import PARTS, LoaderCosts, Part, TimeBreakdown
from autotune.records.ceilings import CeilingBook, device_key, loader_key
from autotune.records.conditions import DeviceConditions
from autotune.records.measurement import Measurement, Rate
from autotune.records.ranks import Communication, RankFigures
from autotune.records.recommendation import Ratio, Recommendation
from autotune.records.run_summary import RunSummary, changed_settings
from autotune.records.trial import TrialRecord
from autotune.records.utilization import BusyReading, Fullness, best_common_source, source_rank
from autotune.report.formatting import (
    NO_VALUE,
    format_bytes,
    format_energy,
    format_fraction,
    format_interval,
    format_rate,
    format_setting,
    format_times,
)
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "PART_NAMES",
    "Column",
    "Figures",
    "Row",
    "best_of_same_batch",
    "find_trial",
    "join_runs",
    "list_busy",
    "make_columns",
    "make_rows",
    "measurements_of",
    "summarise",
]

PART_NAMES: dict[Part, str] = {
    "data_wait": "waiting for data",
    "device_copy": "copying",
    "compute": "computing",
    "synchronise": "synchronising",
    "idle": "idle",
}
"""The parts of the wall time for people, in the order in which they are shown."""


class Figures(BaseModel):
    """What one configuration measured, over its runs. Part of the JSON document: fields keep their names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    is_confirmed: bool
    """Measured again, in turns with the baseline; otherwise the search's single trial."""
    runs: int
    """Runs that the figures are made from."""
    samples_per_s: Rate
    """Geometric mean over the runs, with its 95 % interval."""
    busy_fraction: float | None
    """By the source that scores are made from, the mean over the runs that it told of."""
    busy_source: str | None
    data_wait_fraction: float
    peak_memory_bytes: int
    """The highest of the runs."""
    allocated_bytes: int | None = None
    """What tensors took of it at their peak, the highest of the runs; null where the device does not tell."""
    alloc_retries: int | None = None
    """Times within the runs' windows that torch's allocator found no room; null where the device does not count."""
    is_thrashing: bool = False
    """In the window of a run it happened twice or more: training had no room."""
    joules_per_sample: float | None = None
    """What the whole device drew for a sample, the mean over the runs; null where it does not tell."""
    conditions: tuple[DeviceConditions, ...] = ()
    """What the device did during each run's window; empty where it does not tell."""
    loader_ceiling: float | None = None
    """Samples/s of the loader alone, in these settings; null where not measured."""
    device_ceiling: float | None = None
    """Samples/s of the device alone, on batches that it already holds; null where not measured."""
    breakdown: TimeBreakdown | None = None
    """Where the time goes."""
    busy_readings: tuple[BusyReading, ...] = ()
    """Every source that could tell, of the first run that the best of them told of."""
    fullness: Fullness | None = None
    loader_costs: LoaderCosts | None = None
    ranks: tuple[RankFigures, ...] = ()
    """Each rank's own figures; empty where there is one process."""
    communication: Communication | None = None
    """What exchanging gradients takes of a step; null for a single rank, and where not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One configuration of the table."""

    title: str
    config: TrainingConfig
    figures: Figures | None
    """None where nothing was measured."""
    speedup: Ratio | None
    """Against the baseline; None where it is no reference, or this is the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a label, and a cell for each column."""

    label: str
    cells: tuple[str, ...]
    is_setting: bool = False


def find_trial(summary: RunSummary, number: int | None) -> TrialRecord | None:
    """The trial with this number, or None."""
    return next((trial for trial in summary.trials if trial.number == number), None)


def measurements_of(summary: RunSummary, number: int | None) -> tuple[Measurement, ...]:
    """All that was measured of a trial's configuration: the confirmation's runs, then the trial's own."""
    confirmations = summary.recommendation.confirmations if summary.recommendation is not None else ()
    runs = next((one.runs for one in confirmations if one.number == number), ())
    trial = find_trial(summary, number)
    own = () if trial is None or trial.measurement is None else (trial.measurement,)
    return (*runs, *own)


def summarise(summary: RunSummary, number: int | None) -> Figures | None:
    """The figures of a trial's configuration: confirmed ones where there are some.

    What was measured beside the rate (ceilings, parts of the time) comes from the first run that holds it; a ceiling
    that no run of the configuration holds, from one that shares the settings that it depends on.
    """
    confirmations = summary.recommendation.confirmations if summary.recommendation is not None else ()
    runs = next((one.runs for one in confirmations if one.number == number), ())
    everything = measurements_of(summary, number)
    if not everything:
        return None
    figures = join_runs(runs or everything, is_confirmed=bool(runs))
    return figures.model_copy(update={**_beside_the_rate(everything), **_ceilings(summary, number, everything)})


def _beside_the_rate(runs: Sequence[Measurement]) -> dict[str, object]:
    return {
        "breakdown": next((run.breakdown for run in runs if run.breakdown is not None), None),
        "busy_readings": _best_readings(runs),
        "fullness": next((run.fullness for run in runs if run.fullness is not None), None),
        "loader_costs": next((run.loader_costs for run in runs if run.loader_costs is not None), None),
        "ranks": best_known_ranks(runs),
        "communication": next((run.communication for run in runs if run.communication is not None), None),
    }


def _best_readings(runs: Sequence[Measurement]) -> tuple[BusyReading, ...]:
    known = [run.busy_readings for run in runs if run.busy_readings]
    return min(known, key=lambda readings: min(source_rank(one.source) for one in readings), default=())


def _ceilings(summary: RunSummary, number: int | None, runs: Sequence[Measurement]) -> dict[str, float | None]:
    loader = next((run.loader_ceiling for run in runs if run.loader_ceiling is not None), None)
    device = next((run.device_ceiling for run in runs if run.device_ceiling is not None), None)
    trial = find_trial(summary, number)
    if trial is not None and (loader is None or device is None):
        book = _read_book(summary)
        like_loader, like_device = book.loader.get(loader_key(trial.config)), book.device.get(device_key(trial.config))
        loader = like_loader.samples_per_s if loader is None and like_loader is not None else loader
        device = like_device.samples_per_s if device is None and like_device is not None else device
    return {"loader_ceiling": loader, "device_ceiling": device}


def _read_book(summary: RunSummary) -> CeilingBook:
    """The ceilings that the search's runs have measured themselves."""
    book = CeilingBook()
    confirmations = summary.recommendation.confirmations if summary.recommendation is not None else ()
    runs = [(one.config, run) for one in confirmations for run in one.runs]
    trials = [(trial.config, trial.measurement) for trial in summary.trials if trial.measurement is not None]
    for config, run in (*runs, *trials):
        if run.ceilings is not None:
            book.keep(config, loader=run.ceilings.loader, device=run.ceilings.device)
    return book


def best_of_same_batch(recommendation: Recommendation) -> TrainingConfig | None:
    """The best configuration of the baseline's global batch where it is another than the recommended one."""
    if recommendation.same_batch_number == recommendation.number:
        return None
    return recommendation.same_batch


def make_columns(summary: RunSummary) -> tuple[Column, ...]:
    """Baseline, recommended and same batch; what would say the same twice is left out."""
    columns = [Column(title="baseline", config=summary.baseline, figures=summarise(summary, 0), speedup=None)]
    found = summary.recommendation
    if found is None:
        return tuple(columns)
    if found.number != 0:
        figures = summarise(summary, found.number)
        columns.append(Column(title="recommended", config=found.config, figures=figures, speedup=found.speedup))
    same = best_of_same_batch(found)
    if same is not None and found.same_batch_number != 0:
        figures = summarise(summary, found.same_batch_number)
        columns.append(Column(title="same batch", config=same, figures=figures, speedup=found.same_batch_speedup))
    return tuple(columns)


def list_busy(columns: Sequence[Column]) -> tuple[BusyReading | None, ...]:
    """How busy each column's device was: by the best source that told of all of them, else by each one's own."""
    told = [{} if column.figures is None else _busy_of(column.figures) for column in columns]
    source = best_common_source([readings for readings in told if readings])
    return tuple(next(iter(one.values()), None) if source is None else one.get(source) for one in told)


def _busy_of(figures: Figures) -> dict[str, BusyReading]:
    """What each source told, the scores' own first: that is a mean over runs."""
    readings = [one for one in figures.busy_readings if one.source != figures.busy_source]
    if figures.busy_fraction is not None and figures.busy_source is not None:
        readings.insert(0, BusyReading(fraction=figures.busy_fraction, source=figures.busy_source))
    return {one.source: one for one in readings}


def make_rows(columns: Sequence[Column], limit_bytes: int) -> tuple[Row, ...]:
    """What was measured, then each setting in which a column differs from the first, the baseline."""
    limit = f"  of {format_bytes(limit_bytes)}"
    figures = (
        _row("samples/s", columns, lambda one: format_rate(one.samples_per_s.value)),
        _row("  95 % interval", columns, lambda one: _interval_of(one.samples_per_s)),
        *_speedup_rows(columns),
        Row(label="busy", cells=tuple(_fraction_of(one) for one in list_busy(columns))),
        *_time_rows(columns),
        _row("peak memory", columns, lambda one: format_bytes(one.peak_memory_bytes)),
        _row(limit, columns, lambda one: format_fraction(one.peak_memory_bytes / limit_bytes)),
        *_energy_rows(columns),
    )
    return (*figures, *_setting_rows(columns))


def _setting_rows(columns: Sequence[Column]) -> tuple[Row, ...]:
    baseline = columns[0].config
    changed = {name for column in columns for name in changed_settings(column.config, baseline)}
    rows = [
        Row(label=name, cells=tuple(format_setting(name, column.config) for column in columns), is_setting=True)
        for name in TrainingConfig.model_fields
        if name in changed
    ]
    sizes = [column.config.global_batch_size for column in columns]
    if changed & {"grad_accum_steps", "world_size"}:
        rows.insert(0, Row(label="global batch", cells=tuple(map(str, sizes)), is_setting=True))
    return tuple(rows)


def _speedup_rows(columns: Sequence[Column]) -> tuple[Row, ...]:
    ratios = [column.speedup for column in columns]
    if not any(ratios):
        return ()
    values = ["1" if index == 0 else NO_VALUE for index in range(len(columns))]
    intervals = ["" if index == 0 else NO_VALUE for index in range(len(columns))]
    for index, ratio in enumerate(ratios):
        if ratio is not None:
            values[index] = format_times(ratio.value)
            intervals[index] = format_interval(format_times(ratio.low), format_times(ratio.high))
    return Row(label="times baseline", cells=tuple(values)), Row(label="  95 % interval", cells=tuple(intervals))


def _time_rows(columns: Sequence[Column]) -> tuple[Row, ...]:
    """The parts of the time where they were measured, those that take some; otherwise the loop's waits alone."""
    breakdowns = [None if column.figures is None else column.figures.breakdown for column in columns]
    waits = _row("data wait", columns, lambda one: format_fraction(one.data_wait_fraction))
    if not any(breakdowns):
        return (waits,)
    # The same batch is shown beside; its parts are not measured.
    is_whole = all(
        column.figures is None or column.figures.breakdown is not None
        for column in columns
        if column.title != "same batch"
    )
    return (*(() if is_whole else (waits,)), *_part_rows(breakdowns))


def _energy_rows(columns: Sequence[Column]) -> tuple[Row, ...]:
    """What a sample costs in energy, where a device tells."""
    row = _row("energy a sample", columns, lambda one: _energy_of(one.joules_per_sample))
    return () if set(row.cells) <= {NO_VALUE} else (row,)


def _energy_of(joules: float | None) -> str:
    return NO_VALUE if joules is None else format_energy(joules)


def _part_rows(breakdowns: Sequence[TimeBreakdown | None]) -> tuple[Row, ...]:
    rows = []
    for part in PARTS:
        shares = [None if one is None else one.shares()[part].fraction for one in breakdowns]
        if any(shares):
            cells = tuple(NO_VALUE if share is None else format_fraction(share) for share in shares)
            rows.append(Row(label=PART_NAMES[part], cells=cells))
    return tuple(rows)


def _row(label: str, columns: Sequence[Column], value: Callable[[Figures], str]) -> Row:
    return Row(
        label=label, cells=tuple(NO_VALUE if column.figures is None else value(column.figures) for column in columns)
    )


def _interval_of(rate: Rate) -> str:
    return format_interval(format_rate(rate.low), format_rate(rate.high))


def _fraction_of(reading: BusyReading | None) -> str:
    return NO_VALUE if reading is None else format_fraction(reading.fraction)


def join_runs(runs: Sequence[Measurement], *, is_confirmed: bool = False) -> Figures:
    """What one configuration measured over its runs, of which there is at least one."""
    source = min((run.busy_source for run in runs if run.busy_source is not None), key=source_rank, default=None)
    busy = [run.busy_fraction for run in runs if run.busy_source == source and run.busy_fraction is not None]
    joules = [run.joules_per_sample for run in runs if run.joules_per_sample is not None]
    allocated = [run.memory.allocated_bytes for run in runs if run.memory.allocated_bytes is not None]
    retries = [run.memory.alloc_retries for run in runs if run.memory.alloc_retries is not None]
    return Figures(
        is_confirmed=is_confirmed,
        runs=len(runs),
        samples_per_s=rate_of_runs(runs),
        busy_fraction=fmean(busy) if busy else None,
        busy_source=source,
        data_wait_fraction=fmean(run.data_wait_fraction for run in runs),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        allocated_bytes=max(allocated, default=None),
        alloc_retries=sum(retries) if retries else None,
        is_thrashing=any(run.memory.is_thrashing for run in runs),
        joules_per_sample=fmean(joules) if joules else None,
        conditions=tuple(run.conditions for run in runs if run.conditions is not None),
    )
