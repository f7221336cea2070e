"""Loader settings that contradict each other on any machine, with any workload.

Comes in: the settings that the rule is about. Goes out: the rule, the values and the remedy, or None. Contradictions of
the other settings stand in training_config, and what depends on the machine or the workload in space/constraints.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NEUTRAL_WITHOUT_WORKERS", "loader_contradiction"]

NEUTRAL_WITHOUT_WORKERS: dict[str, object] = {"prefetch_factor": None, "persistent_workers": False, "in_order": True}
"""Settings that only loader workers use, and the one value of each without workers."""


def loader_contradiction(num_workers: int, settings: Mapping[str, object]) -> str | None:
    """Why a DataLoader can't have these settings, by their names, with so many workers; None where it can."""
    for name, neutral in NEUTRAL_WITHOUT_WORKERS.items():
        if num_workers == 0 and settings[name] != neutral:
            return (
                f"{name} needs loader workers, but got num_workers=0 and {name}={settings[name]}; leave {name} out or "
                "set num_workers"
            )
    return None
