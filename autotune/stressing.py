"""The last check of a recommendation: the winner trained for some seconds on the largest samples, under the limit.

Takes a Tuning and the trial to check; leaves the figures, or what speaks against the trial, in the Tuning. Composition,
like confirm, from which alone it is called.
"""

from __future__ import annotations

from autotune.core.phrasing import say_mib
from autotune.core.stress import StressFigures
from autotune.core.trial import TrialRecord
from autotune.protocol import WindowRules
from autotune.tune import Tuning

__all__ = ["MOST_STRESSED", "reserve_s", "say_stressed", "stress"]

MOST_STRESSED = 3
"""Configurations that are tried one after the other, until one stays within the limit."""
_STRESS_S = 5.0
_SHORTEST_STRESS_S = 1.0
_LOOK_S = 2.0  # how long the worker looks for the largest samples
_DEADLINE_FACTOR = 10.0
_MIN_DEADLINE_S = 30.0
_RESERVED_SHARE = 0.25
_REFUTING = frozenset({"oom", "host_oom"})
"""A crash is none: a model may well assert what a batch of the largest samples alone breaks."""


def reserve_s(record: TrialRecord, left_s: float) -> float:
    """Seconds of those left that the confirmation leaves to a stress run of a configuration."""
    return min(_STRESS_S + _overhead_s(record), _RESERVED_SHARE * left_s)


def stress(tuning: Tuning, record: TrialRecord) -> None:
    """Run a trial's configuration on the largest samples; a note says what speaks against it, or why it was not run."""
    left = tuning.timing.clock.left_s
    window_s = _STRESS_S if left is None else min(_STRESS_S, left - _overhead_s(record))
    name = f"Trial {record.number}"
    if window_s < _SHORTEST_STRESS_S:
        tuning.notes.append(f"{name} was not run on the largest samples: no time was left.")
        return
    deadline_s = max(_DEADLINE_FACTOR * record.result.wall_s, _MIN_DEADLINE_S)
    report = tuning.runner.stress(
        record.config,
        name=f"stress-{record.number:03d}",
        deadline_s=deadline_s if left is None else min(deadline_s, left),
        window=WindowRules(max_s=window_s),
    )
    against = _against(tuning, report.result.outcome, report.result.reason, report.stress)
    if against is not None:
        tuning.overloaded[record.number] = against
        tuning.notes.append(f"{name} is not recommended, since it failed on the largest samples: {against}")
    elif report.stress is not None:
        tuning.stresses[record.number] = report.stress
        if report.stress.remark:
            tuning.notes.append(f"{name}, run once more: {report.stress.remark}")
    else:
        tuning.notes.append(f"{name} could not be run on the largest samples: {report.result.reason}")


def say_stressed(figures: StressFigures, limit_bytes: int) -> str:
    """What a run on the largest samples has shown, in a sentence."""
    peak = f"peak {say_mib(figures.memory.peak_bytes)} of {say_mib(limit_bytes)}"
    if figures.remark:
        return f"Ran {figures.seconds:.0f} s more ({figures.steps} steps): {peak}."
    return f"Ran {figures.seconds:.0f} s more on the largest of {figures.items_seen:,} samples seen: {peak}."


def _against(tuning: Tuning, outcome: str, reason: str, figures: StressFigures | None) -> str | None:
    """What refutes a configuration. That it took too long, or could not be tried, does not."""
    if outcome in _REFUTING:
        return reason
    if figures is None or figures.memory.peak_bytes <= tuning.limit_bytes:
        return None
    return (
        f"peak memory must stay within {say_mib(tuning.limit_bytes)}, but was {say_mib(figures.memory.peak_bytes)} in "
        f"{figures.steps} steps with samples of up to {figures.largest_item_bytes:,} bytes "
        f"(median {figures.median_item_bytes:,.0f}, of {figures.items_seen:,} seen)"
    )


def _overhead_s(record: TrialRecord) -> float:
    """What a stress run takes beyond its window: the look at samples, and what a trial takes beyond its own."""
    window = 0.0 if record.measurement is None else sum(block.seconds for block in record.measurement.blocks)
    return _LOOK_S + max(0.0, record.result.own_s - window)
