"""Time: its parts before and after, how busy the device was, ceilings, the loader's costs.

Comes in: the figures of one or more configurations, by their titles. Goes out: Sections whose blocks are empty where
nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autotune.messages.units import Unit, show
from autotune.records.breakdown import PARTS, LoaderCosts, TimeBreakdown
from autotune.records.measurement import Measurement
from autotune.records.utilization import Fullness
from autotune.report.blocks import MEASURED_BY, Bullets, Section, Table, TimeBar, TimeBars, side_by_side, tabulate
from autotune.report.figures import headroom_in
from autotune.report.text import one_line
from autotune.report.wording.names import PART_NAMES
from autotune.report.wording.remarks import describe_exchange

__all__ = ["ceiling_section", "fullness_facts", "loader_facts", "loader_section", "time_section"]

_SAMPLES_OF_A_BAR = 1000
"""Samples whose time is told beside a bar: our convention."""
_CEILINGS = (
    "Loader alone: read without training. Device alone: trained on batches that it already holds. Both use the "
    "column's own settings."
)
_COPYING = "copying alone"
"""A column that is left out where nothing is copied."""
_COPIES = "Copying alone: batches moved to the device, and not trained on."
_HOST = "host alone"
_LAUNCHING = "Host alone: prefetched batches fetched and their work launched, without waiting for the device."
_HELD_ALONE = (
    "Launching held up the device alone as well: the share of the device's is that of the time in which it is busy."
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


def time_section(measured: Mapping[str, Measurement]) -> Section:
    """Where the wall time goes, before and after, and how busy the device was by each source."""
    parts = {title: figures.breakdown for title, figures in measured.items() if figures.breakdown is not None}
    remarks = tuple(
        f"{title}: {describe_exchange(figures.communication)}{', counted as synchronising' if title in parts else ''}."
        for title, figures in measured.items()
        if figures.communication is not None
    )
    sources = dict.fromkeys(reading.source for figures in measured.values() for reading in figures.busy_readings)
    busy = side_by_side({title: _busy_facts(figures, sources) for title, figures in measured.items()})
    blocks = (_bars(measured, parts), _table(parts), busy, Bullets(sentences=remarks, is_remark=True))
    return Section(title="Where the time goes", blocks=blocks)


def ceiling_section(measured: Mapping[str, Measurement]) -> Section:
    """What the loader and the device reach alone, and copying between them where anything is copied."""
    headrooms = {title: headroom_in(known) for title, known in measured.items()}
    rows = [
        {
            "": title,
            "samples/s": show(known.samples_per_s, "plain_rate"),
            "loader alone": show(known.loader_ceiling, "plain_rate"),
            "device alone": show(known.device_ceiling, "plain_rate"),
            _COPYING: show(known.copy_ceiling, "plain_rate"),
            _HOST: show(known.host_ceiling, "plain_rate"),
            "share of the device's": show((room := headrooms[title]) and room.share_of_device, "share"),
            "share of the lowest": show(room and room.share_of_lower, "share"),
        }
        for title, known in measured.items()
        if any(rate is not None for rate in (known.loader_ceiling, known.device_ceiling, known.copy_ceiling))
    ]
    remarks = [_CEILINGS] if rows else []
    remarks += [_COPIES] if any(known.copy_ceiling is not None for known in measured.values()) else []
    remarks += [_LAUNCHING] if any(known.host_ceiling is not None for known in measured.values()) else []
    is_held_alone = any(
        room is not None and room.device_ceiling > (measured[title].device_ceiling or 0.0)
        for title, room in headrooms.items()
    )
    remarks += [_HELD_ALONE] if is_held_alone else []
    sentences = (" ".join(remarks),) if remarks else ()
    blocks = (tabulate(rows, optional=(_COPYING, _HOST)), Bullets(sentences=sentences, is_remark=True))
    return Section(title="Ceilings: what loader and device reach alone", blocks=blocks)


def loader_section(measured: Mapping[str, Measurement]) -> Section:
    """What data costs inside the loader."""
    known = {title: figures.loader_costs for title, figures in measured.items() if figures.loader_costs is not None}
    table = side_by_side({title: loader_facts(costs) for title, costs in known.items()})
    timed = "; ".join(f"{title}: {costs.items:,} items" for title, costs in known.items())
    remarks = (f"Timed outside the window, item by item, in one process ({timed}).",) if known else ()
    blocks = (table, Bullets(sentences=remarks, is_remark=True))
    return Section(title="Inside the loader: what an item costs", blocks=blocks)


def loader_facts(costs: LoaderCosts) -> dict[str, str]:
    """The same of one configuration, by name."""
    return {name: show(getattr(costs, field), unit) for name, (field, unit) in _COSTS.items()}


def fullness_facts(fullness: Fullness | None) -> dict[str, str]:
    """How full the device's busy time was, by name."""
    return {name: show(getattr(fullness, field, None), "share") for field, name in _FULLNESS.items()}


def _bars(measured: Mapping[str, Measurement], parts: Mapping[str, TimeBreakdown]) -> TimeBars:
    rates = {title: measured[title].samples_per_s for title in parts}
    bars = (
        TimeBar(
            title=title,
            caption=f"{show(_SAMPLES_OF_A_BAR / rates[title], 'seconds')} for {_SAMPLES_OF_A_BAR:,} samples",
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
    return Table(heads=("", *parts, MEASURED_BY), rows=tuple(rows))


def _busy_facts(figures: Measurement, sources: Iterable[str]) -> dict[str, str]:
    """How busy the device was by each of the sources, and how full that time was."""
    fractions = {reading.source: reading.fraction for reading in figures.busy_readings}
    busy = {f"busy: {one_line(source)}": show(fractions.get(source), "share") for source in sources}
    return busy | fullness_facts(figures.fullness)
