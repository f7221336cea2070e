"""What to do about it, the largest expected gain first: settings whose ceilings were measured, then remedies. Pure.

Comes in: an Evidence and its findings. Goes out: advice as codes with figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from autotune.analysis.forecast import expectation
from autotune.analysis.forecast.expectation import PINNING_KINDS
from autotune.analysis.forecast.job_forecast import Pair, expected_rates
from autotune.diagnosis.checkpointing import checkpoint_activations
from autotune.diagnosis.gains import LEAST_GAIN, advise, worth_giving
from autotune.diagnosis.remedies import list_remedies
from autotune.records.diagnosis import Advice, CurvePoint, Evidence, Finding
from autotune.records.run_summary import changed_settings, is_single

__all__ = ["rank_advice"]

_SAME_WITHIN = 0.02
"""Expected rates that differ by less count as equal: our own convention, a window's 95 % interval."""
_AMONG_WORKERS = frozenset({"in_order", "worker_threads"})
_Rated: TypeAlias = tuple[Pair, float]
"""A pair with the rate that is expected of it."""


def rank_advice(evidence: Evidence, findings: Sequence[Finding]) -> tuple[Advice, ...]:
    """Advice on settings by expected gain, then what lies outside of them; gains below 3 % are left out."""
    settings = _advise_settings(evidence, findings)
    best = max(map(_rate, settings), default=evidence.measurement.samples_per_s)
    remedies = [*list_remedies(evidence, findings, best_samples_per_s=best), *checkpoint_activations(evidence)]
    return (*settings, *worth_giving(remedies))


def _advise_settings(evidence: Evidence, findings: Sequence[Finding]) -> list[Advice]:
    """The loader's settings, each setting of the device, and both sides together where that gains 3 % on top."""
    loaders: list[Pair] = [(point, None) for point in expectation.advisable_points(evidence, "loader")]
    devices: list[Pair] = [(None, point) for point in expectation.advisable_points(evidence, "device")]
    both = [(loader, device) for loader, _ in loaders for _, device in devices]
    pairs = [*devices, *loaders, *both]
    rated = list(zip(pairs, expected_rates(evidence, pairs), strict=True))
    of_loaders = rated[len(devices) : len(devices) + len(loaders)]
    singles = [_best(evidence, of_loaders, cost=lambda workers, changes: (workers, changes))]
    singles += _best_of_each_setting(evidence, rated[: len(devices)])
    singles += _of_workers(evidence, of_loaders)
    worth = worth_giving([*_apart(filter(None, singles)), *_pin_memory(evidence, findings)])
    most = max(map(_rate, worth), default=0.0)
    together = _best(evidence, rated, cost=lambda workers, changes: (changes, workers))
    if together is not None and _rate(together) >= (1 + LEAST_GAIN) * most:
        worth.append(together)
    return worth_giving(worth)


def _best(evidence: Evidence, rated: Sequence[_Rated], *, cost: Callable[[int, int], tuple[int, int]]) -> Advice | None:
    """The pair of the best expected rate; of equal pairs the one of the lowest cost in workers and changed settings."""
    if not rated:
        return None

    def cost_of(one: _Rated) -> tuple[int, int]:
        changes = sum(len(point.changes) for point in one[0] if point is not None)
        return cost(expectation.apply_changes(evidence, *one[0]).num_workers, changes)

    best = max(rate for _, rate in rated)
    return _advice(evidence, *min((one for one in rated if one[1] >= (1 - _SAME_WITHIN) * best), key=cost_of))


def _of_workers(evidence: Evidence, rated: Sequence[_Rated]) -> Iterator[Advice]:
    """What holds workers up, each by itself: their order, and their threads."""
    for (loader, _), rate in rated:
        if loader is not None and len({*loader.changes} & _AMONG_WORKERS) == 1 and "num_workers" not in loader.changes:
            yield _advice(evidence, (loader, None), rate)


def _apart(advice: Iterable[Advice]) -> list[Advice]:
    """Advice without what was given already."""
    found = list[Advice]()
    for piece in advice:
        if all(piece.settings != known.settings for known in found):
            found.append(piece)
    return found


def _best_of_each_setting(evidence: Evidence, rated: Sequence[_Rated]) -> Iterator[Advice]:
    """For each device setting alone, the value of the best expected rate."""
    best = dict[str, _Rated]()
    for (loader, device), rate in rated:
        if device is not None and is_single(device.changes):
            name = next(iter(device.changes))
            if name not in best or rate > best[name][1]:
                best[name] = (loader, device), rate
    yield from (_advice(evidence, *one) for one in best.values())


def _advice(evidence: Evidence, pair: Pair, expected: float) -> Advice:
    ceilings = {
        f"{side}_samples_per_s": point.ceiling.samples_per_s
        for side, point in zip(("loader", "device"), pair, strict=True)
        if point is not None and point.ceiling is not None
    }
    changed = changed_settings(expectation.apply_changes(evidence, *pair), evidence.config)
    settings = {name: after for name, (_, after) in changed.items()}
    return advise("set", evidence.measurement.samples_per_s, expected, settings, **ceilings)


def _pin_memory(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Copies from page-locked memory are faster, and leave the host free, but follow the kernels before them.

    What they should win follows from both copies' ceilings, by the model that a search proposes by; where these were
    not measured, and copies take a tenth of the time, from what a batch's copies cost.
    Source: pytorch.org, "Use pinned memory buffers" (CUDA semantics).
    """
    if evidence.config.pin_memory or evidence.environment.device_kind not in PINNING_KINDS:
        return
    present, settings = evidence.measurement.samples_per_s, {"pin_memory": True}
    known = expectation.copy_ceilings(evidence)
    if known.keys() == {False, True}:
        if known[True] <= known[False]:
            return
        pinned = CurvePoint(changes={"pin_memory": True}, ceiling=None)
        (expected,) = expected_rates(evidence, [(pinned, None)])
        pageable, faster = known[False], known[True]
        most = min(expectation.loader_ceiling(evidence), expectation.device_ceiling(evidence), faster)
        expected = min(expected, max(present, most))  # even if all of it is hidden
        yield advise(
            "pin_memory", present, expected, settings, pageable_samples_per_s=pageable, pinned_samples_per_s=faster
        )
        return
    copy = next((finding for finding in findings if finding.bottleneck == "copy"), None)
    if copy is None:
        return
    costs, saved, times = evidence.measurement.loader_costs, 1.0, {}  # all of it at most, where not measured
    if costs is not None and costs.copy_s and costs.pinned_copy_s is not None:
        saved = max(0.0, 1.0 - costs.pinned_copy_s / costs.copy_s)
        times = {"copy_s": costs.copy_s, "pinned_copy_s": costs.pinned_copy_s}
    expected = expectation.rate_without(evidence, saved * copy.share)
    yield advise("pin_memory", present, expected, settings, share=copy.share, **times)


def _rate(advice: Advice) -> float:
    return advice.expected_samples_per_s or 0.0
