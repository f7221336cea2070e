"""The result's table: what was measured of each configuration, and the settings in which they differ.

Comes in: the columns. Goes out: a Table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autotune.records.breakdown import PARTS
from autotune.records.run_summary import changed_settings
from autotune.report.blocks import Table
from autotune.report.figures import Column, Figures, has_parts, list_busy, list_waits
from autotune.report.wording.names import PART_NAMES, format_setting
from autotune.report.wording.units import NO_VALUE, format_bytes, format_bytes_beside, show, show_interval
from autotune.settings.training_config import TrainingConfig

__all__ = ["result_table"]


def result_table(columns: Sequence[Column], limit_bytes: int) -> Table:
    """What was measured, then each setting in which a column differs from the first, the baseline."""
    speedups = [column.speedup for column in columns]
    first = ("",) if not any(speedups) else ("1",)
    times = [show(ratio and ratio.value, "times") for ratio in speedups[1:]]
    ratios = [NO_VALUE if ratio is None else show_interval(ratio.low, ratio.high, "times") for ratio in speedups[1:]]
    intervals = _row(
        columns, lambda known: show_interval(known.samples_per_s.low, known.samples_per_s.high, "plain_rate")
    )
    energy = _row(columns, lambda known: show(known.joules_per_sample, "energy"))
    rows = [
        ("samples/s", *_row(columns, lambda known: show(known.samples_per_s.value, "plain_rate"))),
        ("  95 % interval", *intervals),
        *([("times baseline", *first, *times), ("  95 % interval", "", *ratios)] if any(speedups) else []),
        ("busy", *(show(reading and reading.fraction, "share") for reading in list_busy(columns))),
        *_time_rows(columns),
        ("peak memory", *_row(columns, lambda known: format_bytes_beside(known.peak_memory_bytes, limit_bytes))),
        (
            f"  of {format_bytes(limit_bytes)}",
            *_row(columns, lambda known: show(known.peak_memory_bytes / limit_bytes, "share")),
        ),
        *([("energy a sample", *energy)] if set(energy) > {NO_VALUE} or NO_VALUE not in energy else []),
    ]
    settings = _setting_rows(columns)
    return Table(
        heads=("", *(column.title for column in columns)),
        rows=(*rows, *settings),
        row_kinds=(*[""] * len(rows), *["setting"] * len(settings)),
    )


def _row(columns: Sequence[Column], cell: Callable[[Figures], str]) -> tuple[str, ...]:
    return tuple(NO_VALUE if column.figures is None else cell(column.figures) for column in columns)


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


def _setting_rows(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    baseline, configs = columns[0].config, [column.config for column in columns]
    changed = {name for config in configs for name in changed_settings(config, baseline)}
    names = [name for name in TrainingConfig.model_fields if name in changed]
    rows = [(name, *(format_setting(name, config) for config in configs)) for name in names]
    if changed & {"grad_accum_steps", "world_size"}:
        rows.insert(0, ("global batch", *(str(config.global_batch_size) for config in configs)))
    return rows
