"""Figures as short strings: the one library of units, for tables and sentences alike.

Comes in: seconds, bytes, fractions, rates. Goes out: plain strings of characters that Windows-1252
knows as well. A quantity is written in one way wherever it appears; None is NO_VALUE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Literal

NO_VALUE = "–"  # noqa: RUF001 - an en dash is the usual sign for "no figure" in a table
"""Stands where nothing was measured."""
_MOST_DECIMALS = 3  # our convention


def format_bytes(size: float) -> str:
    """Bytes with three digits, as MiB, from 1 GiB on as GiB, below 0.1 MiB as KiB or bytes: "512 MiB", "1.23 GiB"."""
    size = round(size)
    if 0 < abs(size) < 0.1 * 2**20:
        return f"{size} B" if abs(size) < 1000 else f"{size / 2**10:.3g} KiB"
    value, unit = (size / 2**20, "MiB") if size < 2**30 else (size / 2**30, "GiB")
    decimals = 0 if value >= 100 or size == 0 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f} {unit}"


def format_bytes_beside(size: float, limit: float) -> str:
    """Bytes in the unit and with the decimals of a limit beside them, with more decimals where they look alike.

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
    """A rate's number with at least four digits: "12.35", "1,235", "12.35 M"."""
    if not isfinite(samples_per_s):
        return "unknown"
    if samples_per_s >= 1e7:
        return f"{samples_per_s / 1e6:,.2f} M"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"


def format_times(ratio: float) -> str:
    """A ratio; close to 1 with three decimals, so that a small gain can be told from none: "2.41", "1.034"."""
    if not isfinite(ratio):
        return "unknown"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 1.1 else f"{ratio:.3f}"


def format_gain(gain: float) -> str:
    """A change of the rate: "+23 %", from twice the rate on "2.4 times"."""
    return f"+{100 * gain:.0f} %" if gain < 1 else f"{1 + gain:.{1 if gain < 9 else 0}f} times"


def format_interval(low: str, high: str) -> str:
    """Two formatted ends: "2.35 to 2.47"; "unknown" where an end is."""
    return "unknown" if "unknown" in {low, high} else f"{low} to {high}"


def format_fraction(fraction: float) -> str:
    """A fraction as per cent with two digits or more: "3.4 %", "97 %"."""
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units: "0.4 s", "20 s", "3 min 20 s", "2 h 5 min"."""
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
    """Seconds below a minute with three digits, in the unit that fits: "12.3 us", "4.56 ms", "1.23 s"."""
    if not isfinite(seconds):
        return "unknown"
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        value = seconds * scale
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


def format_energy(joules: float) -> str:
    """Energy with three digits, below 1 J in mJ: "0.213 mJ", "84.1 mJ", "1.27 J"."""
    value, unit = (joules, "J") if joules >= 0.9995 else (joules * 1e3, "mJ")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def format_count(number: int, noun: str) -> str:
    """A number with its noun: "1 trial", "1,200 trials"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_mean_count(number: float) -> str:
    """A mean of counts with two digits, from 10 on as a whole number: "1", "2.9", "128"."""
    return f"{number:.2g}" if number < 9.95 else f"{number:,.0f}"


def _format_settings(settings: Mapping[str, object]) -> str:
    """Settings as a user writes them: "num_workers=4, persistent_workers=True"."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


Unit = Literal[
    "bytes",
    "mib",
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
    "mib": format_bytes,
    "duration": format_duration,
    "energy": format_energy,
    "gain": format_gain,
    "mean_count": format_mean_count,
    "plain_rate": format_rate,
    "rate": lambda samples_per_s: f"{format_rate(samples_per_s)} samples/s",
    "seconds": format_short_time,
    "settings": _format_settings,
    "share": format_fraction,
    "times": format_times,
}
"""Every unit by the name that templates and tables know it by."""


def show(value: object, unit: Unit) -> str:
    """A figure in its unit; NO_VALUE where there is none."""
    return NO_VALUE if value is None else UNITS[unit](value)


def show_interval(low: float, high: float, unit: Unit) -> str:
    """An interval's ends in their unit; "unknown" where one is infinite."""
    return format_interval(show(low, unit), show(high, unit))


def text_bar(fraction: float) -> str:
    """A share as a bar of full blocks."""
    return "█" * round(30 * fraction)  # a third of a terminal


# Words for codes that records hold, where both messages and reports need them.


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
"""How a trial ended."""
THROTTLE_REASONS = {
    "power_cap": "power limit",
    "thermal": "heat",
    "power_brake": "power brake",
    "hardware_slowdown": "slowdown by the hardware",
}
"""What lowered a GPU's clock."""
