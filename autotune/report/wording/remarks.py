"""What must be known to read a report's figures, in sentences: sources, numbers of runs, what disturbed the windows.

Comes in: columns or figures by their titles. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from autotune.records.conditions import OTHERS_LEAST_BUSY, OTHERS_LEAST_BYTES, DeviceConditions
from autotune.records.ranks import Communication
from autotune.records.utilization import disagreement
from autotune.report.figures import Column, Figures, list_busy
from autotune.report.text import one_line
from autotune.report.wording.names import THROTTLE_REASONS
from autotune.report.wording.units import Unit, format_count, format_fraction, format_short_time, show

__all__ = [
    "describe_exchange",
    "list_conditions",
    "list_doubts",
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
    if len(set(sources.values())) == 1:
        yield f"Busy: {next(iter(sources.values()))}."
    elif sources:
        each = "; ".join(f"{title}: {source}" for title, source in sources.items())
        yield f"Busy fractions of different sources can't be compared ({each})."
    for column in columns:
        pair = None if column.figures is None else disagreement(column.figures.busy_readings)
        if pair is not None:
            low, high = pair
            yield (
                f"{column.title}: two sources disagree by {100 * (high.fraction - low.fraction):.0f} points: "
                f"{one_line(high.source)} shows {format_fraction(high.fraction)}, "
                f"{one_line(low.source)} {format_fraction(low.fraction)}."
            )


def say_rates(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What energy counts, and how many runs the rates come from."""
    if any(figures.joules_per_sample is not None for figures in measured.values()):
        yield "Energy: of the whole device during the windows, its idle power included."
    runs = {figures.runs if figures.is_confirmed else 0 for figures in measured.values()}
    if runs == {0}:
        yield "Rates: one trial each."
    elif len(runs) == 1:
        yield f"Rates: {format_count(runs.pop(), 'run')} each, in turns with the baseline."
    elif runs:
        confirmed = {title: known.runs if known.is_confirmed else 0 for title, known in measured.items()}
        each = (f"{title} {format_count(count, 'run') if count else 'its trial'}" for title, count in confirmed.items())
        yield f"Rates: {', '.join(each)}."


def describe_exchange(talk: Communication) -> str:
    """What exchanging gradients takes of a step, in a few words."""
    longer, alone = format_short_time(talk.exposed_s), format_short_time(talk.exchange_s)
    return (
        f"exchanging gradients makes a step {longer} longer ({format_fraction(talk.exposed_fraction)} of it); "
        f"{format_fraction(talk.hidden_fraction)} of an exchange ({alone} by itself) is hidden"
    )


def list_doubts(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What makes the comparison itself doubtful: throttled windows, clocks that changed."""
    throttled = {title: say_windows_throttled(figures.conditions) for title, figures in measured.items()}
    if any(throttled.values()):
        each = ", ".join(f"{title} ({windows})" for title, windows in throttled.items() if windows)
        yield (
            f"The device was throttled during these measurements: {each}. Unthrottled rates are higher, so "
            "comparisons with them are less certain than the intervals suggest."
        )
    changed = {
        title: [window.clock_moved_by or 0.0 for window in figures.conditions if window.has_moved]
        for title, figures in measured.items()
    }
    if any(changed.values()):
        shares = {title: max(moves, key=abs) for title, moves in changed.items() if moves}
        each = ", ".join(f"{title} ({100 * share:+.0f} %)" for title, share in shares.items())
        yield f"The device's clock changed within a window, and rates with it: {each}."


def list_conditions(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What else moves rates: the power limit, other users, a full memory, the machine's settings.

    Some windows at the power limit are no doubt: a loop that no longer waits for data gets there by what it has gained.
    Other processes matter where they started or ended between the configurations; that they ran all along is a note.
    """
    if len({window.is_at_power_limit for figures in measured.values() for window in figures.conditions}) > 1:
        seen = {title: figures.conditions for title, figures in measured.items() if figures.conditions}
        each = ", ".join(f"{title} {say_windows_at_limit(windows)}" for title, windows in seen.items())
        yield f"Some windows ran at the device's power limit, others did not: {each}. This affects the comparison."
    parts = [
        *_of_others(measured, lambda window: window.others_memory_bytes, "memory", OTHERS_LEAST_BYTES, "bytes"),
        *_of_others(measured, lambda window: window.others_busy_fraction, "of the time", OTHERS_LEAST_BUSY, "share"),
    ]
    if parts:
        yield f"Other processes started or ended on the device between these; in use before each, {'; '.join(parts)}."
    yield from say_setup(measured)


def say_setup(measured: Mapping[str, Figures]) -> Iterator[str]:
    """What of that can be set otherwise: a batch that hardly fits, variables of the environment, the driver's mode."""
    windows = [window for figures in measured.values() for window in figures.conditions]
    counts = ", ".join(f"{title} ({known.alloc_retries:,})" for title, known in measured.items() if known.is_thrashing)
    if counts:
        yield (
            f"torch's allocator ran out of room and made the device wait, so many times in its windows: {counts}. "
            "A smaller micro batch avoids that."
        )
    names = sorted({one_line(name) for window in windows for name in window.tf32_overrides})
    if names:
        verb, those = ("is", "it") if len(names) == 1 else ("are", "them")
        yield (
            f"{' and '.join(names)} {verb} set here, so float32 and tf32 may not compute what their names say; unset "
            f"{those} unless that is intended."
        )
    if any(window.persistence_mode is False for window in windows):
        yield "Persistence mode is off, so a first process waits for the driver: nvidia-smi -pm 1 turns it on."


def say_windows_throttled(windows: Sequence[DeviceConditions]) -> str:
    """How many of the windows were throttled and why: "2 of 3 windows: heat"; "" where none was."""
    reasons = sorted({THROTTLE_REASONS[reason] for window in windows for reason in window.disturbances})
    count = sum(bool(window.disturbances) for window in windows)
    return f"{count} of {format_count(len(windows), 'window')}: {', '.join(reasons)}" if count else ""


def say_windows_at_limit(windows: Sequence[DeviceConditions]) -> str:
    """How many of the windows ran at the power limit: "2 of 3 windows"."""
    return f"{sum(window.is_at_power_limit for window in windows)} of {format_count(len(windows), 'window')}"


def _of_others(
    measured: Mapping[str, Figures],
    figure: Callable[[DeviceConditions], float | None],
    what: str,
    least: float,
    unit: Unit,
) -> Iterator[str]:
    """What other processes used before each configuration, where it differs by so much between them."""
    used: dict[str, float] = {}
    for title, figures in measured.items():
        known = [value for window in figures.conditions if (value := figure(window)) is not None]
        used |= {title: max(known)} if known else {}
    if used and max(used.values()) - min(used.values()) >= least:
        yield f"{what}: {', '.join(f'{title} {show(value, unit)}' for title, value in used.items())}"
