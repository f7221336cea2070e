"""What must be known to read a report's figures: sources, numbers of runs, what disturbed the windows.

Comes in: columns or figures by their titles. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autotune.messages.units import format_bytes, format_count, format_fraction, format_short_time
from autotune.messages.words import THROTTLE_REASONS
from autotune.records.conditions import OTHERS_LEAST_BUSY, OTHERS_LEAST_BYTES, DeviceConditions
from autotune.records.host_load import join_loads
from autotune.records.measurement import Measurement
from autotune.records.ranks import Communication
from autotune.records.run_spread import RunSpread
from autotune.records.utilization import disagreement
from autotune.report.figures import Column, list_busy, list_known
from autotune.report.text import one_line

__all__ = [
    "conditions_of",
    "describe_exchange",
    "is_held_in",
    "list_conditions",
    "list_doubts",
    "say_busy",
    "say_rates",
    "say_run_spread",
    "say_setup",
    "say_windows_at_limit",
    "say_windows_throttled",
    "sum_retries",
]


def say_busy(columns: Sequence[Column]) -> Iterator[str]:
    """Yield where the table's busy fractions come from, and where two sources of a configuration's lie far apart."""
    shown = zip(columns, list_busy(columns), strict=True)
    sources = {column.title: one_line(reading.source) for column, reading in shown if reading is not None}
    if len(set(sources.values())) > 1:
        yield f"Busy fractions of different sources can't be compared ({_by_title(sources, '; ', ': ')})."
    elif sources:
        yield f"Busy: {next(iter(sources.values()))}."
    for column in columns:
        pair = None if column.figures is None else disagreement(column.figures.busy_readings)
        if pair is not None:
            low, high = pair
            yield (
                f"{column.title}: two sources disagree by {100 * (high.fraction - low.fraction):.0f} points: "
                f"{one_line(high.source)} {format_fraction(high.fraction)}, "
                f"{one_line(low.source)} {format_fraction(low.fraction)}."
            )


def _by_title(values: Mapping[str, str], separator: str = ", ", between: str = " ") -> str:
    return separator.join(f"{title}{between}{value}" for title, value in values.items())


def say_rates(runs: Mapping[str, Sequence[Measurement]], spread: RunSpread) -> Iterator[str]:
    """Yield what energy counts, how many runs the throughput comes from, and what its interval rests on."""
    if any(run.joules_per_sample is not None for own in runs.values() for run in own):
        yield "Energy: of the whole device, its idle power included."
    if not runs:
        return
    counts = {title: format_count(len(own), "run") for title, own in runs.items()}
    if len(set(counts.values())) > 1:
        yield f"Throughput: {_by_title(counts)}."
    else:
        yield f"Throughput: {next(iter(counts.values()))} each."
    for is_held in sorted({is_held_in(own) for own in runs.values()}):
        yield say_run_spread(spread, is_held_by_device=is_held)


def is_held_in(runs: Iterable[Measurement]) -> bool:
    """Return whether the device set the pace in all of some runs, which steadies their throughput."""
    return all(run.window.is_held_by_device for run in runs)


def say_run_spread(spread: RunSpread, *, is_held_by_device: bool) -> str:
    """Return the run-to-run variation of one kind of runs, and that intervals include it."""
    known = spread.of([is_held_by_device])
    where = ""
    if spread.device is not None:
        where = " where the device sets the pace" if is_held_by_device else " where the device does not set the pace"
    variation = f"Run-to-run variation{where}: {format_fraction(known.sd)} (standard deviation)"
    if known.source == "assumed":
        return f"{variation}, assumed as usual for such a device; every interval includes it."
    return f"{variation}; every interval includes it."


def describe_exchange(exchange: Communication) -> str:
    """Return what exchanging gradients takes of a step, in a few words."""
    return (
        f"adds {format_short_time(exchange.exposed_s)} to a step ({format_fraction(exchange.exposed_fraction)} of it); "
        f"{format_fraction(exchange.hidden_fraction)} of its {format_short_time(exchange.exchange_s)} are hidden"
    )


def list_doubts(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Yield what makes the comparison itself doubtful: cores that others took, throttled windows, changed clocks."""
    loads = {title: load for title, own in runs.items() if (load := join_loads(run.host_load for run in own))}
    if any(load.is_loaded for load in loads.values()):
        cores = {title: f"{load.others_cores:.1f} of {load.cores}" for title, load in loads.items()}
        yield (
            f"Other programs used cores during these measurements: {_by_title(cores)}. They slow some settings more "
            "than others, which may explain the ratio: measure again on a quiet machine."
        )
    conditions = {title: conditions_of(own) for title, own in runs.items()}
    throttled = {title: say_windows_throttled(windows) for title, windows in conditions.items()}
    if any(throttled.values()):
        windows = {title: f"({reasons})" for title, reasons in throttled.items() if reasons}
        yield (
            f"The device was throttled during these measurements: {_by_title(windows)}. Comparisons are less certain "
            "than the intervals suggest."
        )
    changes = {
        title: [window.clock_moved_by or 0.0 for window in windows if window.has_moved]
        for title, windows in conditions.items()
    }
    if any(changes.values()):
        largest = {title: f"({100 * max(moves, key=abs):+.0f} %)" for title, moves in changes.items() if moves}
        yield f"The device's clock, and the throughput with it, changed within a window: {_by_title(largest)}."


def list_conditions(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Yield what else moves throughput: the power limit, other users, a full memory, the machine's settings.

    Some windows at the power limit are no doubt: a loop that no longer waits for data gets there by what it has gained.
    Other processes matter where they started or ended between the configurations; that they ran all along is a note.
    """
    conditions = {title: windows for title, own in runs.items() if (windows := conditions_of(own))}
    if len({window.is_at_power_limit for windows in conditions.values() for window in windows}) > 1:
        limited = {title: say_windows_at_limit(windows) for title, windows in conditions.items()}
        yield f"Only some windows ran at the device's power limit, which affects the comparison: {_by_title(limited)}."
    memory = _of_others(conditions, lambda window: window.others_memory_bytes, OTHERS_LEAST_BYTES, format_bytes)
    busy = _of_others(conditions, lambda window: window.others_busy_fraction, OTHERS_LEAST_BUSY, format_fraction)
    used = []
    if memory:
        used.append(f"memory in use before each: {_by_title(memory)}")
    if busy:
        used.append(f"device busy before each: {_by_title(busy)}")
    if used:
        yield f"Other processes started or ended on the device between these; {'; '.join(used)}."
    yield from say_setup(runs)


def say_setup(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Yield what the user can change: a batch that hardly fits, environment variables, the driver's mode."""
    windows = [window for own in runs.values() for window in conditions_of(own)]
    counts = {
        title: f"({sum_retries(own):,} times)"
        for title, own in runs.items()
        if any(run.memory.is_thrashing for run in own)
    }
    if counts:
        stalled = f"torch's allocator ran out of memory and stalled the device: {_by_title(counts)}"
        yield f"{stalled}. Use a smaller micro batch."
    names = sorted({one_line(name) for window in windows for name in window.tf32_overrides})
    if names:
        are, them = ("is", "it") if len(names) == 1 else ("are", "them")
        yield (
            f"{' and '.join(names)} {are} set, so float32 and tf32 may not compute what their names say; unset {them} "
            "unless that is intended."
        )
    if any(window.persistence_mode is False for window in windows):
        yield "Persistence mode is off, so the first process waits for the driver: turn it on with nvidia-smi -pm 1."


def conditions_of(runs: Iterable[Measurement]) -> list[DeviceConditions]:
    """Return what the device did during each run's window; empty where it does not report it."""
    return list_known(run.conditions for run in runs)


def sum_retries(runs: Iterable[Measurement]) -> int | None:
    """Return how often the allocator found no room in the runs' windows; None where the device does not count it."""
    known = list_known(run.memory.alloc_retries for run in runs)
    return sum(known) if known else None


def say_windows_throttled(windows: Sequence[DeviceConditions]) -> str:
    """Return how many of the windows were throttled and why: "2 of 3 windows: heat"; "" where none was."""
    count = sum(bool(window.disturbances) for window in windows)
    if not count:
        return ""
    reasons = sorted({THROTTLE_REASONS[reason] for window in windows for reason in window.disturbances})
    return f"{count} of {format_count(len(windows), 'window')}: {', '.join(reasons)}"


def say_windows_at_limit(windows: Sequence[DeviceConditions]) -> str:
    """Return how many of the windows ran at the power limit: "2 of 3 windows"."""
    return f"{sum(window.is_at_power_limit for window in windows)} of {format_count(len(windows), 'window')}"


def _of_others(
    conditions: Mapping[str, Sequence[DeviceConditions]],
    figure: Callable[[DeviceConditions], float | None],
    least: float,
    unit: Callable[[float], str],
) -> dict[str, str]:
    """Return what other processes used before each configuration; empty where it differs by less than this."""
    known = {
        title: max(values) for title, windows in conditions.items() if (values := list_known(map(figure, windows)))
    }
    if not known or max(known.values()) - min(known.values()) < least:
        return {}
    return {title: unit(value) for title, value in known.items()}
