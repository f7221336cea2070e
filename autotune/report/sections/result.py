"""The result's table: what was measured of each configuration, and the settings in which they differ.

Comes in: the columns. Goes out: a Table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from autotune.messages.units import NO_VALUE, Unit, format_bytes_beside, show, show_interval
from autotune.records.breakdown import PARTS
from autotune.records.measurement import Measurement
from autotune.records.run_spread import RunSpread
from autotune.records.run_summary import changed_settings
from autotune.report.blocks import Table
from autotune.report.figures import Column, has_parts, list_busy, list_known, list_waits
from autotune.report.sections.lengths import padding_of
from autotune.report.wording.names import PART_NAMES, format_setting, name_interval
from autotune.report.wording.remarks import is_held_in
from autotune.settings.training_config import TrainingConfig

__all__ = ["result_table"]

_WORTH_SHOWING = 0.005
"""Share of a rate by which corrections change it, from which on the rate as it was counted is shown too: our own
convention."""


def result_table(
    columns: Sequence[Column], limit_bytes: int | None, spread: RunSpread, *, reference: str = "baseline"
) -> Table:
    """What was measured, then each setting in which a column differs from the first, which is called the reference.

    Without a limit, memory has no share of one.
    """
    figures = [column.figures for column in columns]
    ratios = [column.speedup for column in columns[1:]]
    gains = [None if ratio is None else (ratio.low, ratio.high) for ratio in ratios]
    rates = [None if known is None else known.samples_per_s_ci for known in figures]
    interval = f"  {name_interval(spread, (is_held_in(column.runs) for column in columns if column.runs))}"
    energy = [known and known.joules_per_sample for known in figures]
    speedups = (
        (f"times {reference}", "1", *(show(ratio and ratio.value, "times") for ratio in ratios)),
        (interval, "", *(_show_interval(ends, "times") for ends in gains)),
    )
    rows = (
        ("samples/s", *(show(known and known.samples_per_s, "plain_rate") for known in figures)),
        (interval, *(_show_interval(ends, "plain_rate") for ends in rates)),
        *_raw_rows(columns),
        *_token_rows(figures),
        *(speedups if any(ratios) else ()),
        ("busy", *(show(reading and reading.fraction, "share") for reading in list_busy(columns))),
        *_time_rows(columns),
        *_memory_rows([None if known is None else known.peak_memory_bytes for known in figures], limit_bytes),
        *([("energy a sample", *(show(joules, "energy") for joules in energy))] if list_known(energy) else []),
    )
    settings = _setting_rows(columns)
    kinds = (*[""] * len(rows), *["setting"] * len(settings))
    return Table(heads=("", *(column.title for column in columns)), rows=(*rows, *settings), row_kinds=kinds)


def _show_interval(ends: tuple[float, float] | None, unit: Unit) -> str:
    return NO_VALUE if ends is None else show_interval(*ends, unit)


def _raw_rows(columns: Sequence[Column]) -> Iterator[tuple[str, ...]]:
    """Yield the throughput as it was counted, where a correction changes one of them noticeably."""
    counted = [
        geometric_mean(run.window.raw_samples_per_s for run in column.runs) if column.runs else None
        for column in columns
    ]
    known = [(column.figures, raw) for column, raw in zip(columns, counted, strict=True)]
    if any(run and raw and abs(run.samples_per_s / raw - 1) >= _WORTH_SHOWING for run, raw in known):
        yield "  as counted", *(show(raw, "plain_rate") for raw in counted)


def _token_rows(figures: Sequence[Measurement | None]) -> Iterator[tuple[str, ...]]:
    """Rates in tokens, and the share of padding, where batches have lengths."""
    rates = [known and known.tokens_per_s for known in figures]
    if list_known(rates):
        yield "tokens/s", *(show(rate, "plain_rate") for rate in rates)
        padding = [known and padding_of(known) for known in figures]
        if list_known(padding):
            yield "  of them padding", *(show(share, "share") for share in padding)


def _time_rows(columns: Sequence[Column]) -> Iterator[tuple[str, ...]]:
    """The parts of the time that take some; the loop's waits where the parts are not known of all columns."""
    breakdowns = [None if column.figures is None else column.figures.breakdown for column in columns]
    is_whole = has_parts(columns)
    if not is_whole:
        yield "data wait", *(show(wait, "share") for wait in list_waits(columns))
    for part in PARTS:
        shares = [None if breakdown is None else breakdown.shares()[part].fraction for breakdown in breakdowns]
        if any(shares) and (is_whole or part != "data_wait"):
            yield PART_NAMES[part], *(show(share, "share") for share in shares)


def _memory_rows(peaks: Sequence[int | None], limit_bytes: int | None) -> Iterator[tuple[str, ...]]:
    if limit_bytes is None:
        yield "peak memory", *(show(peak, "bytes") for peak in peaks)
        return
    yield "peak memory", *(NO_VALUE if peak is None else format_bytes_beside(peak, limit_bytes) for peak in peaks)
    yield f"  of {show(limit_bytes, 'bytes')}", *(show(peak and peak / limit_bytes, "share") for peak in peaks)


def _setting_rows(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    baseline, configs = columns[0].config, [column.config for column in columns]
    changed = {name for config in configs for name in changed_settings(config, baseline)}
    names = [name for name in TrainingConfig.model_fields if name in changed]
    rows = [(name, *(format_setting(name, config) for config in configs)) for name in names]
    if changed & {"grad_accum_steps", "world_size"}:
        rows.insert(0, ("global batch", *(str(config.global_batch_size) for config in configs)))
    return rows
