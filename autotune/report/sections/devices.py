"""What the device did while its windows ran, for people: a section for the report, and sentences where it matters.

Comes in: the figures of one or more configurations, by their titles. Goes out: a Section without markup, Facts for a
diagnosis, and sentences that stand beside a result: under throttling, a moved clock, another user or a full memory a
rate is not what it would be elsewhere. That a GPU runs at its power limit is a fact: under heavy load it is what users
get, and it is a doubt only where one of the windows that are compared ran at it and another did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from autotune.records.conditions import OTHERS_LEAST_BUSY, OTHERS_LEAST_BYTES, DeviceConditions
from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Bullets, Section, Table
from autotune.report.figures import Column, Figures, make_columns
from autotune.report.formatting import NO_VALUE, format_bytes, format_count, format_fraction, format_interval, one_line
from autotune.report.wording.devices import THROTTLE_REASONS

__all__ = ["device_facts", "device_section", "figures_by_title", "say_conditions", "say_doubts", "say_setup"]


def figures_by_title(columns: Sequence[Column]) -> dict[str, Figures]:
    """The figures of the columns that measured something, by title."""
    return {column.title: column.figures for column in columns if column.figures is not None}


def device_section(summary: RunSummary) -> Section:
    """The device during the windows of each configuration, and the further trials that ran under throttling."""
    told = figures_by_title(make_columns(summary))
    facts = {title: device_facts(figures) for title, figures in told.items()}
    names = list(dict.fromkeys(name for one in facts.values() for name in one))
    rows = tuple((name, *(one.get(name, NO_VALUE) for one in facts.values())) for name in names)
    table = Table(heads=("", *facts), rows=rows, texts=frozenset({""}))
    return Section(title="Device during the windows", blocks=(table, Bullets(sentences=_say_throttled_trials(summary))))


def device_facts(figures: Figures) -> dict[str, str]:
    """What the device told during one configuration's windows, by name; what it did not tell is left out."""
    seen, facts = figures.conditions, dict[str, str]()
    powers = [one.power_w for one in seen if one.power_w is not None]
    if powers:
        facts["power"] = f"{fmean(powers):,.0f} W"
    clocks = {
        "clock": _span([one.sm_clock_mhz for one in seen], "MHz"),
        "highest clock": _span(
            [None if one.max_sm_clock_mhz is None else (one.max_sm_clock_mhz,) for one in seen], "MHz"
        ),
        "memory's clock": _span([one.memory_clock_mhz for one in seen], "MHz"),
        "temperature": _span([one.temperature_c for one in seen], "°C"),
    }
    facts |= {name: text for name, text in clocks.items() if text}
    if seen:
        facts["at its power limit"] = _say_at_limit(seen) if any(one.is_at_power_limit for one in seen) else "no"
        facts["throttled"] = _say_windows(seen) or "no"
    return facts | _others_facts(seen) | _memory_facts(figures)


def say_doubts(told: Mapping[str, Figures]) -> tuple[str, ...]:
    """What makes the comparison itself doubtful: throttled windows, clocks that moved."""
    return (*_say_throttled(told), *_say_clocks(told))


def _say_throttled(told: Mapping[str, Figures]) -> tuple[str, ...]:
    throttled = [f"{title} ({_say_windows(one.conditions)})" for title, one in told.items() if _windows(one.conditions)]
    if not throttled:
        return ()
    means = "Their rates are lower than without, so what is compared with them is less sure than its interval says"
    return (f"The device throttled itself while these were measured: {', '.join(throttled)}. {means}.",)


def _say_unlike_limits(told: Mapping[str, Figures]) -> tuple[str, ...]:
    """That some of the windows that are compared ran at the device's power limit, and others did not.

    No doubt: a loop that was starved and is not any more gets there by what it has won.
    """
    if len({seen.is_at_power_limit for one in told.values() for seen in one.conditions}) < 2:
        return ()
    counts = ", ".join(f"{title} {_say_at_limit(one.conditions)}" for title, one in told.items() if one.conditions)
    said = f"Some of what is compared was measured at the device's power limit, and some was not: {counts}"
    return (f"{said}. How they compare depends on that limit.",)


def say_conditions(told: Mapping[str, Figures]) -> tuple[str, ...]:
    """What else moves rates, a sentence each: the power limit, other users, a full memory, the machine's settings."""
    return (*_say_unlike_limits(told), *_say_others(told), *say_setup(told))


def say_setup(told: Mapping[str, Figures]) -> tuple[str, ...]:
    """What of that can be set otherwise: a batch that hardly fits, variables of the environment, the driver's mode."""
    seen = [condition for one in told.values() for condition in one.conditions]
    return (*_say_retries(told), *_say_overrides(seen), *_say_persistence(seen))


def _windows(seen: Sequence[DeviceConditions]) -> list[DeviceConditions]:
    return [one for one in seen if one.disturbances]


def _say_windows(seen: Sequence[DeviceConditions]) -> str:
    """How many of the windows were throttled and why: "2 of 3 windows: heat"; "" where none was."""
    throttled = _windows(seen)
    reasons = sorted({THROTTLE_REASONS[reason] for one in throttled for reason in one.disturbances})
    return f"{_say_count(throttled, seen)}: {', '.join(reasons)}" if throttled else ""


def _say_at_limit(seen: Sequence[DeviceConditions]) -> str:
    return _say_count([one for one in seen if one.is_at_power_limit], seen)


def _say_count(some: Sequence[DeviceConditions], seen: Sequence[DeviceConditions]) -> str:
    return f"{len(some)} of {format_count(len(seen), 'window')}"


def _say_throttled_trials(summary: RunSummary) -> tuple[str, ...]:
    numbers = [
        str(trial.number)
        for trial in summary.trials
        if trial.measurement is not None and trial.measurement.conditions is not None
        if trial.measurement.conditions.disturbances
    ]
    return (f"Trials that ran under throttling: {', '.join(numbers)}.",) if numbers else ()


def _span(edges: Sequence[tuple[int, ...] | None], unit: str) -> str:
    """From the lowest to the highest value at any window's edge; "" where none is known."""
    values = [value for edge in edges if edge is not None for value in edge]
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{f'{low:,}' if low == high else format_interval(f'{low:,}', f'{high:,}')} {unit}"


def _others_facts(seen: Sequence[DeviceConditions]) -> dict[str, str]:
    sizes = [one.others_memory_bytes for one in seen if one.others_memory_bytes is not None]
    loads = [one.others_busy_fraction for one in seen if one.others_busy_fraction is not None]
    return {
        **({"memory in use before": format_bytes(max(sizes))} if sizes else {}),
        **({"time in use before": format_fraction(max(loads))} if loads else {}),
    }


def _memory_facts(figures: Figures) -> dict[str, str]:
    allocated, retries = figures.allocated_bytes, figures.alloc_retries
    return {
        **({"tensors at their peak": format_bytes(allocated)} if allocated is not None else {}),
        **({"allocator's retries": f"{retries:,}"} if retries is not None else {}),
    }


def _say_clocks(told: Mapping[str, Figures]) -> tuple[str, ...]:
    moved = []
    for title, one in told.items():
        shares = [seen.clock_moved_by for seen in one.conditions if seen.has_moved and seen.clock_moved_by is not None]
        if shares:
            moved.append(f"{title} ({100 * max(shares, key=abs):+.0f} %)")
    if not moved:
        return ()
    return (f"The device's clock moved within a window, and rates with it: {', '.join(moved)}.",)


def _say_others(told: Mapping[str, Figures]) -> tuple[str, ...]:
    """Whether others came or went between the configurations; that they were there all along is a note of the run."""
    sizes = {title: _most(one.others_memory_bytes for one in figures.conditions) for title, figures in told.items()}
    loads = {title: _most(one.others_busy_fraction for one in figures.conditions) for title, figures in told.items()}
    held = {title: size for title, size in sizes.items() if size is not None}
    busy = {title: load for title, load in loads.items() if load is not None}
    parts = []
    if held and max(held.values()) - min(held.values()) >= OTHERS_LEAST_BYTES:
        parts.append(f"memory: {', '.join(f'{title} {format_bytes(round(size))}' for title, size in held.items())}")
    if busy and max(busy.values()) - min(busy.values()) >= OTHERS_LEAST_BUSY:
        parts.append(f"of the time: {', '.join(f'{title} {format_fraction(load)}' for title, load in busy.items())}")
    if not parts:
        return ()
    return (f"Others on the device came or went between these; in use before each, {'; '.join(parts)}.",)


def _most(figures: Iterable[float | None]) -> float | None:
    return max((one for one in figures if one is not None), default=None)


def _say_retries(told: Mapping[str, Figures]) -> tuple[str, ...]:
    counts = ", ".join(f"{title} ({one.alloc_retries:,})" for title, one in told.items() if one.is_thrashing)
    if not counts:
        return ()
    said = f"torch's allocator found no room and had the device wait, so many times within windows: {counts}"
    return (f"{said}. A smaller micro batch avoids that.",)


def _say_overrides(seen: Sequence[DeviceConditions]) -> tuple[str, ...]:
    names = sorted({one_line(name) for one in seen for name in one.tf32_overrides})
    if not names:
        return ()
    verb, those = ("is", "it") if len(names) == 1 else ("are", "them")
    said = f"{' and '.join(names)} {verb} set here: float32 and tf32 may compute other than their names say"
    return (f"{said}; unset {those} where that is not meant.",)


def _say_persistence(seen: Sequence[DeviceConditions]) -> tuple[str, ...]:
    if not any(one.persistence_mode is False for one in seen):
        return ()
    return ("Persistence mode is off, so a first process waits for the driver: nvidia-smi -pm 1 turns it on.",)
