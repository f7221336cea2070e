"""What to do about it, the largest expected gain first: settings whose ceilings were measured, then remedies. Pure.

Comes in: an Evidence and its findings. Goes out: advice as codes with figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from autotune.analysis import expectation
from autotune.analysis.expectation import PINNING_KINDS
from autotune.diagnosis.gains import LEAST_GAIN, advise, worth_giving
from autotune.diagnosis.remedies import list_remedies
from autotune.records.diagnosis import Advice, CurvePoint, Evidence, Finding
from autotune.records.run_summary import changed_settings

__all__ = ["rank_advice"]

_SAME_WITHIN = 0.02
"""Expected rates that differ by less count as equal: our own convention, a window's 95 % interval."""

_Pair: TypeAlias = tuple[CurvePoint | None, CurvePoint | None]
"""A point of the loader's curve and one of the device's; None: as today."""


def rank_advice(evidence: Evidence, findings: Sequence[Finding]) -> tuple[Advice, ...]:
    """Advice on settings by expected gain, then what lies outside of them; gains below 3 % are left out."""
    settings = _advise_settings(evidence, findings)
    best = max(map(_rate, settings), default=evidence.measurement.samples_per_s)
    return (*settings, *worth_giving(list_remedies(evidence, findings, best_samples_per_s=best)))


def _advise_settings(evidence: Evidence, findings: Sequence[Finding]) -> list[Advice]:
    """The loader's settings, each setting of the device, and both sides together where that gains 3 % on top."""
    loaders: list[_Pair] = [(point, None) for point in expectation.advisable_points(evidence, "loader")]
    devices: list[_Pair] = [(None, point) for point in expectation.advisable_points(evidence, "device")]
    both = [(loader, device) for loader, _ in loaders for _, device in devices]
    singles = [_best(evidence, loaders, cost=lambda workers, changes: (workers, changes))]
    singles += _best_of_each_setting(evidence)
    worth = worth_giving([*filter(None, singles), *_pin_memory(evidence, findings)])
    most = max(map(_rate, worth), default=0.0)
    together = _best(evidence, [*devices, *loaders, *both], cost=lambda workers, changes: (changes, workers))
    if together is not None and _rate(together) >= (1 + LEAST_GAIN) * most:
        worth.append(together)
    return worth_giving(worth)


def _best(evidence: Evidence, pairs: Sequence[_Pair], *, cost: Callable[[int, int], tuple[int, int]]) -> Advice | None:
    """The pair of the best expected rate; of equal pairs the one of the lowest cost in workers and changed settings."""
    rates = [(pair, expectation.expected_rate(evidence, *pair)) for pair in pairs]
    if not rates:
        return None

    def cost_of(pair: _Pair) -> tuple[int, int]:
        changes = sum(len(point.changes) for point in pair if point is not None)
        return cost(expectation.apply_changes(evidence, *pair).num_workers, changes)

    best = max(rate for _, rate in rates)
    return _advice(evidence, min((pair for pair, rate in rates if rate >= (1 - _SAME_WITHIN) * best), key=cost_of))


def _best_of_each_setting(evidence: Evidence) -> Iterator[Advice]:
    """For each device setting alone, the value of the best expected rate."""
    points = [point for point in expectation.advisable_points(evidence, "device") if len(point.changes) == 1]
    for name in dict.fromkeys(name for point in points for name in point.changes):
        yield max((_advice(evidence, (None, point)) for point in points if name in point.changes), key=_rate)


def _advice(evidence: Evidence, pair: _Pair) -> Advice:
    ceilings = {
        f"{side}_samples_per_s": point.ceiling.samples_per_s
        for side, point in zip(("loader", "device"), pair, strict=True)
        if point is not None and point.ceiling is not None
    }
    changed = changed_settings(expectation.apply_changes(evidence, *pair), evidence.config)
    settings = {name: after for name, (_, after) in changed.items()}
    present, expected = evidence.measurement.samples_per_s, expectation.expected_rate(evidence, *pair)
    return advise("set", present, expected, settings, **ceilings)


def _pin_memory(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Copies from page-locked memory are faster, but still don't overlap with computing.

    Source: pytorch.org, "Use pinned memory buffers" (CUDA semantics).
    """
    copy = next((finding for finding in findings if finding.bottleneck == "copy"), None)
    if copy is None or evidence.config.pin_memory or evidence.environment.device_kind not in PINNING_KINDS:
        return
    costs, saved, times = evidence.measurement.loader_costs, 1.0, {}  # all of it at most, where not measured
    if costs is not None and costs.copy_s and costs.pinned_copy_s is not None:
        saved = max(0.0, 1.0 - costs.pinned_copy_s / costs.copy_s)
        times = {"copy_s": costs.copy_s, "pinned_copy_s": costs.pinned_copy_s}
    expected = expectation.rate_without(evidence, saved * copy.share)
    present, settings = evidence.measurement.samples_per_s, {"pin_memory": True}
    yield advise("pin_memory", present, expected, settings, share=copy.share, **times)


def _rate(advice: Advice) -> float:
    return advice.expected_samples_per_s or 0.0
