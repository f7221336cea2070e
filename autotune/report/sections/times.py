"""Time: its parts before and after, how busy the device was, ceilings, the loader's costs.

Comes in: the figures of one or more configurations, by their titles. Goes out: Sections whose blocks are empty where
nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records.breakdown import PARTS, LoaderCosts, TimeBreakdown
from autotune.records.utilization import Fullness
from autotune.report.blocks import MEASURED_BY, Bullets, Section, Table, TimeBar, TimeBars
from autotune.report.figures import Figures
from autotune.report.text import one_line
from autotune.report.wording.names import PART_NAMES
from autotune.report.wording.remarks import describe_exchange
from autotune.report.wording.units import NO_VALUE, Unit, format_short_time, show

__all__ = ["ceiling_section", "fullness_facts", "loader_facts", "loader_section", "time_section"]

_SAMPLES_OF_A_BAR = 1000
_CEILINGS = (
    "Loader alone: read without training. Device alone: trained on batches that it already holds. Both use the "
    "column's own settings."
)
_FULLNESS = {
    "sm_fraction": "multiprocessors in use (GPM)",
    "sm_occupancy": "warps resident (GPM)",
    "tensor_fraction": "tensor pipes in use (GPM)",
    "dram_fraction": "memory bandwidth used (GPM)",
}
_COSTS: dict[str, tuple[str, Unit]] = {
    "one item": ("item_s", "seconds"),
    "of it CPU work": ("cpu_fraction", "share"),
    "its median": ("item_median_s", "seconds"),
    "its 99th percentile": ("item_p99_s", "seconds"),
    "its slowest": ("item_slowest_s", "seconds"),
    "time in slow items": ("slow_tail_fraction", "share"),
    "read from disk per item": ("disk_bytes_per_item", "bytes"),
    "size of an item": ("item_bytes", "bytes"),
    "collate a batch": ("collate_s", "seconds"),
    "batch from worker to trainer": ("transfer_s", "seconds"),
    "pin a batch": ("pin_s", "seconds"),
    "copy a batch to the device": ("copy_s", "seconds"),
    "the same from pinned memory": ("pinned_copy_s", "seconds"),
    "batches per worker and second": ("batches_per_worker_per_s", "plain_rate"),
    "batches per core and second": ("batches_per_core_per_s", "plain_rate"),
}


def time_section(measured: Mapping[str, Figures]) -> Section:
    """Where the wall time goes, before and after, and how busy the device was by each source."""
    parts = {title: figures.breakdown for title, figures in measured.items() if figures.breakdown is not None}
    remarks = tuple(
        f"{title}: {describe_exchange(figures.communication)}{', counted as synchronising' if title in parts else ''}."
        for title, figures in measured.items()
        if figures.communication is not None
    )
    blocks = (_bars(measured, parts), _table(parts), _busy_table(measured), Bullets(sentences=remarks, is_remark=True))
    return Section(title="Where the time goes", blocks=blocks)


def ceiling_section(measured: Mapping[str, Figures]) -> Section:
    """What the loader and the device reach alone."""
    rows = tuple(
        (
            title,
            show(known.samples_per_s.value, "plain_rate"),
            show(known.loader_ceiling, "plain_rate"),
            show(known.device_ceiling, "plain_rate"),
            show(known.headroom and known.headroom.share_of_device, "share"),
            show(known.headroom and known.headroom.share_of_lower, "share"),
        )
        for title, known in measured.items()
        if known.loader_ceiling is not None or known.device_ceiling is not None
    )
    heads = ("", "samples/s", "loader alone", "device alone", "share of the device's", "share of the lower")
    remarks = (_CEILINGS,) if rows else ()
    return Section(title="Ceilings", blocks=(Table(heads=heads, rows=rows), Bullets(sentences=remarks, is_remark=True)))


def loader_section(measured: Mapping[str, Figures]) -> Section:
    """What data costs inside the loader."""
    known = {title: figures.loader_costs for title, figures in measured.items() if figures.loader_costs is not None}
    cells = {title: loader_facts(costs) for title, costs in known.items()}
    rows = tuple((name, *(of_column.get(name, NO_VALUE) for of_column in cells.values())) for name in _COSTS)
    shown = tuple(row for row in rows if set(row[1:]) - {NO_VALUE})
    timed = "; ".join(f"{title}: {costs.items:,} items" for title, costs in known.items())
    remarks = (f"Timed outside the window, item by item, in one process ({timed}).",) if known else ()
    blocks = (Table(heads=("", *known), rows=shown), Bullets(sentences=remarks, is_remark=True))
    return Section(title="Inside the loader", blocks=blocks)


def loader_facts(costs: LoaderCosts) -> dict[str, str]:
    """The same of one configuration, by name; what was not measured is left out."""
    shown = {name: show(getattr(costs, field), unit) for name, (field, unit) in _COSTS.items()}
    return {name: cell for name, cell in shown.items() if cell != NO_VALUE}


def fullness_facts(fullness: Fullness | None) -> dict[str, str]:
    """How full the device's busy time was, by name; what the device does not report is left out."""
    shown = {name: show(getattr(fullness, field, None), "share") for field, name in _FULLNESS.items()}
    return {name: cell for name, cell in shown.items() if cell != NO_VALUE}


def _bars(measured: Mapping[str, Figures], parts: Mapping[str, TimeBreakdown]) -> TimeBars:
    rates = {title: measured[title].samples_per_s.value for title in parts}
    bars = (
        TimeBar(
            title=title,
            caption=f"{format_short_time(_SAMPLES_OF_A_BAR / rates[title])} for {_SAMPLES_OF_A_BAR:,} samples",
            length=min(rates.values()) / rates[title],
            parts=tuple((part, share.fraction) for part, share in breakdown.shares().items()),
        )
        for title, breakdown in parts.items()
    )
    return TimeBars(bars=tuple(bars))


def _table(parts: Mapping[str, TimeBreakdown]) -> Table:
    rows = []
    for part in PARTS if parts else ():
        shares = [breakdown.shares()[part] for breakdown in parts.values()]
        sources = "; ".join(dict.fromkeys(one_line(share.source) for share in shares))
        rows.append((PART_NAMES[part], *(show(share.fraction, "share") for share in shares), sources))
        restarts = [breakdown.restart_fraction for breakdown in parts.values()]
        if part == "data_wait" and any(restarts):
            rows.append(("of it at restarts of epochs", *(show(restart, "share") for restart in restarts), sources))
    return Table(heads=("", *parts, MEASURED_BY), rows=tuple(rows), texts=frozenset({"", MEASURED_BY}))


def _busy_table(measured: Mapping[str, Figures]) -> Table:
    readings = [{reading.source: reading.fraction for reading in known.busy_readings} for known in measured.values()]
    fullness = [known.fullness for known in measured.values()]
    rows = {
        f"busy: {one_line(source)}": [of.get(source) for of in readings]
        for source in dict.fromkeys(s for of in readings for s in of)
    }
    rows |= {name: [getattr(of, field, None) for of in fullness] for field, name in _FULLNESS.items()}
    shown = tuple(
        (name, *(show(share, "share") for share in shares)) for name, shares in rows.items() if set(shares) != {None}
    )
    return Table(heads=("", *measured), rows=shown)
