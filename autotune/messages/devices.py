"""Notes on a device's and a host's conditions during a window."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.messages import message
from autotune.messages.units import format_bytes, format_count, format_fraction
from autotune.messages.words import THROTTLE_REASONS

__all__ = ["clock_lowered", "clock_moved", "cores_taken", "others_on_device"]


@message
def cores_taken(*, others_cores: float, cores: int) -> str:
    return (
        f"Other programs used {others_cores:.1f} of the {format_count(cores, 'core')} during the window: throughput is "
        "lower than on a quiet machine, most of all where threads wait for each other."
    )


@message
def clock_lowered(*, reasons: Sequence[str]) -> str:
    named = " and ".join(THROTTLE_REASONS[reason] for reason in reasons)
    return f"The device's clock was lowered during the window: {named}."


@message
def clock_moved(*, first_mhz: int, last_mhz: int) -> str:
    return f"The device's clock changed from {first_mhz} to {last_mhz} MHz during the window."


@message
def others_on_device(*, held_bytes: int, busy_fraction: float | None) -> str:
    busy = ""
    if busy_fraction is not None:
        busy = (
            f", and kept it busy for {format_fraction(busy_fraction)} of the time: throughput is lower than on a "
            "device of its own"
        )
    held = format_bytes(held_bytes)
    return (
        f"Before the first trial other processes held {held} of the device's memory, which counts in every peak{busy}."
    )
