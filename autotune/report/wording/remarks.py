"""What must be known to read a report's figures, in sentences: sources, numbers of runs, what disturbed the windows.

Comes in: columns or figures by their titles. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from autotune.messages.units import format_count
from autotune.messages.words import THROTTLE_REASONS
from autotune.records.conditions import OTHERS_LEAST_BUSY, OTHERS_LEAST_BYTES, DeviceConditions
from autotune.records.ranks import Communication
from autotune.records.run_spread import RunSpread
from autotune.records.utilization import disagreement
from autotune.report.figures import Column, Figures, list_busy
from autotune.report.text import one_line
from autotune.report.wording.catalogue import fill

__all__ = [
    "describe_exchange",
    "list_conditions",
    "list_doubts",
    "name_holder",
    "say_busy",
    "say_rates",
    "say_setup",
    "say_windows_at_limit",
    "say_windows_throttled",
]


def say_busy(columns: Sequence[Column]) -> Iterator[str]:
    """Where the table's busy fractions come from, and where two sources of a configuration's lie far apart."""
    shown = zip(columns, list_busy(columns), strict=True)
    sources = {column.title: one_line(reading.source) for column, reading in shown if reading is not None}
    if sources:
        yield fill("busy", {"sources": sources})
    for column in columns:
        pair = None if column.figures is None else disagreement(column.figures.busy_readings)
        if pair is not None:
            yield fill("busy_sources_disagree", {"title": column.title, "low": pair[0], "high": pair[1]})


def say_rates(measured: Mapping[str, Figures], spread: RunSpread) -> Iterator[str]:
    """What energy counts, how many runs the rates come from, and what their intervals rest on."""
    if any(figures.joules_per_sample is not None for figures in measured.values()):
        yield fill("energy", {})
    if measured:
        runs = {title: figures.runs for title, figures in measured.items()}
        yield fill("rates", {"runs": runs})
        for is_held in sorted({figures.is_held_by_device for figures in measured.values()}):
            yield fill("run_spread", {"spread": spread.of([is_held]), "held_by": name_holder(spread, is_held)})


def name_holder(spread: RunSpread, is_held_by_device: bool) -> str | None:
    """Return who holds the loop of some runs; None where all runs are of one kind."""
    return None if spread.device is None else "device" if is_held_by_device else "host"


def describe_exchange(exchange: Communication) -> str:
    """What exchanging gradients takes of a step, in a few words."""
    figures = ("exposed_s", "exposed_fraction", "hidden_fraction", "exchange_s")
    return fill("exchange", {name: getattr(exchange, name) for name in figures})


def list_doubts(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What makes the comparison itself doubtful: cores that others took, throttled windows, clocks that changed."""
    loads = {title: load for title, figures in measured.items() if (load := figures.host_load) is not None}
    if any(load.is_loaded for load in loads.values()):
        yield fill("cores_shared", {"loads": loads})
    throttled = {title: say_windows_throttled(figures.conditions) for title, figures in measured.items()}
    if any(throttled.values()):
        yield fill("throttled", {"throttled": {title: windows for title, windows in throttled.items() if windows}})
    changes = {
        title: [window.clock_moved_by or 0.0 for window in figures.conditions if window.has_moved]
        for title, figures in measured.items()
    }
    if any(changes.values()):
        yield fill(
            "clock_changed", {"moved": {title: max(moves, key=abs) for title, moves in changes.items() if moves}}
        )


def list_conditions(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What else moves rates: the power limit, other users, a full memory, the machine's settings.

    Some windows at the power limit are no doubt: a loop that no longer waits for data gets there by what it has gained.
    Other processes matter where they started or ended between the configurations; that they ran all along is a note.
    """
    if len({window.is_at_power_limit for figures in measured.values() for window in figures.conditions}) > 1:
        seen = {title: figures.conditions for title, figures in measured.items() if figures.conditions}
        yield fill("power_limit", {"counts": {title: say_windows_at_limit(windows) for title, windows in seen.items()}})
    memory = _of_others(measured, lambda window: window.others_memory_bytes, OTHERS_LEAST_BYTES)
    busy = _of_others(measured, lambda window: window.others_busy_fraction, OTHERS_LEAST_BUSY)
    if memory or busy:
        yield fill("others_changed", {"memory": memory, "busy": busy})
    yield from say_setup(measured)


def say_setup(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What of that can be set otherwise: a batch that hardly fits, variables of the environment, the driver's mode."""
    windows = [window for figures in measured.values() for window in figures.conditions]
    counts = {title: known.alloc_retries for title, known in measured.items() if known.is_thrashing}
    if counts:
        yield fill("thrashing", {"counts": counts})
    names = sorted({one_line(name) for window in windows for name in window.tf32_overrides})
    if names:
        yield fill("tf32_overridden", {"names": names})
    if any(window.persistence_mode is False for window in windows):
        yield fill("persistence_mode_off", {})


def say_windows_throttled(windows: Sequence[DeviceConditions]) -> str:
    """How many of the windows were throttled and why: "2 of 3 windows: heat"; "" where none was."""
    reasons = sorted({reason for window in windows for reason in window.disturbances}, key=THROTTLE_REASONS.__getitem__)
    count = sum(bool(window.disturbances) for window in windows)
    return fill("windows_throttled", {"count": count, "windows": len(windows), "reasons": reasons}) if count else ""


def say_windows_at_limit(windows: Sequence[DeviceConditions]) -> str:
    """How many of the windows ran at the power limit: "2 of 3 windows"."""
    return f"{sum(window.is_at_power_limit for window in windows)} of {format_count(len(windows), 'window')}"


def _of_others(
    measured: Mapping[str, Figures], figure: Callable[[DeviceConditions], float | None], least: float
) -> dict[str, float]:
    """What other processes used before each configuration; empty where it differs by less than this between them."""
    known = {
        title: max(values)
        for title, figures in measured.items()
        if (values := [value for window in figures.conditions if (value := figure(window)) is not None])
    }
    return known if known and max(known.values()) - min(known.values()) >= least else {}
