"""What to do about it, the largest expected gain first: settings whose ceilings were measured, then remedies. Pure.

Comes in: an Evidence and its findings. Goes out: advice as codes with figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import exp
from typing import NamedTuple

from autotune.analysis.forecast import expectation
from autotune.analysis.forecast.expectation import PINNING_KINDS
from autotune.analysis.forecast.job_forecast import Pair, expected_rates
from autotune.analysis.statistics import NORMAL_95
from autotune.diagnosis.checkpointing import checkpoint_activations
from autotune.diagnosis.gains import LEAST_GAIN, advise, worth_giving
from autotune.diagnosis.remedies import list_remedies
from autotune.records.diagnosis import Advice, CurvePoint, Evidence, Finding
from autotune.records.run_summary import changed_settings, is_single

__all__ = ["rank_advice"]

_SAME_WITHIN = 0.02
"""Expected rates that differ by less count as equal, as do those that differ by less than the error of their ceilings:
our own convention, a window's 95 % interval."""
_AMONG_WORKERS = frozenset({"in_order", "worker_threads"})


class _Rated(NamedTuple):
    """A pair with what is expected of it."""

    pair: Pair
    rate: float
    """The expected rate, in samples per second."""
    at_least: float
    """The rate that remains where the pair's own ceilings are too high by their 95 % error."""


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
    rated = _beyond_error(evidence, pairs)
    of_loaders = [one for one in rated if one.pair[1] is None]
    of_devices = [one for one in rated if one.pair[0] is None]
    singles = [_best(evidence, of_loaders, cost=lambda workers, changes: (workers, changes))]
    singles += _best_of_each_setting(evidence, of_devices)
    singles += _of_workers(evidence, of_loaders)
    worth = worth_giving([*_apart(filter(None, singles)), *_pin_memory(evidence, findings)])
    most = max(map(_rate, worth), default=0.0)
    together = _best(evidence, rated, cost=lambda workers, changes: (changes, workers))
    if together is not None and _rate(together) >= (1 + LEAST_GAIN) * most:
        worth.append(together)
    return worth_giving(worth)


def _beyond_error(evidence: Evidence, pairs: Sequence[Pair]) -> list[_Rated]:
    """Rate pairs, and leave out those whose gain is within the error of their own ceilings.

    A loader that pauses, or whose workers deliver in bursts, may have a ceiling that tells nothing: on an H200 32
    workers were 5.7 % above 16, with a relative error of 2.2.
    """
    found = list[_Rated]()
    for pair, rate in zip(pairs, expected_rates(evidence, pairs), strict=True):
        at_least = rate * _share_beyond_error(evidence, pair)
        if at_least > evidence.measurement.samples_per_s:
            found.append(_Rated(pair, rate, at_least))
    return found


def _share_beyond_error(evidence: Evidence, pair: Pair) -> float:
    """Return the share of a pair's rate that remains where its ceilings are too high by their error.

    An error of the side that is ample hardly counts. That a setting is as today adds no error.
    """
    measured = [expectation.loader_ceiling(evidence), expectation.device_ceiling(evidence)]
    lower = list(measured)
    for side, point in enumerate(pair):
        if point is not None and point.ceiling is not None:
            measured[side] = point.ceiling.samples_per_s
            lower[side] = measured[side] * exp(-NORMAL_95 * (point.ceiling.relative_sd or 0.0))
    return expectation.join_rates(evidence, *lower) / expectation.join_rates(evidence, *measured)


def _best(evidence: Evidence, rated: Sequence[_Rated], *, cost: Callable[[int, int], tuple[int, int]]) -> Advice | None:
    """The pair of the lowest cost in workers and changed settings of those that no other is known to beat."""
    if not rated:
        return None

    def cost_of(one: _Rated) -> tuple[int, int]:
        changes = sum(len(point.changes) for point in one.pair if point is not None)
        return cost(expectation.apply_changes(evidence, *one.pair).num_workers, changes)

    least = max(min(one.at_least, (1 - _SAME_WITHIN) * one.rate) for one in rated)
    chosen = min((one for one in rated if one.rate >= least), key=cost_of)
    return _advice(evidence, chosen.pair, chosen.rate)


def _of_workers(evidence: Evidence, rated: Sequence[_Rated]) -> Iterator[Advice]:
    """What holds workers up, each by itself: their order, and their threads."""
    for (loader, _), rate, _ in rated:
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
    for one in rated:
        _, device = one.pair
        if device is not None and is_single(device.changes):
            name = next(iter(device.changes))
            if name not in best or one.rate > best[name].rate:
                best[name] = one
    yield from (_advice(evidence, one.pair, one.rate) for one in best.values())


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
