"""What the device did while its windows ran.

Comes in: figures of one or more configurations, by their titles. Goes out: a Section, and facts for a diagnosis. What
makes rates doubtful stands in wording.remarks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from autotune.messages.units import NO_VALUE, show
from autotune.records.measurement import Measurement
from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Bullets, Section, side_by_side
from autotune.report.figures import list_known
from autotune.report.wording.remarks import conditions_of, say_windows_at_limit, say_windows_throttled, sum_retries

__all__ = ["device_facts", "device_section"]


def device_section(summary: RunSummary, runs: Mapping[str, Sequence[Measurement]]) -> Section:
    """The device during the windows of each configuration, and the further trials that were throttled."""
    table = side_by_side({title: device_facts(own) for title, own in runs.items()})
    first = {trial.number: trial.measurement for trial in summary.trials if trial.measurement is not None}
    numbers = [str(number) for number, run in first.items() if run.conditions and run.conditions.disturbances]
    remarks = (f"Trials that were throttled: {', '.join(numbers)}.",) if numbers else ()
    return Section(title="Device during the windows", blocks=(table, Bullets(sentences=remarks, is_remark=True)))


def device_facts(runs: Sequence[Measurement]) -> dict[str, str]:
    """What the device reported during one configuration's windows, by name."""
    windows = conditions_of(runs)
    powers = list_known(window.power_w for window in windows)
    highest = tuple(list_known(window.max_sm_clock_mhz for window in windows))
    sizes = list_known(window.others_memory_bytes for window in windows)
    loads = list_known(window.others_busy_fraction for window in windows)
    is_limited = any(window.is_at_power_limit for window in windows)
    retries = sum_retries(runs)
    tensors = list_known(run.memory.allocated_bytes for run in runs)
    return {
        "power": f"{fmean(powers):,.0f} W" if powers else NO_VALUE,
        "clock": _span((window.sm_clock_mhz for window in windows), "MHz"),
        "highest clock": _span([highest], "MHz"),
        "memory clock": _span((window.memory_clock_mhz for window in windows), "MHz"),
        "temperature": _span((window.temperature_c for window in windows), "°C"),
        "at its power limit": say_windows_at_limit(windows) if is_limited else "no" if windows else NO_VALUE,
        "throttled": say_windows_throttled(windows) or ("no" if windows else NO_VALUE),
        "memory in use before": show(max(sizes, default=None), "bytes"),
        "time in use before": show(max(loads, default=None), "share"),
        "tensors at their peak": show(max(tensors, default=None), "bytes"),
        "allocator's retries": NO_VALUE if retries is None else f"{retries:,}",
    }


def _span(edges: Iterable[tuple[int, ...] | None], unit: str) -> str:
    """From the lowest to the highest value at any window's edge."""
    values = [value for edge in list_known(edges) for value in edge]
    if not values:
        return NO_VALUE
    low, high = f"{min(values):,}", f"{max(values):,}"
    return f"{low if low == high else f'{low} to {high}'} {unit}"
