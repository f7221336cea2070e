"""What to do about it, the largest expected gain first: settings whose ceilings were measured, then remedies. Pure.

Comes in: an Evidence and its findings. Goes out: advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import exp, inf
from typing import NamedTuple

from autotune.analysis.forecast import expectation
from autotune.analysis.forecast.expectation import PINNING_KINDS
from autotune.analysis.forecast.job_forecast import Pair, expected_rates
from autotune.analysis.forecast.observations import AMONG_WORKERS
from autotune.analysis.statistics import NORMAL_95
from autotune.diagnosis.checkpointing import checkpoint_activations
from autotune.diagnosis.gains import LEAST_GAIN, advise, worth_giving
from autotune.diagnosis.remedies import list_remedies
from autotune.messages import advice as messages
from autotune.policy import POLICY
from autotune.records.breakdown import LoaderCosts
from autotune.records.diagnosis import Advice, CurvePoint, Evidence, Finding
from autotune.records.run_summary import changed_settings, is_single
from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules
from autotune.space.default_ranges import most_workers

__all__ = ["rank_advice"]

_SAME_WITHIN = 0.02
"""Expected rates that differ by less count as equal, as do those that differ by less than the error of their ceilings:
our own convention, a window's 95 % interval."""


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
    measured = [piece for piece in settings if piece.kind != "add_workers"]
    best = max(map(_rate, measured), default=evidence.measurement.samples_per_s)
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
    computed = (*_pin_memory(evidence, findings), *_more_workers(evidence, findings))
    worth = worth_giving([*_apart(filter(None, singles)), *computed])
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
        if (
            loader is not None
            and len({*loader.changes} & {*AMONG_WORKERS}) == 1
            and "num_workers" not in loader.changes
        ):
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
    changed = changed_settings(expectation.apply_changes(evidence, *pair), evidence.config)
    loader, device = (None if point is None or point.ceiling is None else point.ceiling for point in pair)
    words = messages.set(
        settings={name: after for name, (_, after) in changed.items()},
        loader_samples_per_s=None if loader is None else loader.samples_per_s,
        device_samples_per_s=None if device is None else device.samples_per_s,
    )
    return advise(words, evidence.measurement.samples_per_s, expected)


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
        words = messages.pin_memory(settings=settings, pageable_samples_per_s=pageable, pinned_samples_per_s=faster)
        yield advise(words, present, expected)
        return
    copy = next((finding for finding in findings if finding.bottleneck == "copy"), None)
    if copy is None:
        return
    costs, saved = evidence.measurement.loader_costs, 1.0  # all of it at most, where not measured
    words = messages.pin_memory(settings=settings, share=copy.share)
    if costs is not None and costs.copy_s and costs.pinned_copy_s is not None:
        saved = max(0.0, 1.0 - costs.pinned_copy_s / costs.copy_s)
        words = messages.pin_memory(
            settings=settings, share=copy.share, copy_s=costs.copy_s, pinned_copy_s=costs.pinned_copy_s
        )
    yield advise(words, present, expectation.rate_without(evidence, saved * copy.share))


def _more_workers(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Advise workers up to the cores, where a loader bound by CPU work could not be measured with more than today's.

    Workers add up until the cores run out: the rate is what the model that a search proposes by expects, and no more
    than all cores or the device can make. Items that mostly wait are left out: only a measurement shows how far their
    waits overlap.
    """
    costs, own, environment = evidence.measurement.loader_costs, evidence.config, evidence.environment
    is_bound = any(finding.bottleneck == "data_cpu" for finding in findings)
    if costs is None or not is_bound or _has_tried_more_workers(evidence):
        return
    most = min(most_workers(evidence.facts, environment), rules.cores_within(own, environment))
    most //= rules.ranks_on_host(own.process_count, environment)
    counts = sorted({*(2**power for power in range(most.bit_length())), most} - {*range(own.num_workers + 1)})
    points = {count: CurvePoint(changes={"num_workers": count}, ceiling=None) for count in counts}
    configs = {count: expectation.apply_changes(evidence, point) for count, point in points.items()}
    pairs: dict[int, Pair] = {
        count: (point, None) for count, point in points.items() if _has_room(evidence, costs, configs[count])
    }
    if not pairs:
        return
    by_cores, device = expectation.cores_ceiling(evidence), expectation.device_ceiling(evidence)
    expected = [min(rate, by_cores, device) for rate in expected_rates(evidence, [*pairs.values()])]
    rates = dict(zip(pairs, expected, strict=True))
    enough = min(count for count, rate in rates.items() if rate >= (1 - _SAME_WITHIN) * max(expected))
    words = messages.add_workers(
        settings={"num_workers": enough},
        item_cpu_s=expectation.loader_cpu_s(evidence),
        num_workers=own.num_workers,
        cores=environment.cores,
        cores_samples_per_s=by_cores,
    )
    yield advise(words, evidence.measurement.samples_per_s, rates[enough])


def _has_tried_more_workers(evidence: Evidence) -> bool:
    """Return True where a loader with more workers than today was measured, or failed for another reason than time."""
    for point in evidence.curves.loader:
        workers = point.changes.get("num_workers", 0)
        if isinstance(workers, int) and workers > evidence.config.num_workers and not point.is_left_out:
            return True
    return False


def _has_room(evidence: Evidence, costs: LoaderCosts, config: TrainingConfig) -> bool:
    """Return True where the batches that the workers of all ranks hold ready fit into the free RAM, with room left."""
    ready = expectation.loader_processes(config) * config.batches_per_worker
    free_bytes = inf if evidence.free_ram_bytes is None else evidence.free_ram_bytes
    return ready * config.micro_batch_size * costs.item_bytes <= POLICY.trials.queue_share * free_bytes


def _rate(advice: Advice) -> float:
    return advice.expected_samples_per_s or 0.0
