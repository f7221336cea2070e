"""What must be known to read a report's figures, in sentences: sources, numbers of runs, what disturbed the windows.

Comes in: columns or figures by their titles. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autotune.records.conditions import OTHERS_LEAST_BUSY, OTHERS_LEAST_BYTES, DeviceConditions
from autotune.records.host_load import join_loads
from autotune.records.measurement import Measurement
from autotune.records.ranks import Communication
from autotune.records.run_spread import RunSpread
from autotune.records.utilization import disagreement
from autotune.report.figures import Column, list_busy, list_known
from autotune.report.text import one_line
from autotune.report.wording.catalogue import fill
from autotune.report.wording.names import THROTTLE_REASONS
from autotune.report.wording.units import format_count

__all__ = [
    "conditions_of",
    "describe_exchange",
    "is_held_in",
    "list_conditions",
    "list_doubts",
    "name_holder",
    "say_busy",
    "say_rates",
    "say_setup",
    "say_windows_at_limit",
    "say_windows_throttled",
    "sum_retries",
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


def say_rates(runs: Mapping[str, Sequence[Measurement]], spread: RunSpread) -> Iterator[str]:
    """Say what energy counts, how many runs the throughput comes from, and what its interval rests on."""
    if any(run.joules_per_sample is not None for own in runs.values() for run in own):
        yield fill("energy", {})
    if runs:
        yield fill("rates", {"runs": {title: len(own) for title, own in runs.items()}})
        for is_held in sorted({is_held_in(own) for own in runs.values()}):
            yield fill("run_spread", {"spread": spread.of([is_held]), "held_by": name_holder(spread, is_held)})


def is_held_in(runs: Iterable[Measurement]) -> bool:
    """Return whether the device set the pace in all of some runs, which steadies their throughput."""
    return all(run.window.is_held_by_device for run in runs)


def name_holder(spread: RunSpread, is_held_by_device: bool) -> str | None:
    """Return who holds the loop of some runs; None where all runs are of one kind."""
    return None if spread.device is None else "device" if is_held_by_device else "host"


def describe_exchange(exchange: Communication) -> str:
    """What exchanging gradients takes of a step, in a few words."""
    figures = ("exposed_s", "exposed_fraction", "hidden_fraction", "exchange_s")
    return fill("exchange", {name: getattr(exchange, name) for name in figures})


def list_doubts(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Say what makes the comparison itself doubtful: cores that others took, throttled windows, changed clocks."""
    loads = {title: load for title, own in runs.items() if (load := join_loads(run.host_load for run in own))}
    if any(load.is_loaded for load in loads.values()):
        yield fill("cores_shared", {"loads": loads})
    conditions = {title: conditions_of(own) for title, own in runs.items()}
    throttled = {title: say_windows_throttled(windows) for title, windows in conditions.items()}
    if any(throttled.values()):
        yield fill("throttled", {"throttled": {title: windows for title, windows in throttled.items() if windows}})
    changes = {
        title: [window.clock_moved_by or 0.0 for window in windows if window.has_moved]
        for title, windows in conditions.items()
    }
    if any(changes.values()):
        yield fill(
            "clock_changed", {"moved": {title: max(moves, key=abs) for title, moves in changes.items() if moves}}
        )


def list_conditions(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """What else moves rates: the power limit, other users, a full memory, the machine's settings.

    Some windows at the power limit are no doubt: a loop that no longer waits for data gets there by what it has gained.
    Other processes matter where they started or ended between the configurations; that they ran all along is a note.
    """
    conditions = {title: windows for title, own in runs.items() if (windows := conditions_of(own))}
    if len({window.is_at_power_limit for windows in conditions.values() for window in windows}) > 1:
        counts = {title: say_windows_at_limit(windows) for title, windows in conditions.items()}
        yield fill("power_limit", {"counts": counts})
    memory = _of_others(conditions, lambda window: window.others_memory_bytes, OTHERS_LEAST_BYTES)
    busy = _of_others(conditions, lambda window: window.others_busy_fraction, OTHERS_LEAST_BUSY)
    if memory or busy:
        yield fill("others_changed", {"memory": memory, "busy": busy})
    yield from say_setup(runs)


def say_setup(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """What of that can be set otherwise: a batch that hardly fits, variables of the environment, the driver's mode."""
    windows = [window for own in runs.values() for window in conditions_of(own)]
    counts = {title: sum_retries(own) for title, own in runs.items() if any(run.memory.is_thrashing for run in own)}
    if counts:
        yield fill("thrashing", {"counts": counts})
    names = sorted({one_line(name) for window in windows for name in window.tf32_overrides})
    if names:
        yield fill("tf32_overridden", {"names": names})
    if any(window.persistence_mode is False for window in windows):
        yield fill("persistence_mode_off", {})


def conditions_of(runs: Iterable[Measurement]) -> list[DeviceConditions]:
    """Return what the device did during each run's window; empty where it does not report it."""
    return list_known(run.conditions for run in runs)


def sum_retries(runs: Iterable[Measurement]) -> int | None:
    """Return how often the allocator found no room in the runs' windows; None where the device does not count it."""
    known = list_known(run.memory.alloc_retries for run in runs)
    return sum(known) if known else None


def say_windows_throttled(windows: Sequence[DeviceConditions]) -> str:
    """How many of the windows were throttled and why: "2 of 3 windows: heat"; "" where none was."""
    reasons = sorted({reason for window in windows for reason in window.disturbances}, key=THROTTLE_REASONS.__getitem__)
    count = sum(bool(window.disturbances) for window in windows)
    return fill("windows_throttled", {"count": count, "windows": len(windows), "reasons": reasons}) if count else ""


def say_windows_at_limit(windows: Sequence[DeviceConditions]) -> str:
    """How many of the windows ran at the power limit: "2 of 3 windows"."""
    return f"{sum(window.is_at_power_limit for window in windows)} of {format_count(len(windows), 'window')}"


def _of_others(
    conditions: Mapping[str, Sequence[DeviceConditions]],
    figure: Callable[[DeviceConditions], float | None],
    least: float,
) -> dict[str, float]:
    """What other processes used before each configuration; empty where it differs by less than this between them."""
    known = {
        title: max(values) for title, windows in conditions.items() if (values := list_known(map(figure, windows)))
    }
    return known if known and max(known.values()) - min(known.values()) >= least else {}
