"""The last check of a recommendation: the winner trained for some seconds on the largest samples, under the limit.

Takes a Tuning and the trial to check; leaves the figures, or what speaks against the trial, in the Tuning. Composition,
like confirm, from which alone it is called.
"""

from __future__ import annotations

from math import inf

from autotune.analysis.durations import overhead_s
from autotune.phrasing import say_mib
from autotune.protocol.messages import RankReport, WindowRules
from autotune.records.stress_check import STRESS_S, StressFigures, load_of, look_s
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.tuning.loop import Tuning

__all__ = ["MOST_STRESSED", "reserve_s", "say_stressed", "stress"]

MOST_STRESSED = 3
"""Configurations that are tried one after the other, until one stays within the limit."""
_SHORTEST_STRESS_S = 1.0
_DEADLINE_FACTOR = 10.0
_MIN_DEADLINE_S = 30.0
_RESERVED_SHARE = 0.25
_REFUTING = frozenset({"oom", "host_oom"})
"""A crash is none: a model may well assert what a batch of the largest samples alone breaks."""


def reserve_s(record: TrialRecord, left_s: float) -> float:
    """Seconds of those left that the confirmation leaves to a stress run of a configuration."""
    return min(STRESS_S + overhead_s(record) + look_s(inf), _RESERVED_SHARE * left_s)


def stress(tuning: Tuning, record: TrialRecord) -> None:
    """Run a trial's configuration on the largest samples; a note says what speaks against it, or why it was not run."""
    left = tuning.timing.clock.left_s
    window_s = STRESS_S if left is None else min(STRESS_S, left - overhead_s(record) - look_s(left))
    name = f"Trial {record.number}"
    if window_s < _SHORTEST_STRESS_S:
        tuning.notes.append(f"{name} was not run on the largest samples: no time was left.")
        return
    deadline_s = max(_DEADLINE_FACTOR * record.result.wall_s, _MIN_DEADLINE_S) + window_s
    report = tuning.runner.stress(
        record.config,
        name=f"stress-{record.number:03d}",
        deadline_s=deadline_s if left is None else min(deadline_s, left),
        window=WindowRules(max_s=window_s),
    )
    against = _against(tuning, record.config, report)
    if against is not None:
        tuning.overloaded[record.number] = against
        tuning.notes.append(f"{name} is not recommended, since it failed on the largest samples: {against}")
    elif report.stress is not None:
        tuning.stresses[record.number] = report.stress
        if report.stress.remark:
            cause = report.stress.remark.figures["cause"]
            tuning.notes.append(f"{name}, run once more: The largest samples can't be put into one batch ({cause}).")
        if report.stress.memory.is_thrashing:
            tuning.notes.append(
                f"{name} fits on the largest samples, but not with ease: the allocator had to give back what it held "
                f"{report.stress.memory.alloc_retries} times in {report.stress.steps - 1} steps after the first, and "
                "waits for the device each time; a smaller micro batch would spare that."
            )
        load = load_of(report.stress, record.config, tuning.space.environment, tuning.space.facts)
        if load.peak_bytes > tuning.limit_bytes:
            tuning.notes.append(
                f"{name} may take up to {say_mib(load.peak_bytes)} of {say_mib(tuning.limit_bytes)} on the largest "
                f"samples, less where its {load.ranks} ranks share memory: watch it in its first epoch."
            )
    else:
        tuning.notes.append(f"{name} could not be run on the largest samples: {report.result.reason}")


def say_stressed(tuning: Tuning, config: TrainingConfig, figures: StressFigures) -> str:
    """What a run of settings on the largest samples has shown, in a sentence."""
    load = load_of(figures, config, tuning.space.environment, tuning.space.facts)
    ran = " ".join(filter(None, (f"Ran {figures.seconds:.0f} s more", load.where)))
    what = f"({figures.steps} steps)" if figures.remark else f"on the largest of {figures.items_seen:,} samples seen"
    peak, limit = say_mib(load.own_bytes), say_mib(tuning.limit_bytes)
    of = f", that is up to {say_mib(load.peak_bytes)} of {limit} for {load.bearer}" if load.is_more else f" of {limit}"
    return f"{ran} {what}: peak {peak}{of}."


def _against(tuning: Tuning, config: TrainingConfig, report: RankReport) -> str | None:
    """What refutes a configuration. That it took too long, or could not be tried, does not."""
    figures = report.stress
    if report.result.outcome in _REFUTING:
        return report.result.reason
    if figures is None:
        return None
    load = load_of(figures, config, tuning.space.environment, tuning.space.facts)
    if load.least_bytes <= tuning.limit_bytes:
        return None
    whole = f" {load.where}, that is up to {say_mib(load.peak_bytes)} for {load.bearer}," if load.is_more else ""
    return (
        f"peak memory must stay within {say_mib(tuning.limit_bytes)}, but was {say_mib(load.own_bytes)}{whole} in "
        f"{figures.steps} steps with samples of up to {figures.largest_item_bytes:,} bytes "
        f"(median {figures.median_item_bytes:,.0f}, of {figures.items_seen:,} seen)"
    )
