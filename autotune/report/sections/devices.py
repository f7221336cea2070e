"""What the device did while its windows ran.

Comes in: figures of one or more configurations, by their titles. Goes out: a Section, and facts for a diagnosis. What
makes rates doubtful stands in wording.remarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Bullets, Section, Table
from autotune.report.figures import Figures
from autotune.report.wording.remarks import say_windows_at_limit, say_windows_throttled
from autotune.report.wording.units import NO_VALUE, format_interval, show

__all__ = ["device_facts", "device_section"]


def device_section(summary: RunSummary, measured: Mapping[str, Figures]) -> Section:
    """The device during the windows of each configuration, and the further trials that were throttled."""
    facts = {title: device_facts(figures) for title, figures in measured.items()}
    names = dict.fromkeys(name for of_column in facts.values() for name in of_column)
    rows = tuple((name, *(of_column.get(name, NO_VALUE) for of_column in facts.values())) for name in names)
    numbers = [
        str(trial.number)
        for trial in summary.trials
        if trial.measurement is not None and trial.measurement.conditions is not None
        if trial.measurement.conditions.disturbances
    ]
    remarks = (f"Trials that were throttled: {', '.join(numbers)}.",) if numbers else ()
    blocks = (Table(heads=("", *facts), rows=rows), Bullets(sentences=remarks, is_remark=True))
    return Section(title="Device during the windows", blocks=blocks)


def device_facts(figures: Figures) -> dict[str, str]:
    """What the device reported during one configuration's windows, by name; what it did not report is left out."""
    windows = figures.conditions
    powers = [window.power_w for window in windows if window.power_w is not None]
    highest = [None if window.max_sm_clock_mhz is None else (window.max_sm_clock_mhz,) for window in windows]
    facts = {
        "power": f"{fmean(powers):,.0f} W" if powers else "",
        "clock": _span([window.sm_clock_mhz for window in windows], "MHz"),
        "highest clock": _span(highest, "MHz"),
        "memory clock": _span([window.memory_clock_mhz for window in windows], "MHz"),
        "temperature": _span([window.temperature_c for window in windows], "°C"),
    }
    if windows:
        limited = any(window.is_at_power_limit for window in windows)
        facts["at its power limit"] = say_windows_at_limit(windows) if limited else "no"
        facts["throttled"] = say_windows_throttled(windows) or "no"
    sizes = [window.others_memory_bytes for window in windows if window.others_memory_bytes is not None]
    loads = [window.others_busy_fraction for window in windows if window.others_busy_fraction is not None]
    facts["memory in use before"] = show(max(sizes), "bytes") if sizes else ""
    facts["time in use before"] = show(max(loads), "share") if loads else ""
    facts["tensors at their peak"] = "" if figures.allocated_bytes is None else show(figures.allocated_bytes, "bytes")
    facts["allocator's retries"] = "" if figures.alloc_retries is None else f"{figures.alloc_retries:,}"
    return {name: text for name, text in facts.items() if text}


def _span(edges: Sequence[tuple[int, ...] | None], unit: str) -> str:
    """From the lowest to the highest value at any window's edge; "" where none is known."""
    values = [value for edge in edges if edge is not None for value in edge]
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{f'{low:,}' if low == high else format_interval(f'{low:,}', f'{high:,}')} {unit}"
