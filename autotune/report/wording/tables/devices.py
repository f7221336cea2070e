"""Sentences on a device's conditions during a window, and on what several ranks take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.records.conditions import ThrottleReason
from autotune.report.wording.template import Wording
from autotune.report.wording.units import format_bytes, format_fraction

__all__ = ["DEVICES", "THROTTLE_REASONS"]

THROTTLE_REASONS: dict[ThrottleReason, str] = {
    "power_cap": "power limit",
    "thermal": "heat",
    "power_brake": "power brake",
    "hardware_slowdown": "slowdown by the hardware",
}
"""What lowered a GPU's clock."""


def _clock_lowered(figures: Mapping[str, Any]) -> str:
    reasons = " and ".join(THROTTLE_REASONS[reason] for reason in figures["reasons"])
    return f"The device's clock was lowered during the window: {reasons}."


def _others_on_device(figures: Mapping[str, Any]) -> str:
    held = format_bytes(figures["held_bytes"])
    sentence = f"Before the first trial other processes held {held} of the device's memory, which counts in every peak"
    if figures["busy_fraction"] is None:
        return f"{sentence}."
    busy = format_fraction(figures["busy_fraction"])
    return f"{sentence}, and kept it busy for {busy} of the time: rates are lower than on a device of its own."


DEVICES: dict[str, Wording] = {
    "clock_lowered": _clock_lowered,
    "clock_moved": "The device's clock moved from {first_mhz} to {last_mhz} MHz during the window.",
    "others_on_device": _others_on_device,
}
"""By code."""
