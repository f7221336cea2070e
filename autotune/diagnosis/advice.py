"""What to do about it: settings with the gain to be expected from each, computed from measured ceilings. Pure.

Takes an Evidence and its findings; hands on advice, the largest gain first. What no setting does stands behind
(`core.remedies`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.analysis.expectation import (
    PINNING_KINDS,
    apply_changes,
    device_options,
    expected_rate,
    loader_options,
    rate_without,
)
from autotune.diagnosis.remedies import list_remedies
from autotune.phrasing import say_rate, say_seconds, say_settings, say_share
from autotune.records.diagnosis import Advice, CurvePoint, Evidence, Finding
from autotune.records.run_summary import changed_settings

__all__ = ["LEAST_GAIN", "rank_advice"]

LEAST_GAIN = 0.03
"""Expected gain below which nothing is advised: our own convention, what a run may lie beside others of the same
settings on a CPU (1.96 * RUN_SPREAD)."""
_SAME_WITHIN = 0.02
"""Expected rates that differ by less are the same: the fewest workers win."""
_CAUTIONS = {
    "micro_batch_size": "the learning rate has to follow the batch",
    "amp_dtype": "check that the loss still falls as before",
}


def rank_advice(evidence: Evidence, findings: Sequence[Finding]) -> tuple[Advice, ...]:
    """Advice on settings by expected gain, then what no setting does; less than 3 % is left out."""
    settings = sorted(_settings_advice(evidence, findings), key=_gain, reverse=True)
    best = max((one.expected_samples_per_s or 0.0 for one in settings), default=evidence.measurement.samples_per_s)
    remedies = sorted(list_remedies(evidence, findings, best_samples_per_s=best), key=_gain, reverse=True)
    return (*settings, *(one for one in remedies if one.expected_gain is None or one.expected_gain >= LEAST_GAIN))


def _settings_advice(evidence: Evidence, findings: Sequence[Finding]) -> list[Advice]:
    loader = _best_loader(evidence)
    devices = _best_of_each_setting(evidence)
    singles = [(loader, None)] if loader is not None else []
    found = [_advice(evidence, *pair) for pair in [*singles, *((None, device) for device in devices)]]
    pinned = _pin(evidence, findings)
    worth = [one for one in [*found, pinned] if one is not None and _gain(one) >= LEAST_GAIN]
    together = _together(evidence)
    if together is not None and _gain(together) >= LEAST_GAIN:
        best = max((one.expected_samples_per_s or 0.0 for one in worth), default=0.0)
        if (together.expected_samples_per_s or 0.0) >= (1 + LEAST_GAIN) * best:
            worth.append(together)
    return worth


def _best_loader(evidence: Evidence) -> CurvePoint | None:
    """The loader settings of the best expected rate; among equals the fewest workers."""
    rates = [(point, expected_rate(evidence, point, None)) for point in loader_options(evidence)]
    if not rates:
        return None
    best = max(rate for _, rate in rates)
    equal = [point for point, rate in rates if rate >= (1 - _SAME_WITHIN) * best]
    return min(equal, key=lambda point: (apply_changes(evidence, point).num_workers, len(point.changes)))


def _best_of_each_setting(evidence: Evidence) -> list[CurvePoint]:
    """For each device setting alone, the value of the best expected rate."""
    best: dict[tuple[str, ...], tuple[float, CurvePoint]] = {}
    for point in device_options(evidence):
        names, rate = tuple(point.changes), expected_rate(evidence, None, point)
        if len(names) == 1 and (names not in best or rate > best[names][0]):
            best[names] = rate, point
    return [point for _, point in best.values()]


def _together(evidence: Evidence) -> Advice | None:
    """The best pair of a loader's and a device's point; among equals the one that changes least."""
    loaders = [None, *loader_options(evidence)]
    devices = [None, *device_options(evidence)]
    pairs = [(loader, device) for loader in loaders for device in devices if device is not None or loader is not None]
    rates = [(expected_rate(evidence, *pair), pair) for pair in pairs]
    if not rates:
        return None
    best = max(rate for rate, _ in rates)
    equal = [pair for rate, pair in rates if rate >= (1 - _SAME_WITHIN) * best]
    return _advice(evidence, *min(equal, key=lambda pair: _effort(evidence, *pair)))


def _effort(evidence: Evidence, loader: CurvePoint | None, device: CurvePoint | None) -> tuple[int, int]:
    changes = sum(len(point.changes) for point in (loader, device) if point is not None)
    return changes, apply_changes(evidence, loader, device).num_workers


def _advice(evidence: Evidence, loader: CurvePoint | None, device: CurvePoint | None) -> Advice:
    config = apply_changes(evidence, loader, device)
    settings = {name: after for name, (_, after) in changed_settings(config, evidence.config).items()}
    expected, present = expected_rate(evidence, loader, device), evidence.measurement.samples_per_s
    cautions = [_CAUTIONS[name] for name in settings if name in _CAUTIONS]
    text = f"Set {say_settings(settings)}" + (f" ({'; '.join(cautions)})" if cautions else "")
    sides = {"the loader alone": loader, "the device alone": device}
    measured = [
        f"{name} reaches {say_rate(point.ceiling.samples_per_s)} with it"
        for name, point in sides.items()
        if point is not None and point.ceiling is not None
    ]
    return Advice(
        text=text,
        settings=settings,
        expected_samples_per_s=expected,
        expected_gain=expected / present - 1.0,
        basis=", ".join(measured),
    )


def _pin(evidence: Evidence, findings: Sequence[Finding]) -> Advice | None:
    """Copies from page-locked memory are faster; they still take turns with what the device computes.

    Source: pytorch.org, "Use pinned memory buffers" (CUDA semantics).
    """
    copy = next((one for one in findings if one.bottleneck == "copy"), None)
    if copy is None or evidence.config.pin_memory or evidence.environment.device_kind not in PINNING_KINDS:
        return None
    saved, times = _saved_by_pinning(evidence)
    present, expected = evidence.measurement.samples_per_s, rate_without(evidence, saved * copy.share)
    return Advice(
        text="Set pin_memory=True: copies from page-locked memory are faster, and the host does not wait for them",
        settings={"pin_memory": True},
        expected_samples_per_s=expected,
        expected_gain=expected / present - 1.0,
        basis=f"{times}; the copies that nothing hides take {say_share(copy.share)} of the time",
    )


def _saved_by_pinning(evidence: Evidence) -> tuple[float, str]:
    """The share of a copy's time that page-locked memory saves, and the figures; all of it where nobody measured."""
    costs = evidence.measurement.loader_costs
    if costs is None or not costs.copy_s or costs.pinned_copy_s is None:
        return 1.0, "at most, since copies from page-locked memory were not measured"
    said = f"a batch's copy takes {say_seconds(costs.pinned_copy_s)} from it instead of {say_seconds(costs.copy_s)}"
    return max(0.0, 1.0 - costs.pinned_copy_s / costs.copy_s), said


def _gain(advice: Advice) -> float:
    return -1.0 if advice.expected_gain is None else advice.expected_gain
