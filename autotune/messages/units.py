"""Format figures with their units, for tables and sentences alike.

Takes seconds, bytes, fractions, and throughput; returns plain strings within Windows-1252. A
quantity is written in one way wherever it appears; None is NO_VALUE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Literal

NO_VALUE = "–"  # noqa: RUF001 - an en dash is the usual sign for "no figure" in a table
"""Placeholder for a figure that was not measured."""
_MOST_DECIMALS = 3  # of bytes next to a limit; our convention


def format_bytes(size: float) -> str:
    """Return bytes with three digits, in B, KiB, MiB or GiB: "512 MiB", "1.23 GiB"."""
    size = round(size)
    if 0 < abs(size) < 0.1 * 2**20:
        return f"{size} B" if abs(size) < 1000 else f"{size / 2**10:.3g} KiB"
    value, unit = (size / 2**20, "MiB") if size < 2**30 else (size / 2**30, "GiB")
    if value >= 100 or size == 0:
        return f"{value:,.0f} {unit}"
    return f"{value:.1f} {unit}" if value >= 10 else f"{value:,.2f} {unit}"


def format_bytes_of(size: float, limit: float) -> str:
    """Return bytes in the unit of a limit next to them, with enough decimals to tell the two apart.

    Below a tenth of the limit too few digits would be left: such a size has its own unit.
    """
    if size < limit / 10:
        return format_bytes(size)
    number, unit = format_bytes(limit).split()
    scale = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}[unit]
    decimals = len(number.partition(".")[2])
    while (
        size != limit
        and decimals < _MOST_DECIMALS
        and f"{size / scale:.{decimals}f}" == f"{limit / scale:.{decimals}f}"
    ):
        decimals += 1
    return f"{size / scale:,.{decimals}f} {unit}"


def format_rate(samples_per_s: float) -> str:
    """Return a throughput without its unit, with at least four digits: "12.35", "1,235", "12.35 M"."""
    if not isfinite(samples_per_s):
        return "unknown"
    if samples_per_s >= 1e7:
        return f"{samples_per_s / 1e6:,.2f} M"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"


def format_throughput(samples_per_s: float) -> str:
    """Return a throughput with its unit: "12,345 samples/s"."""
    return f"{format_rate(samples_per_s)} samples/s"


def format_times(ratio: float) -> str:
    """Return a ratio; below 1.1 with three decimals, to show small gains: "2.41", "1.034"."""
    if not isfinite(ratio):
        return "unknown"
    if ratio >= 10:
        return f"{ratio:.1f}"
    return f"{ratio:.2f}" if ratio >= 1.1 else f"{ratio:.3f}"


def format_gain(gain: float) -> str:
    """Return a gain in throughput: "+23 %", "-3 %"; from twice the throughput on "2.4 times"."""
    if not isfinite(gain):
        return "unknown"
    if gain < 1:
        return f"{round(100 * gain):+d} %"
    return f"{1 + gain:.1f} times" if gain < 9 else f"{1 + gain:.0f} times"


def format_fraction(fraction: float) -> str:
    """Return a fraction as per cent with two digits or more: "3.4 %", "97 %"."""
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def format_duration(seconds: float) -> str:
    """Return seconds in the two largest units: "0.4 s", "20 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_s} s"
    if minutes < 60:
        return f"{minutes} min {rest_s} s" if rest_s else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_short_time(seconds: float) -> str:
    """Return seconds with three digits, in us, ms or s: "12.3 us"; from a minute on as a duration."""
    if not isfinite(seconds):
        return "unknown"
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        value = seconds * scale
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


def format_energy(joules: float) -> str:
    """Return energy with three digits, below 1 J in mJ: "0.213 mJ", "84.1 mJ", "1.27 J"."""
    value, unit = (joules, "J") if joules >= 0.9995 else (joules * 1e3, "mJ")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 trial", "1,200 trials"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_mean_count(number: float) -> str:
    """Return a mean count with two digits, from 10 on as a whole number: "1", "2.9", "128"."""
    return f"{number:.2g}" if number < 9.95 else f"{number:,.0f}"


def _format_settings(settings: Mapping[str, object]) -> str:
    """Return settings as a user writes them: "num_workers=4, persistent_workers=True"."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


Unit = Literal[
    "bytes",
    "duration",
    "energy",
    "gain",
    "mean_count",
    "plain_rate",
    "rate",
    "seconds",
    "settings",
    "share",
    "times",
]
UNITS: dict[Unit, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "duration": format_duration,
    "energy": format_energy,
    "gain": format_gain,
    "mean_count": format_mean_count,
    "plain_rate": format_rate,
    "rate": format_throughput,
    "seconds": format_short_time,
    "settings": _format_settings,
    "share": format_fraction,
    "times": format_times,
}
"""The formatter of each unit."""


def show(value: object, unit: Unit) -> str:
    """Return a figure in its unit; NO_VALUE for None."""
    return NO_VALUE if value is None else UNITS[unit](value)


def show_interval(low: float, high: float, unit: Unit) -> str:
    """Return the ends of an interval in their unit: "2.35 to 2.47"; "unknown" if one is infinite."""
    ends = [show(low, unit), show(high, unit)]
    return "unknown" if "unknown" in ends else " to ".join(ends)


def show_gain_interval(low: float, high: float | None) -> str:
    """Return the ends of a gain's interval: "+55 to +90 %", "at least +20 %" without an upper one.

    Empty if both ends look the same.
    """
    if high is None or not isfinite(high):
        return f"at least {format_gain(low)}"
    ends = [format_gain(low), format_gain(high)]
    if ends[0] == ends[1]:
        return ""
    for unit in (" %", " times"):
        if ends[0].endswith(unit) and ends[1].endswith(unit):
            ends[0] = ends[0].removesuffix(unit)
    return " to ".join(ends)


def text_bar(fraction: float, longest: int = 30) -> str:
    """Return a share in 0..1 as a bar of full blocks.

    Args:
        fraction: The share.
        longest: Blocks of the whole; by default a third of a terminal.
    """
    return "█" * round(longest * fraction)


# Words for the codes in records, shared by messages and reports.


OUTCOMES = {
    "ok": "ok",
    "over_memory": "over the limit",
    "oom": "out of memory",
    "host_oom": "out of RAM",
    "timeout": "out of time",
    "crashed": "crashed",
    "diverged": "diverged",
    "pruned": "cut short",
    "invalid": "invalid",
}
"""Outcome of a trial."""
THROTTLE_REASONS = {
    "power_cap": "power limit",
    "thermal": "heat",
    "power_brake": "power brake",
    "hardware_slowdown": "slowdown by the hardware",
}
"""Reason for a GPU's lowered clock."""
MODES = {
    "anomaly": "anomaly detection of autograd",
    "deterministic": "deterministic algorithms",
    "tracer": "a trace or profile function of Python",
    "profiler": "torch's profiler",
    "denormals": "arithmetic on subnormal values",
}
"""Mode that slows steps down, by its code in records."""
