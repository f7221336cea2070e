"""The report's sections on time: its parts before and after, how busy the device was, ceilings, the loader's costs.

Comes in: a RunSummary. Goes out: Sections whose blocks are empty where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records.breakdown import PARTS, LoaderCosts
from autotune.records.run_summary import RunSummary
from autotune.records.utilization import Fullness
from autotune.report.blocks import Block, Bullets, Section, Table, TimeBar, TimeBars
from autotune.report.figures import PART_NAMES, Column, Figures, make_columns
from autotune.report.formatting import NO_VALUE, format_bytes, format_fraction, format_rate, format_short_time, one_line
from autotune.report.sections.headroom import find_standing
from autotune.report.sections.ranks import describe_exchange

__all__ = ["ceiling_section", "fullness_facts", "loader_facts", "loader_section", "time_section"]

_SAMPLES_OF_A_BAR = 1000
_TEXTS = frozenset({"", "measured by", "source"})


def time_section(summary: RunSummary) -> Section:
    """Where the wall time goes, before and after, and how busy the device was by each source."""
    measured = _measured(summary)
    remarks = Bullets(sentences=tuple(_exchange_remarks(measured)))
    blocks = (_time_bars(measured), _time_table(measured), _busy_table(measured), remarks)
    return Section(title="Where the time goes", blocks=tuple(block for block in blocks if block is not None))


def ceiling_section(summary: RunSummary) -> Section:
    """What the loader and the device reach alone."""
    rows = []
    for column, figures in _measured(summary):
        if figures.loader_ceiling is None and figures.device_ceiling is None:
            continue
        standing = find_standing(figures)
        rows.append(
            (
                column.title,
                format_rate(figures.samples_per_s.value),
                _rate_or_none(figures.loader_ceiling),
                _rate_or_none(figures.device_ceiling),
                NO_VALUE if standing is None else format_fraction(standing.share_of_device),
                NO_VALUE if standing is None else format_fraction(standing.share_of_lower),
            )
        )
    heads = ("", "samples/s", "loader alone", "device alone", "of the device's", "of the lower one")
    table = Table(heads=heads, rows=tuple(rows), texts=_TEXTS)
    remark = (
        "The loader alone is read without training; the device alone trains on batches that it already holds. "
        "Both with the column's own settings."
    )
    return Section(title="Ceilings", blocks=(table, Bullets(sentences=(remark,) if rows else ())))


def loader_section(summary: RunSummary) -> Section:
    """What data costs inside the loader."""
    measured = [(column, figures.loader_costs) for column, figures in _measured(summary)]
    known = [(column, costs) for column, costs in measured if costs is not None]
    rows = list(zip(_COSTS, *(_cost_cells(costs) for _, costs in known), strict=True)) if known else []
    shown = tuple(row for row in rows if set(row[1:]) != {NO_VALUE})
    table = Table(heads=("", *(column.title for column, _ in known)), rows=shown, texts=_TEXTS)
    timed = "; ".join(f"{column.title}: {costs.items:,} items" for column, costs in known)
    remark = f"Timed outside the window, item by item, in one process ({timed})."
    return Section(title="Inside the loader", blocks=(table, Bullets(sentences=(remark,) if known else ())))


def loader_facts(costs: LoaderCosts) -> dict[str, str]:
    """The same of one configuration, by name; what was not measured is left out."""
    return {name: cell for name, cell in zip(_COSTS, _cost_cells(costs), strict=True) if cell != NO_VALUE}


def fullness_facts(fullness: Fullness | None) -> dict[str, str]:
    """How full the device's busy time was, by name; what the device does not tell is left out."""
    found = {name: None if fullness is None else getattr(fullness, field) for field, name in _FULLNESS.items()}
    return {name: format_fraction(fraction) for name, fraction in found.items() if fraction is not None}


_COSTS = (
    "one item",
    "of it CPU work",
    "its median",
    "its 99th percentile",
    "its slowest",
    "time in slow items",
    "read from disk per item",
    "size of an item",
    "collate a batch",
    "batch from worker to trainer",
    "pin a batch",
    "copy a batch to the device",
    "the same from pinned memory",
    "batches per worker and second",
    "batches per core and second",
)


def _cost_cells(costs: LoaderCosts) -> tuple[str, ...]:
    """One cell for each of _COSTS."""
    return (
        format_short_time(costs.item_s),
        format_fraction(costs.cpu_fraction),
        format_short_time(costs.item_median_s),
        format_short_time(costs.item_p99_s),
        format_short_time(costs.item_slowest_s),
        format_fraction(costs.slow_tail_fraction),
        format_bytes(round(costs.disk_bytes_per_item)),
        format_bytes(round(costs.item_bytes)),
        format_short_time(costs.collate_s),
        _time_or_none(costs.transfer_s),
        *(_time_or_none(one) for one in (costs.pin_s, costs.copy_s, costs.pinned_copy_s)),
        _rate_or_none(costs.batches_per_worker_per_s),
        _rate_or_none(costs.batches_per_core_per_s),
    )


def _measured(summary: RunSummary) -> list[tuple[Column, Figures]]:
    return [(column, column.figures) for column in make_columns(summary) if column.figures is not None]


def _time_bars(measured: Sequence[tuple[Column, Figures]]) -> Block | None:
    known = [(column, figures) for column, figures in measured if figures.breakdown is not None]
    if not known:
        return None
    slowest = min(figures.samples_per_s.value for _, figures in known)
    bars = []
    for column, figures in known:
        assert figures.breakdown is not None  # noqa: S101 - left out above
        rate = figures.samples_per_s.value
        parts = tuple((part, share.fraction) for part, share in figures.breakdown.shares().items())
        caption = f"{format_short_time(_SAMPLES_OF_A_BAR / rate)} for {_SAMPLES_OF_A_BAR:,} samples"
        bars.append(TimeBar(title=column.title, caption=caption, length=slowest / rate, parts=parts))
    return TimeBars(bars=tuple(bars))


def _time_table(measured: Sequence[tuple[Column, Figures]]) -> Block | None:
    known = [(column.title, figures.breakdown) for column, figures in measured if figures.breakdown is not None]
    if not known:
        return None
    rows = []
    for part in PARTS:
        shares = [breakdown.shares()[part] for _, breakdown in known]
        sources = "; ".join(dict.fromkeys(one_line(share.source) for share in shares))
        rows.append((PART_NAMES[part], *(format_fraction(share.fraction) for share in shares), sources))
        if part == "data_wait" and any(breakdown.restart_fraction for _, breakdown in known):
            restarts = (format_fraction(breakdown.restart_fraction) for _, breakdown in known)
            rows.append(("of it at restarts of epochs", *restarts, sources))
    heads = ("", *(title for title, _ in known), "measured by")
    return Table(heads=heads, rows=tuple(rows), texts=_TEXTS)


def _busy_table(measured: Sequence[tuple[Column, Figures]]) -> Block:
    sources = list(dict.fromkeys(one.source for _, figures in measured for one in figures.busy_readings))
    rows = []
    for source in sources:
        readings = [{one.source: one.fraction for one in figures.busy_readings} for _, figures in measured]
        cells = (format_fraction(one[source]) if source in one else NO_VALUE for one in readings)
        rows.append((f"busy: {one_line(source)}", *cells))
    fullness = [figures.fullness for _, figures in measured]
    rows += [
        (name, *(NO_VALUE if one is None else _fraction(getattr(one, field)) for one in fullness))
        for field, name in _FULLNESS.items()
        if any(one is not None and getattr(one, field) is not None for one in fullness)
    ]
    return Table(heads=("", *(column.title for column, _ in measured)), rows=tuple(rows), texts=_TEXTS)


_FULLNESS = {
    "sm_fraction": "how full: multiprocessors in use (GPM)",
    "sm_occupancy": "how full: warps resident (GPM)",
    "tensor_fraction": "how full: tensor pipes at work (GPM)",
    "dram_fraction": "how full: memory bandwidth used (GPM)",
}


def _exchange_remarks(measured: Sequence[tuple[Column, Figures]]) -> list[str]:
    """What of the time several ranks talk to one another; the parts of the time count it as synchronising."""
    remarks = []
    for column, figures in measured:
        if figures.communication is not None:
            counts = "" if figures.breakdown is None else ", which counts as synchronising"
            remarks.append(f"{column.title}: {describe_exchange(figures.communication)}{counts}.")
    return remarks


def _fraction(fraction: float | None) -> str:
    return NO_VALUE if fraction is None else format_fraction(fraction)


def _time_or_none(seconds: float | None) -> str:
    return NO_VALUE if seconds is None else format_short_time(seconds)


def _rate_or_none(rate: float | None) -> str:
    return NO_VALUE if rate is None else format_rate(rate)
