"""Forecast the throughput of settings that were not tried: from ceilings, by bucketing, by packing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import exp, inf
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.config.environment import DeviceKind
from autotune.config.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.models.observations import ConfiguredPoint, rate_observations, side_observation
from autotune.models.throughput import RateModel
from autotune.models.throughput_law import joint_rate
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import overlaps
from autotune.records.measurement import BucketForecast, LengthStep, PackForecast
from autotune.records.result import CurvePoint, Evidence
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings_table import SETTINGS, Side
from autotune.space import constraints as rules

# What a diagnosis takes from its evidence before it expects rates: ceilings, settings to advise,
# threads. Pure.
#
# Comes in: an Evidence. Goes out: its ceilings, the points of its curves that can be advised, what
# these make of today's configuration, the rate of a run that loses less time, and whether threads
# oversubscribe the cores.


DEVICE_SETTINGS = frozenset(setting.name for setting in SETTINGS if setting.is_in_curves)
"""Settings that a device's curve varies."""
PINNING_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm", "xpu"})
"""Devices whose copies are faster from page-locked memory."""
_MOST_SAVED_FRACTION = 0.95
"""Share of the wall time that can be saved at the most: our own convention."""
_SEVERAL_THREADS = 1.5
"""Cores that an item keeps busy, from which on it counts as running in several threads: our own
convention."""
_LEAST_BUSY_SHARE = 0.01
"""Least share of the time without waits for data from which a device's ceiling is derived: our own
convention."""


def loader_ceiling(evidence: Evidence) -> float:
    """Rate of the loader alone today, from the items' costs where it was not measured; infinite without those."""
    measured = evidence.measurement.loader_ceiling
    costs = evidence.measurement.loader_costs
    if measured is not None:
        return measured
    sample_s = 0.0 if costs is None else with_collating(evidence, costs, costs.item_s)
    return max(1, evidence.config.num_workers) / sample_s if sample_s > 0 else inf


def device_ceiling(evidence: Evidence) -> float:
    """Rate of the device alone today; where it was not measured, the rate without the waits; infinite without those."""
    run = evidence.measurement
    if run.device_ceiling is None and run.data_wait_fraction is None:
        return inf
    return run.device_ceiling or run.samples_per_s / max(
        1.0 - (run.data_wait_fraction or 0.0), _LEAST_BUSY_SHARE
    )


def copy_ceilings(evidence: Evidence) -> dict[bool, float]:
    """Rates of copying batches alone by whether they are pinned, as far as they were measured: today's by the run."""
    own = evidence.config.pin_memory
    known = {
        bool(point.changes.get("pin_memory", own)): point.ceiling.samples_per_s
        for point in evidence.curves.copy
        if point.ceiling is not None
    }
    today = evidence.measurement.copy_ceiling
    return known if today is None else known | {own: today}


def loader_cpu_s(evidence: Evidence) -> float:
    """CPU seconds of the loader for one sample: the item, and its share of collating the batch."""
    costs = evidence.measurement.loader_costs
    return 0.0 if costs is None else with_collating(evidence, costs, costs.item_cpu_s)


def with_collating(evidence: Evidence, costs: LoaderCosts, item_s: float) -> float:
    """Seconds of one sample in the loader: the item's, and its share of collating the batch."""
    return item_s + costs.collate_s / evidence.config.micro_batch_size


def device_cores(evidence: Evidence) -> float:
    """Return the cores that computing keeps busy at the device's ceiling, in the most economical number of threads."""
    if evidence.environment.device_kind != "cpu":
        return 0.0
    measured = [
        point.cpu_s_per_sample
        for point in evidence.curves.device
        if point.cpu_s_per_sample is not None and set(point.changes) <= {"intra_op_threads"}
    ]
    if measured:
        return min(measured) * device_ceiling(evidence)
    return float(min(threads_of(evidence, evidence.config), evidence.environment.cores))


def cores_ceiling(evidence: Evidence) -> float:
    """Return the rate at which loading and computing keep all cores busy, whatever the number of workers.

    Infinite where the CPU time of neither is known.
    """
    sample_s = loader_cpu_s(evidence) + device_cores(evidence) / device_ceiling(evidence)
    return evidence.environment.cores / sample_s if sample_s > 0 else inf


def join_rates(evidence: Evidence, loader: float, device: float) -> float:
    """The rate that a loader and a device reach together with today's settings."""
    return joint_rate(
        loader, device, is_overlapped=overlaps(evidence.config, evidence.environment.device_kind)
    )


def advisable_points(evidence: Evidence, side: Literal["loader", "device"]) -> list[CurvePoint]:
    """Settings of one side that were measured and can be advised."""
    settings: Collection[str] = LOADER_SETTINGS if side == "loader" else DEVICE_SETTINGS
    found: list[CurvePoint] = [
        point for point in getattr(evidence.curves, side) if point.ceiling is not None
    ]
    varied = [point for point in found if point.changes and {*point.changes} <= {*settings}]
    obstacle = partial(rules.obstacle, drop_last=evidence.drop_last)
    machine = evidence.facts, evidence.environment
    return [point for point in varied if obstacle(apply_changes(evidence, point), *machine) is None]


def apply_changes(evidence: Evidence, *points: CurvePoint | None) -> TrainingConfig:
    """Today's configuration with the points' changes."""
    changes = {
        name: value
        for point in points
        if point is not None
        for name, value in point.changes.items()
    }
    settings = rules.normalised(
        evidence.config.model_dump() | changes, evidence.facts, evidence.environment
    )
    return TrainingConfig.model_validate(settings)


def rate_without(evidence: Evidence, share: float) -> float:
    """The best rate without this share of the time: at most the loader's where it works beside the device."""
    present = evidence.measurement.samples_per_s
    most = (
        loader_ceiling(evidence)
        if overlaps(evidence.config, evidence.environment.device_kind)
        else inf
    )
    return max(present, min(present / (1.0 - min(share, _MOST_SAVED_FRACTION)), most))


def threads_of(evidence: Evidence, config: TrainingConfig) -> int:
    """Threads of one operation on the CPU; where torch chooses, what it chose in the curves, else every core."""
    return config.intra_op_threads or evidence.curves.threads or evidence.environment.cores


def runs_too_many_threads(evidence: Evidence, config: TrainingConfig) -> bool:
    """Whether a run on the CPU has more threads and workers than cores."""
    running = threads_of(evidence, config) + config.num_workers
    environment = evidence.environment
    return environment.device_kind == "cpu" and running > environment.cores


def workers_run_too_many_threads(evidence: Evidence) -> bool:
    """Whether items run in several threads each (OpenCV's, NumPy's), in all more than there are cores."""
    costs = evidence.measurement.loader_costs
    loaders = loader_processes(evidence.config)
    if costs is None or costs.cpu_fraction <= _SEVERAL_THREADS:
        return False
    return costs.cpu_fraction * loaders > evidence.environment.cores


def loader_processes(config: TrainingConfig) -> int:
    """Processes that make items, of all ranks: their workers, or else the ranks themselves."""
    return max(1, config.num_workers) * config.process_count


# The rates to expect of other settings in a diagnosis, by the model that a search proposes by.
# Pure.
#
# Comes in: an Evidence, and pairs of its curves' points. Goes out: the rates of runs with the
# changes of each pair.


_SINGLE = {"strategy": "single", "world_size": 1, "ddp": None}
Pair: TypeAlias = tuple[CurvePoint | None, CurvePoint | None]
"""A point of the loader's curve and one of the device's; None: as today."""


def expected_rates(evidence: Evidence, pairs: Sequence[Pair]) -> list[float]:
    """The rates of runs with the changes of pairs: what a search on this job would forecast after its first looks.

    What today's run falls short of both sides by is expected to stay in part, less so with other
    threads.
    """
    configs = [apply_changes(evidence, *pair) for pair in pairs]
    if not configs:
        return []
    return [exp(log_rate) for log_rate in rate_model_of(evidence).forecast(configs).log_rate]


def rate_model_of(evidence: Evidence) -> RateModel:
    """The model of the machine that the curves and today's run tell."""
    curves = evidence.curves
    kind = evidence.environment.device_kind
    looks = [_look(evidence, "loader", point) for point in curves.loader]
    looks += [_look(evidence, "device", point) for point in curves.device]
    looks += [_look(evidence, "copy", point) for point in curves.copy]
    today = TrialRecord(
        number=0,
        config=evidence.config,
        results=(TrialResult(outcome="ok", measurement=evidence.measurement),),
    )
    seen = list(rate_observations(looks, [today], kind))
    sides: tuple[tuple[Side, float], ...]
    sides = (
        ("loader", loader_ceiling(evidence)),
        ("device", device_ceiling(evidence)),
        ("copy", copy_ceilings(evidence).get(evidence.config.pin_memory, inf)),
    )
    own = {
        evidence.config,
        evidence.config.model_copy(update=_SINGLE),
    }  # curves are measured on one device
    known = {observation.kind for observation in seen if observation.config in own}
    seen += [
        side_observation(side, evidence.config, rate, kind)
        for side, rate in sides
        if side not in known and rate < inf
    ]
    return RateModel(seen, evidence.environment, evidence.run_spread)


def _look(evidence: Evidence, side: Side, point: CurvePoint) -> ConfiguredPoint:
    """A point in its configuration: curves are measured in one process on one device."""
    return ConfiguredPoint(
        side=side, config=apply_changes(evidence, point).model_copy(update=_SINGLE), point=point
    )


# What batches of like lengths would win: forecast from the lengths of items and the time of batches
# of each length.
#
# Comes in: lengths of items, the padded lengths of today's batches, timed steps. Goes out: a
# BucketForecast. Time is not taken to go with the padded tokens: it is interpolated between batches
# that were timed at several lengths, so that what attention adds is in it. Pure; the resampling has
# a seed of its own.


_POOL_BATCHES = 50
"""Batches that are sorted by length at once. Source: the megabatches of transformers'
LengthGroupedSampler (trainer_pt_utils.py, get_length_grouped_indices), which takes 50 at the
most."""
_MOST_DRAWN = (
    16_384  # items of a pool here: of large batches fewer are sorted at once, which promises less
)
_FEWEST_BATCHES = 2  # of a pool: one would be a random batch
RESAMPLES = 200
"""Our own convention: enough for the ends of a 95 % interval."""


def forecast_buckets(
    lengths: Sequence[int],
    batch_samples: int,
    padded_today: Sequence[int],
    steps: Sequence[LengthStep],
    *,
    dataset_length: int | None = None,
) -> BucketForecast:
    """Compare batches of like lengths with random ones, and with today's.

    Args:
        lengths: Of items that were drawn at random, at least one.
        batch_samples: Samples of a batch.
        padded_today: Padded lengths of batches as the loader delivers them.
        steps: Timed batches of `batch_samples` each; the time is told where there are two lengths
            or more.
        dataset_length: Samples of an epoch, of which a pool takes a quarter at the most; None: not
            known.
    """
    chance = np.random.default_rng(0)
    items = np.asarray(lengths, dtype=np.int64)
    today = np.asarray(padded_today, dtype=np.float64)
    pool = min(_POOL_BATCHES, max(_FEWEST_BATCHES, _MOST_DRAWN // batch_samples))
    if dataset_length is not None:
        # by the same source, at least four pools an epoch
        pool = max(1, min(pool, dataset_length // (4 * batch_samples)))
    padding = list[tuple[float, float]]()
    ratios = list[float]()
    is_timed = (
        len({step.padded for step in steps}) >= 2 and len(today) > 0
    )  # a line needs two lengths
    for _ in range(RESAMPLES):
        own = chance.choice(items, size=len(items))
        is_enough = len(own) >= pool * batch_samples
        drawn = chance.choice(own, size=pool * batch_samples, replace=not is_enough).reshape(
            pool, batch_samples
        )
        sorted_rows = np.sort(drawn, axis=None).reshape(pool, batch_samples)
        padding.append((_padding(drawn), _padding(sorted_rows)))
        if is_timed:
            time = StepTimes(steps, chance)
            now = time.of_padded(chance.choice(today, size=len(today))).mean()
            ratios.append(float(time.of_longest(sorted_rows.max(axis=1)).mean() / now))
    random_padding, bucket_padding = np.mean(padding, axis=0)
    interval = np.quantile(ratios, (0.025, 0.975)) if ratios else None
    return BucketForecast(
        pool_batches=pool,
        random_padding=float(random_padding),
        bucket_padding=float(bucket_padding),
        device_time=float(np.mean(ratios)) if ratios else None,
        device_time_ci=None if interval is None else (float(interval[0]), float(interval[1])),
    )


class StepTimes:
    """Seconds of a batch by its length, each timed step off by what its repeats leave open."""

    def __init__(self, steps: Sequence[LengthStep], chance: np.random.Generator) -> None:
        sds = np.sqrt(np.log1p(np.square([step.relative_sd for step in steps])))  # of the logarithm
        seconds = np.array([step.seconds for step in steps]) * np.exp(
            sds * chance.standard_normal(len(steps))
        )
        at: dict[int, list[float]] = {}
        for step, took in zip(steps, seconds, strict=True):
            at.setdefault(step.padded, []).append(took)
        self._padded = np.array(sorted(at), dtype=np.float64)
        self._seconds = np.array([np.mean(at[padded]) for padded in sorted(at)])
        widths = dict(sorted((step.longest, step.padded) for step in steps))
        self._longest, self._widths = np.array(list(widths)), np.array(list(widths.values()))

    def of_padded(self, padded: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of batches that are padded to these lengths; beyond the longest that was timed, that one's."""
        seconds: NDArray[np.float64] = np.interp(padded, self._padded, self._seconds)
        return seconds

    def of_longest(self, longest: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of batches whose longest sample is so long."""
        return self.of_padded(np.interp(longest, self._longest, self._widths))


def _padding(batches: NDArray[np.int64]) -> float:
    """Share of padding where each row is a batch."""
    return float(1 - batches.sum() / (batches.max(axis=1).sum() * batches.shape[1]))


# What packing would win: rows that several samples fill, forecast from lengths and from batches
# that were timed.
#
# Comes in: lengths of items, the padded lengths of today's batches, timed steps. Goes out: a
# PackForecast. Pure; the resampling has a seed of its own. Source: Krell et al. 2021, "Efficient
# Sequence Packing without Cross-contamination" (arXiv:2107.02027).


def forecast_packing(
    lengths: Sequence[int], padded_today: Sequence[int], steps: Sequence[LengthStep]
) -> PackForecast | None:
    """Compare full rows with today's batches; None without the time of batches of two lengths.

    A row is as long as the longest batch that was timed, so that every sample fits into one.
    Between two bounds lies what a sample then takes: a part of a batch of as many rows as today,
    which computes attention over whole rows; and a part of a batch of as many samples as today
    without any padding, which computes it within each sample. The slower of both is expected, so
    that neither a larger batch nor an attention that knows its samples is taken for granted.

    Args:
        lengths: Of items that were drawn at random, at least one.
        padded_today: Padded lengths of batches as the loader delivers them.
        steps: Timed batches of as many samples as today's.
    """
    if len({step.padded for step in steps}) < 2 or not padded_today:  # a line needs two lengths
        return None
    chance = np.random.default_rng(0)
    row = max(step.padded for step in steps)
    items = np.minimum(np.asarray(lengths, dtype=np.int64), row)
    today = np.asarray(padded_today, dtype=np.float64)
    full = _fullness(items[:1024], row)  # enough samples to show how full rows get
    slower = list[float]()
    faster = list[float]()
    for _ in range(RESAMPLES):
        time = StepTimes(steps, chance)
        mean = chance.choice(items, size=len(items)).mean()
        now = time.of_padded(chance.choice(today, size=len(today))).mean()
        in_rows, within = time.of_padded(np.array([row, mean / full], dtype=np.float64))
        both = float(in_rows * mean / (row * full) / now), float(within / now)
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
    """Share of rows that is filled where each sample, the longest first, goes into the first row with room for it.

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
