"""Words for codes that records hold, where both messages and reports need them."""

from __future__ import annotations

__all__ = ["OUTCOMES", "THROTTLE_REASONS"]

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
