"""What each configuration of the report measured over its runs, joined into one set of figures.

Comes in: a RunSummary. Goes out: Columns (baseline, recommended, same batch) with their Figures, over all runs of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Literal, TypeVar

from autotune.analysis.decisions.run_spread import rate_of_runs
from autotune.diagnosis.strategies import best_known_ranks
from autotune.frozen import FrozenModel
from autotune.records.breakdown import PARTS, LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import EXCEEDED_FROM, SIDES, CeilingBook, Headroom, headroom_of
from autotune.records.conditions import DeviceConditions
from autotune.records.host_load import HostLoad, join_loads
from autotune.records.lengths import Lengths, Tokens
from autotune.records.measurement import Ceilings, Interval, Measurement
from autotune.records.ranks import Communication, RankFigures
from autotune.records.run_spread import RunSpread
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord, runs_of
from autotune.records.utilization import BusyReading, Fullness, best_common_source, best_direct_reading, source_rank
from autotune.settings.training_config import TrainingConfig
from autotune.tuning.host_bound import waits_most_for_host

__all__ = [
    "Column",
    "Figures",
    "find_trial",
    "has_parts",
    "join_runs",
    "list_busy",
    "list_known",
    "list_waits",
    "make_columns",
    "role_of",
]


Role = Literal["", "baseline", "recommended"]
_T = TypeVar("_T")
_Wanted = tuple[str, int | None, TrainingConfig | None, Interval | None]
"""A Column but for its figures; a same batch may lack a number and settings."""
_BESIDE_THE_RATE = (
    "loader_ceiling",
    "device_ceiling",
    "copy_ceiling",
    "host_ceiling",
    "fullness",
    "loader_costs",
    "communication",
    "tokens",
    "lengths",
)
"""What the first run that measured it tells for all."""


class Figures(FrozenModel):
    """What one configuration measured, over its runs. Part of the JSON document: fields keep their names."""

    runs: int
    """Runs that the figures are made from."""
    samples_per_s: Interval
    """Geometric mean over the runs, with its 95 % interval."""
    is_held_by_device: bool = False
    """In all runs the device set the pace, which steadies their rates; false on a CPU."""
    is_host_bound: bool = False
    """In the profiled run, or else the first, the device waited a fifth of the time for its host, and no longer for
    data; false on a CPU."""
    raw_samples_per_s: float | None = None
    """Geometric mean of what was counted in the runs' windows, before corrections for epochs' restarts and for batches
    that lay ready."""
    busy_fraction: float | None
    """By the source that scores are made from, the mean over the runs that have it."""
    busy_source: str | None
    """What told the busy fraction; null where nothing did."""
    data_wait_fraction: float | None
    """Of the loop's time, the mean over the runs; on a GPU the device may still be working meanwhile."""
    peak_memory_bytes: int
    """The highest of the runs."""
    allocated_bytes: int | None = None
    """What tensors took of it at their peak, the highest of the runs; null where the device does not report it."""
    alloc_retries: int | None = None
    """Times within the runs' windows that torch's allocator found no room; null where the device does not count."""
    is_thrashing: bool = False
    """In the window of a run it happened twice or more: training had no room."""
    joules_per_sample: float | None = None
    """What the whole device drew for a sample, the mean over the runs; null where it does not report it."""
    conditions: tuple[DeviceConditions, ...] = ()
    """What the device did during each run's window; empty where it does not report it."""
    host_load: HostLoad | None = None
    """What the host's cores did during the runs' windows, as one; null where the kernel does not tell."""
    loader_ceiling: float | None = None
    """Samples/s of the loader alone, in these settings; null where not measured."""
    device_ceiling: float | None = None
    """Samples/s of the device alone, on batches that it already holds; null where not measured."""
    copy_ceiling: float | None = None
    """Samples/s of copying batches to the device alone; null where nothing is copied, or it was not measured."""
    host_ceiling: float | None = None
    """Samples/s of the host that takes batches that lie ready and launches their work; null on a CPU, and where not
    measured."""
    breakdown: TimeBreakdown | None = None
    """Where the time goes, profiled in one run; its waits for data are the mean over the runs."""
    busy_readings: tuple[BusyReading, ...] = ()
    """Every source's reading, of the first run that has the best of them."""
    fullness: Fullness | None = None
    """How full the busy time was, in one run; null where the device does not report it."""
    loader_costs: LoaderCosts | None = None
    """What data costs inside the loader; null where not measured."""
    tokens: Tokens | None = None
    """The tokens of a sample, in one run; null where a batch has no lengths."""
    tokens_per_s: float | None = None
    """The rate in tokens, padding included; null where a batch has no lengths."""
    lengths: Lengths | None = None
    """Lengths of items, and what batches of like lengths would win; null where not measured, or all are equal."""
    ranks: tuple[RankFigures, ...] = ()
    """Each rank's own figures; empty where there is one process."""
    communication: Communication | None = None
    """What exchanging gradients takes of a step; null for a single rank, and where not measured."""

    @property
    def headroom(self) -> Headroom | None:
        """Where the rate is between the ceilings; None where the loader's or the device's was not measured."""
        if not self.loader_ceiling or not self.device_ceiling:
            return None
        busy = best_direct_reading(self.busy_readings) if self.is_host_bound else None
        return headroom_of(
            self.samples_per_s.value,
            loader_ceiling=self.loader_ceiling,
            device_ceiling=self.device_ceiling,
            copy_ceiling=self.copy_ceiling,
            host_ceiling=self.host_ceiling,
            host_bound_busy=None if busy is None else busy.fraction,
        )

    @property
    def is_device_estimated(self) -> bool:
        """Return True where launching held up the device alone, so that its busy time shows what it can do."""
        headroom, measured = self.headroom, self.device_ceiling
        return headroom is not None and measured is not None and headroom.device_ceiling > measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One configuration of the table."""

    title: str
    number: int
    """Its trial's number; 0 is the baseline."""
    config: TrainingConfig
    figures: Figures | None
    """None where nothing was measured."""
    speedup: Interval | None
    """Over the baseline; None where it is no reference, or this is the baseline."""


def find_trial(summary: RunSummary, number: int | None) -> TrialRecord | None:
    """The trial with this number, or None."""
    return next((trial for trial in summary.trials if trial.number == number), None)


def role_of(number: int, summary: RunSummary) -> Role:
    """Whether a trial is the recommended one, which may be the baseline itself, or the baseline."""
    if summary.recommendation is not None and number == summary.recommendation.number:
        return "recommended"
    return "baseline" if number == 0 else ""


def make_columns(summary: RunSummary) -> tuple[Column, ...]:
    """Baseline, recommended, the best at the baseline's global batch and at a larger one; each configuration once."""
    found = summary.recommendation
    wanted: list[_Wanted] = [("baseline", 0, summary.baseline, None)]
    if found is not None:
        wanted.append(("recommended", found.number, found.config, found.speedup))
        wanted.append(("same batch", found.same_batch_number, found.same_batch, found.same_batch_speedup))
        if (larger := found.larger_batch) is not None:
            wanted.append(("larger batch", larger.number, larger.config, larger.speedup))
    columns: dict[int, Column] = {}
    for title, number, config, speedup in wanted:
        if number is not None and config is not None and number not in columns:
            figures = _summarise(summary, number, config)
            columns[number] = Column(title=title, number=number, config=config, figures=figures, speedup=speedup)
    return tuple(columns.values())


def _summarise(summary: RunSummary, number: int, config: TrainingConfig) -> Figures | None:
    """Join all runs of a trial's configuration; None where none measured anything.

    A ceiling comes from all runs that share the settings that it depends on.
    """
    own = runs_of(summary.trials, number)
    if not own:
        return None
    figures = join_runs(own, summary.run_spread)
    runs = [(trial.config, run) for trial in summary.trials for run in trial.runs]
    book = CeilingBook()
    for other, run in runs:
        measured = run.ceilings or Ceilings()
        book.keep(other, loader=measured.loader, device=measured.device, copy=measured.copy)
        book.show(other, run.samples_per_s_ci[0])
    settled = dict[str, float | None]()
    for side in SIDES:
        ceiling = book.ceiling_of(side, config)
        rate = getattr(figures, f"{side}_ceiling") if ceiling is None else ceiling.samples_per_s
        settled[f"{side}_ceiling"] = rate
    settled["host_ceiling"] = figures.host_ceiling
    # a ceiling that the rate exceeds was measured while other processes held that side up
    shown = {f"{side}_ceiling": book.shown(side, config) for side in SIDES}
    for name, rate in settled.items():
        least = max(figures.samples_per_s.value, shown.get(name, 0.0))
        if rate is not None and least > EXCEEDED_FROM * rate:
            settled[name] = None
    return figures.model_copy(update=settled)


def join_runs(runs: Sequence[Measurement], spread: RunSpread) -> Figures:
    """Join what one configuration measured.

    Args:
        runs: Those of the configuration, at least one.
        spread: Between runs of the same settings.
    """
    source = min(list_known(run.busy_source for run in runs), key=source_rank, default=None)
    retries = list_known(run.memory.alloc_retries for run in runs)
    readings = filter(None, (run.busy_readings for run in runs))
    waiting = _mean(run.data_wait_fraction for run in runs)
    rate, tokens = rate_of_runs(runs, spread), _first(run.tokens for run in runs)
    return Figures(
        runs=len(runs),
        samples_per_s=rate,
        raw_samples_per_s=geometric_mean(run.window.raw_samples_per_s for run in runs),
        is_held_by_device=all(run.window.is_held_by_device for run in runs),
        is_host_bound=waits_most_for_host(next((run for run in runs if run.breakdown is not None), runs[0])),
        tokens_per_s=None if tokens is None else rate.value * tokens.per_sample,
        busy_fraction=_mean(run.busy_fraction for run in runs if run.busy_source == source),
        busy_source=source,
        data_wait_fraction=waiting,
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        allocated_bytes=max(list_known(run.memory.allocated_bytes for run in runs), default=None),
        alloc_retries=sum(retries) if retries else None,
        is_thrashing=any(run.memory.is_thrashing for run in runs),
        joules_per_sample=_mean(run.joules_per_sample for run in runs),
        conditions=tuple(list_known(run.conditions for run in runs)),
        host_load=join_loads(run.host_load for run in runs),
        **{name: _first(getattr(run, name) for run in runs) for name in _BESIDE_THE_RATE},
        breakdown=_first(_with_mean_waits(run, waiting) for run in runs),
        busy_readings=min(readings, key=lambda read: min(source_rank(each.source) for each in read), default=()),
        ranks=best_known_ranks(runs),
    )


def list_known(figures: Iterable[_T | None]) -> list[_T]:
    """What was measured; where it was not, there is None."""
    return [figure for figure in figures if figure is not None]


def _first(figures: Iterable[_T | None]) -> _T | None:
    return next((figure for figure in figures if figure is not None), None)


def _mean(figures: Iterable[float | None]) -> float | None:
    known = list_known(figures)
    return fmean(known) if known else None


def _with_mean_waits(run: Measurement, waiting: float | None) -> TimeBreakdown | None:
    """The parts of one run's time, their waits for data brought to the mean over all runs of the settings.

    One run's waits differ from the next one's by a few per cent. They are scaled as the loop's waits are, of which
    every run has the figure; the other parts share the rest of the time as they did.
    """
    parts = run.breakdown
    if parts is None or waiting is None or not run.data_wait_fraction or not 0 < parts.data_wait.fraction < 1:
        return parts
    wait = min(1.0, parts.data_wait.fraction * waiting / run.data_wait_fraction)
    scales = dict.fromkeys(PARTS, (1 - wait) / (1 - parts.data_wait.fraction))
    scales["data_wait"] = wait / parts.data_wait.fraction
    shares = {
        name: Share(fraction=share.fraction * scales[name], source=share.source)
        for name, share in parts.shares().items()
    }
    return TimeBreakdown(**shares, restart_fraction=parts.restart_fraction * scales["data_wait"])


def has_parts(columns: Sequence[Column]) -> bool:
    """Whether the parts of the time are known of all columns but those that are shown beside, of other batches."""
    measured = [column.figures for column in columns if column.figures and not column.title.endswith(" batch")]
    return bool(measured) and all(figures.breakdown is not None for figures in measured)


def list_waits(columns: Sequence[Column]) -> tuple[float | None, ...]:
    """The share of time that each column waits for data, by one definition: as a part of the time, else the loop's."""
    figures = [column.figures for column in columns]
    if not has_parts(columns):
        return tuple(None if known is None else known.data_wait_fraction for known in figures)
    parts = [None if known is None else known.breakdown for known in figures]
    return tuple(None if known is None else known.data_wait.fraction for known in parts)


def list_busy(columns: Sequence[Column]) -> tuple[BusyReading | None, ...]:
    """How busy each column's device was: by the best source that all of them have, else by each one's own."""
    known = [{} if column.figures is None else _busy_of(column.figures) for column in columns]
    source = best_common_source([readings for readings in known if readings])
    return tuple(next(iter(readings.values()), None) if source is None else readings.get(source) for readings in known)


def _busy_of(figures: Figures) -> dict[str, BusyReading]:
    """Each source's reading, the scores' own first: that is a mean over runs."""
    readings = {reading.source: reading for reading in figures.busy_readings}
    if figures.busy_fraction is None or figures.busy_source is None:
        return readings
    own = BusyReading(fraction=figures.busy_fraction, source=figures.busy_source)
    return {own.source: own, **{source: reading for source, reading in readings.items() if source != own.source}}
