"""Forecast the throughput of untried settings for a diagnosis, and the gain of bucketing and packing.

Comes in: a diagnosis's `Evidence`; lengths of items and timed steps. Goes out: ceilings of the
current settings, expected throughput of other settings, forecasts for bucketing and packing. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.config.environment import DeviceKind
from autotune.config.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.models.observations import (
    ConfiguredPoint,
    points_by_side,
    rate_observations,
    side_observation,
)
from autotune.models.throughput import RateModel
from autotune.models.throughput_law import joint_rate
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import overlaps
from autotune.records.measurement import BucketForecast, LengthStep, PackForecast
from autotune.records.result import CurvePoint, Evidence
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings_table import SETTINGS, Side
from autotune.space import constraints as rules

# Figures that a diagnosis derives from its evidence: ceilings, settings to advise,
# oversubscription.


DEVICE_SETTINGS = frozenset(setting.name for setting in SETTINGS if setting.is_in_curves)
"""Settings that a device's curve varies."""
PINNING_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm", "xpu"})
"""Devices with faster copies from page-locked memory."""
_MOST_SAVED_FRACTION = 0.95
"""Largest share of the wall time that can be saved: our own convention."""
_SEVERAL_THREADS = 1.5
"""Cores that an item keeps busy from which the diagnosis counts it as multithreaded: our own
convention. It is CPU time over wall time, and not what the policy's `cores_per_item` judges, the
probe's count of busy threads without waits."""
_LEAST_BUSY_SHARE = 0.01
"""Least share of the time without waiting for data from which a device's ceiling is derived: our
own convention."""


def loader_ceiling(evidence: Evidence) -> float:
    """Return the throughput of the loader alone; from the items' costs if not measured, infinite without them."""
    if evidence.measurement.loader_ceiling is not None:
        return evidence.measurement.loader_ceiling
    costs = evidence.measurement.loader_costs
    if costs is None:
        return inf
    sample_s = with_collating(evidence, costs, costs.item_s)
    return max(1, evidence.config.num_workers) / sample_s if sample_s > 0 else inf


def device_ceiling(evidence: Evidence) -> float:
    """Return the throughput of the device alone; if not measured, the run's without its waits, else infinite."""
    run = evidence.measurement
    if run.device_ceiling is None and run.data_wait_fraction is None:
        return inf
    busy_share = max(1.0 - (run.data_wait_fraction or 0.0), _LEAST_BUSY_SHARE)
    return run.device_ceiling or run.samples_per_s / busy_share


def copy_ceilings(evidence: Evidence) -> dict[bool, float]:
    """Return the measured throughput of copies alone, by `pin_memory`; for the current value, the run's."""
    own = evidence.config.pin_memory
    known = dict[bool, float]()
    for point in evidence.curves.copy:
        if point.ceiling is not None:
            is_pinned = bool(point.changes.get("pin_memory", own))
            known[is_pinned] = point.ceiling.samples_per_s
    if evidence.measurement.copy_ceiling is not None:
        known[own] = evidence.measurement.copy_ceiling
    return known


def loader_cpu_s(evidence: Evidence) -> float:
    """Return the loader's CPU seconds per sample: the item, and its share of collating the batch."""
    costs = evidence.measurement.loader_costs
    return 0.0 if costs is None else with_collating(evidence, costs, costs.item_cpu_s)


def with_collating(evidence: Evidence, costs: LoaderCosts, item_s: float) -> float:
    """Return the loader's seconds per sample: the item's, and its share of collating the batch."""
    return item_s + costs.collate_s / evidence.config.micro_batch_size


def device_cores(evidence: Evidence) -> float:
    """Return the cores that computing keeps busy at the device's ceiling, with the most economical threads."""
    if evidence.environment.device_kind != "cpu":
        return 0.0
    measured = [
        point.cpu_s_per_sample
        for point in evidence.curves.device
        if point.cpu_s_per_sample is not None and set(point.changes) <= {"intra_op_threads"}
    ]
    if measured:
        return min(measured) * device_ceiling(evidence)
    return float(min(threads_of(evidence), evidence.environment.cores))


def cores_ceiling(evidence: Evidence) -> float:
    """Return the throughput at which loading and computing keep all cores busy, with any number of workers.

    Infinite if the CPU time of neither is known.
    """
    sample_s = loader_cpu_s(evidence) + device_cores(evidence) / device_ceiling(evidence)
    return evidence.environment.cores / sample_s if sample_s > 0 else inf


def join_rates(evidence: Evidence, loader: float, device: float) -> float:
    """Return the joint throughput of a loader and a device, in samples/s, with the current settings."""
    is_overlapped = overlaps(evidence.config, evidence.environment.device_kind)
    return joint_rate(loader, device, is_overlapped=is_overlapped)


def advisable_points(evidence: Evidence, side: Literal["loader", "device"]) -> list[CurvePoint]:
    """Return the measured points of one side whose settings can be advised."""
    points: Sequence[CurvePoint] = getattr(evidence.curves, side)
    settings = set(LOADER_SETTINGS if side == "loader" else DEVICE_SETTINGS)
    found = list[CurvePoint]()
    for point in points:
        if point.ceiling is None or not point.changes or not set(point.changes) <= settings:
            continue
        config = apply_changes(evidence, point)
        obstacle = rules.obstacle(
            config, evidence.facts, evidence.environment, drop_last=evidence.drop_last
        )
        if obstacle is None:
            found.append(point)
    return found


def apply_changes(evidence: Evidence, *points: CurvePoint | None) -> TrainingConfig:
    """Return the current configuration with the points' changes."""
    settings = evidence.config.model_dump()
    for point in points:
        if point is not None:
            settings |= point.changes
    settings = rules.normalised(settings, evidence.facts, evidence.environment)
    return TrainingConfig.model_validate(settings)


def rate_without(evidence: Evidence, share: float) -> float:
    """Return the best throughput without this share of the time, bounded by the loader if it runs in parallel."""
    present = evidence.measurement.samples_per_s
    most = inf
    if overlaps(evidence.config, evidence.environment.device_kind):
        most = loader_ceiling(evidence)
    return max(present, min(present / (1.0 - min(share, _MOST_SAVED_FRACTION)), most))


def threads_of(evidence: Evidence) -> int:
    """Return the threads of one operation on the CPU: set, or chosen by torch in the curves, else one per core."""
    return evidence.config.intra_op_threads or evidence.curves.threads or evidence.environment.cores


def runs_too_many_threads(evidence: Evidence) -> bool:
    """Return whether a run on the CPU has more threads and workers than cores."""
    running = threads_of(evidence) + evidence.config.num_workers
    environment = evidence.environment
    return environment.device_kind == "cpu" and running > environment.cores


def workers_run_too_many_threads(evidence: Evidence) -> bool:
    """Return whether multithreaded items (OpenCV, NumPy) use more threads in all than there are cores."""
    costs = evidence.measurement.loader_costs
    loaders = loader_processes(evidence.config)
    if costs is None or costs.computing_cores <= _SEVERAL_THREADS:
        return False
    return costs.computing_cores * loaders > evidence.environment.cores


def loader_processes(config: TrainingConfig) -> int:
    """Return the number of processes that make items: all ranks' workers, or else the ranks themselves."""
    return max(1, config.num_workers) * config.process_count


# Expected throughput of other settings, by the model that a search proposes with.


Pair: TypeAlias = tuple[CurvePoint | None, CurvePoint | None]
"""A point of the loader's curve and one of the device's; None for the current settings."""


def expected_rates(evidence: Evidence, pairs: Sequence[Pair]) -> list[float]:
    """Return the expected throughput of runs with the changes of pairs, in samples/s.

    The forecast is that of a search after its curves. The current run's shortfall below both sides
    is expected to remain in part, less so with other threads.

    Args:
        evidence: The diagnosis's evidence.
        pairs: Points of the loader's and the device's curve.
    """
    configs = [apply_changes(evidence, *pair) for pair in pairs]
    if not configs:
        return []
    return [exp(log_rate) for log_rate in rate_model_of(evidence).forecast(configs).log_rate]


def rate_model_of(evidence: Evidence) -> RateModel:
    """Return the throughput model fitted to the curves and the current run."""
    kind = evidence.environment.device_kind
    # Curves are measured in one process on one device
    curves = list[ConfiguredPoint]()
    for side, points in points_by_side(evidence.curves):
        for point in points:
            config = apply_changes(evidence, point).model_copy(update=rules.SINGLE)
            curves.append(ConfiguredPoint(side=side, config=config, point=point))
    baseline = TrialRecord(
        number=0,
        config=evidence.config,
        results=(TrialResult(outcome="ok", measurement=evidence.measurement),),
    )
    seen = list(rate_observations(curves, [baseline], kind))

    # Sides that were not measured at the current settings, from what is known otherwise
    sides: tuple[tuple[Side, float], ...] = (
        ("loader", loader_ceiling(evidence)),
        ("device", device_ceiling(evidence)),
        ("copy", copy_ceilings(evidence).get(evidence.config.pin_memory, inf)),
    )
    own = {evidence.config, evidence.config.model_copy(update=rules.SINGLE)}
    known = {observation.kind for observation in seen if observation.config in own}
    seen += [
        side_observation(side, evidence.config, rate, kind)
        for side, rate in sides
        if side not in known and rate < inf
    ]
    return RateModel(seen, evidence.environment, evidence.run_variation)


# Bucketing: the gain of batches of similar lengths.
#
# Time is not assumed proportional to padded tokens: it is interpolated between batches timed at
# several lengths, so it includes the cost of attention. The resampling has a seed of its own.


_POOL_BATCHES = 50
"""Batches sorted by length at once. Source: the megabatches of transformers' LengthGroupedSampler
(trainer_pt_utils.py, get_length_grouped_indices), at most 50."""
_MOST_DRAWN = 16_384
"""Most items of a pool here; with large batches fewer of them are sorted at once, a smaller gain."""
_FEWEST_BATCHES = 2
"""Fewest batches of a pool: a single one would be a random batch."""
RESAMPLES = 200
"""Resamples, enough for the ends of a 95 % interval: our own convention."""


def forecast_buckets(
    lengths: Sequence[int],
    batch_samples: int,
    current_padding: Sequence[int],
    steps: Sequence[LengthStep],
    *,
    dataset_length: int | None = None,
) -> BucketForecast:
    """Compare batches of similar lengths with random ones, and with the current ones.

    Args:
        lengths: Lengths of random items, at least one.
        batch_samples: Samples of a batch.
        current_padding: Padded lengths of the loader's current batches.
        steps: Timed batches of `batch_samples` each; the forecast has a time if there are two
            lengths.
        dataset_length: Samples of an epoch, of which a pool takes at most a quarter; None if
            unknown.
    """
    chance = np.random.default_rng(0)
    items = np.asarray(lengths, dtype=np.int64)
    today = np.asarray(current_padding, dtype=np.float64)
    pool = min(_POOL_BATCHES, max(_FEWEST_BATCHES, _MOST_DRAWN // batch_samples))
    if dataset_length is not None:
        # By the same source, at least four pools per epoch
        pool = max(1, min(pool, dataset_length // (4 * batch_samples)))
    padding = list[tuple[float, float]]()
    ratios = list[float]()
    has_two_lengths = len({step.padded for step in steps}) >= 2  # a line needs them
    is_timed = has_two_lengths and len(today) > 0
    for _ in range(RESAMPLES):
        # A pool of resampled items, in random and in sorted batches
        own = chance.choice(items, size=len(items))
        is_enough = len(own) >= pool * batch_samples
        drawn = chance.choice(own, size=pool * batch_samples, replace=not is_enough)
        drawn = drawn.reshape(pool, batch_samples)
        sorted_rows = np.sort(drawn, axis=None).reshape(pool, batch_samples)
        padding.append((_padding(drawn), _padding(sorted_rows)))

        # Their time, over that of resampled current batches
        if is_timed:
            time = StepTimes(steps, chance)
            now = time.of_padded(chance.choice(today, size=len(today))).mean()
            ratios.append(float(time.of_longest(sorted_rows.max(axis=1)).mean() / now))
    random_padding, bucket_padding = np.mean(padding, axis=0)
    device_time = None
    device_time_ci = None
    if ratios:
        device_time = float(np.mean(ratios))
        low, high = np.quantile(ratios, (0.025, 0.975))
        device_time_ci = (float(low), float(high))
    return BucketForecast(
        pool_batches=pool,
        random_padding=float(random_padding),
        bucket_padding=float(bucket_padding),
        device_time=device_time,
        device_time_ci=device_time_ci,
    )


class StepTimes:
    """Seconds of a batch by its length, with each timed step perturbed by its standard error."""

    def __init__(self, steps: Sequence[LengthStep], chance: np.random.Generator) -> None:
        # Perturb each step by a log-normal error
        sds = np.sqrt(np.log1p(np.square([step.relative_sd for step in steps])))
        errors = np.exp(sds * chance.standard_normal(len(steps)))
        seconds = np.array([step.seconds for step in steps]) * errors

        # Mean seconds of each padded length, and the padded length of each longest sample
        at: dict[int, list[float]] = {}
        for step, took in zip(steps, seconds, strict=True):
            at.setdefault(step.padded, []).append(took)
        self._padded = np.array(sorted(at), dtype=np.float64)
        self._seconds = np.array([np.mean(at[padded]) for padded in sorted(at)])
        widths = dict(sorted((step.longest, step.padded) for step in steps))
        self._longest = np.array(list(widths))
        self._widths = np.array(list(widths.values()))

    def of_padded(self, padded: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of batches by padded length; constant beyond the longest timed one."""
        seconds: NDArray[np.float64] = np.interp(padded, self._padded, self._seconds)
        return seconds

    def of_longest(self, longest: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of batches by the length of their longest sample."""
        return self.of_padded(np.interp(longest, self._longest, self._widths))


def _padding(batches: NDArray[np.int64]) -> float:
    """Return the share of padding if each row is a batch."""
    return float(1 - batches.sum() / (batches.max(axis=1).sum() * batches.shape[1]))


# Packing: the gain of rows filled by several samples. The resampling has a seed of its own.
#
# Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination"
# (arXiv:2107.02027).


def forecast_packing(
    lengths: Sequence[int], current_padding: Sequence[int], steps: Sequence[LengthStep]
) -> PackForecast | None:
    """Compare full rows with the current batches.

    A row is as long as the longest timed batch, so every sample fits into one. The time per sample
    then lies between two bounds: a part of a batch with the current number of rows, with attention
    over whole rows, and a part of a batch with the current number of samples without any padding,
    with attention within each sample. The slower one is expected, so neither a larger batch nor
    attention that separates samples is taken for granted.

    Args:
        lengths: Lengths of random items, at least one.
        current_padding: Padded lengths of the loader's current batches.
        steps: Timed batches with the current number of samples.

    Returns:
        None without timed batches of two lengths.
    """
    if len({step.padded for step in steps}) < 2 or not current_padding:  # a line needs two lengths
        return None
    chance = np.random.default_rng(0)
    row = max(step.padded for step in steps)
    items = np.minimum(np.asarray(lengths, dtype=np.int64), row)
    today = np.asarray(current_padding, dtype=np.float64)
    full = _fullness(items[:1024], row)  # enough samples to show how full rows get
    slower = list[float]()
    faster = list[float]()
    for _ in range(RESAMPLES):
        # Resample times, items and current batches
        time = StepTimes(steps, chance)
        mean = chance.choice(items, size=len(items)).mean()
        now = time.of_padded(chance.choice(today, size=len(today))).mean()

        # Both bounds: attention over whole rows, and within each sample
        in_rows, within = time.of_padded(np.array([row, mean / full], dtype=np.float64))
        both = (float(in_rows * mean / (row * full) / now), float(within / now))
        slower.append(max(both))
        faster.append(min(both))
    return PackForecast(
        row_tokens=row,
        samples_per_row=float(row * full / items.mean()),
        padding=1 - full,
        device_time=float(np.mean(slower)),
        device_time_ci=(float(np.quantile(faster, 0.025)), float(np.quantile(slower, 0.975))),
    )


def _fullness(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], row: int) -> float:
    """Return the filled share of rows when each sample, longest first, goes into the first row with room.

    Source: Johnson 1974, "Fast algorithms for bin packing" (first fit decreasing).
    """
    room = list[int]()
    for length in sorted(map(int, lengths), reverse=True):
        at = next((index for index, left in enumerate(room) if left >= length), None)
        if at is None:
            room.append(row - length)
        else:
            room[at] -= length
    return float(lengths.sum() / (row * len(room)))
