"""Memory as a line in the micro batch, fitted over trials: M0 + k * b for each kind of settings, with its own error.

Comes in: trials. Goes out: MemoryLines, and a sentence on the biggest batch. What has a line to itself is a MemoryKind.
Where the limit is on RAM, loader workers are part of the peak: what each of them takes is fitted beside the batch, and
a line holds for a number of them. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, sqrt
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from autotune.analysis.statistics import t_95
from autotune.phrasing import say_mib
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import AMP_DTYPES, AmpDtype, TrainingConfig

__all__ = [
    "MemoryKind",
    "MemoryLine",
    "MemoryPoint",
    "fit_memory",
    "is_too_big",
    "memory_kind",
    "memory_lines",
    "say_largest",
]

_FEWEST_WITH_WORKERS = 5
"""Trials that can tell what a worker takes: with fewer, the error grows by more than workers explain."""
_TOLD_APART = 0.05
"""Share of the workers' spread that the batch must leave unexplained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKind:
    """What has a line of memory to itself: a group's buckets, and what DataParallel gathers, come on top."""

    amp_dtype: AmpDtype
    strategy: str = "single"
    world_size: int = 1


class MemoryPoint(NamedTuple):
    """What a trial took."""

    micro_batch_size: int
    peak_bytes: int
    num_workers: int = 0
    """Loader workers whose memory is part of the peak."""


class MemoryLine(BaseModel):
    """Peak memory = intercept + slope * micro batch, by least squares over trials of one kind."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: MemoryKind
    intercept_bytes: float
    """With `num_workers` loader workers."""
    bytes_per_sample: float
    """At least 0: memory does not shrink with the batch."""
    num_workers: int = 0
    """Loader workers that the line holds for, where they are part of the peak."""
    bytes_per_worker: float = 0.0
    """0 where they are no part of it, or where the trials do not tell."""
    points: tuple[MemoryPoint, ...]
    """The trials that it is fitted to, in order of the batch."""
    error_bytes: float
    """Half of the 95 % prediction interval at `centre_batch`: what layout, chance and the like add."""
    centre_batch: float
    """Where the line is surest: in the middle of the points."""
    widening: float
    """By how much the error's square, relative to that at the centre, grows with the distance's square."""

    def predict_bytes(self, micro_batch_size: int) -> float:
        """Expected peak memory."""
        return self.intercept_bytes + self.bytes_per_sample * micro_batch_size

    def error_at(self, micro_batch_size: int) -> float:
        """Half of the 95 % prediction interval at a batch, in bytes: it widens away from the points."""
        return self.error_bytes * sqrt(1 + self.widening * (micro_batch_size - self.centre_batch) ** 2)

    def fits(self, micro_batch_size: int, limit_bytes: int) -> bool:
        """Whether the expected memory and its error stay within a limit."""
        return self.predict_bytes(micro_batch_size) + self.error_at(micro_batch_size) <= limit_bytes

    def largest_batch(self, limit_bytes: int) -> int | None:
        """The largest micro batch whose expected memory and error stay within a limit; None where none is in sight."""
        if self.bytes_per_sample <= 0:
            return None
        most = max(0, floor((limit_bytes - self.intercept_bytes - self.error_bytes) / self.bytes_per_sample))
        least = min(most, max(0, floor(self.centre_batch)))  # from here on both parts only grow
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.fits(middle, limit_bytes) else (least, middle - 1)
        return least


def memory_kind(config: TrainingConfig) -> MemoryKind:
    """The kind of memory's line that a configuration lies on."""
    return MemoryKind(amp_dtype=config.amp_dtype, strategy=config.strategy, world_size=config.world_size)


def memory_lines(records: Iterable[TrialRecord], *, num_workers: int | None) -> tuple[MemoryLine, ...]:
    """A line for each kind that at least two micro batches were measured of, plainest precision first.

    Args:
        records: the trials.
        num_workers: loader workers that the lines are to hold for; None where they are no part of the peak.
    """
    points: dict[MemoryKind, list[MemoryPoint]] = {}
    for record in records:
        point = _point(record, counts_workers=num_workers is not None)
        if point is not None:
            points.setdefault(memory_kind(record.config), []).append(point)
    lines = (fit_memory(kind, points[kind], num_workers=num_workers or 0) for kind in sorted(points, key=_place))
    return tuple(line for line in lines if line is not None)


def _place(kind: MemoryKind) -> tuple[int, int, str]:
    return AMP_DTYPES.index(kind.amp_dtype), kind.world_size, kind.strategy


def _point(record: TrialRecord, *, counts_workers: bool) -> MemoryPoint | None:
    if record.measurement is None or record.measurement.memory.is_thrashing:  # it would have taken more
        return None
    workers = record.config.num_workers if counts_workers else 0
    return MemoryPoint(record.config.micro_batch_size, record.measurement.peak_memory_bytes, workers)


def fit_memory(kind: MemoryKind, points: Sequence[MemoryPoint], *, num_workers: int = 0) -> MemoryLine | None:
    """Fit a line that holds for a number of loader workers; None where all points have one micro batch.

    Two points leave no degree of freedom: their error is taken as 10 % of the larger, our own convention.

    Source: prediction interval of linear regression, sqrt(1 + 1/n + d' (X' X)^-1 d) for a distance d from the means,
    its square completed in the batch.
    """
    if len({point.micro_batch_size for point in points}) < 2:
        return None
    has_workers = _tell_workers(points)
    seen = np.array([(batch, workers * has_workers) for batch, _, workers in points], dtype=np.float64)
    peaks = np.array([point.peak_bytes for point in points], dtype=np.float64)
    means, level = seen.mean(axis=0), float(peaks.mean())
    around = seen - means
    inverse = np.linalg.pinv(around.T @ around)
    slopes = np.maximum(inverse @ around.T @ (peaks - level), 0.0)
    residual = float(np.sum((peaks - level - around @ slopes) ** 2))
    away = (num_workers - float(means[1])) * has_workers
    tilt = float(inverse[0, 1] / inverse[0, 0])
    scatter = 1 + 1 / len(points) + float(inverse[1, 1] - tilt * inverse[0, 1]) * away**2
    freedom = len(points) - 2 - has_workers
    return MemoryLine(
        kind=kind,
        intercept_bytes=level - float(slopes[0] * means[0]) + float(slopes[1]) * away,
        bytes_per_sample=float(slopes[0]),
        num_workers=num_workers,
        bytes_per_worker=float(slopes[1]),
        points=tuple(sorted(points)),
        error_bytes=t_95(freedom) * sqrt(residual / freedom * scatter) if freedom else 0.1 * float(peaks.max()),
        centre_batch=float(means[0]) - tilt * away,
        widening=float(inverse[0, 0]) / scatter,
    )


def _tell_workers(points: Sequence[MemoryPoint]) -> bool:
    """Whether the trials tell what a loader worker takes.

    There must be enough of them, it must not be the batch that goes along, and workers must not seem to give back any.
    """
    if len(points) < _FEWEST_WITH_WORKERS or len({point.num_workers for point in points}) < 2:
        return False
    batches, workers = [point.micro_batch_size for point in points], [point.num_workers for point in points]
    if 1 - np.corrcoef(batches, workers)[0, 1] ** 2 <= _TOLD_APART:
        return False
    seen = np.column_stack([np.ones(len(points)), batches, workers])
    (_, _, per_worker), *_ = np.linalg.lstsq(seen, np.array([point.peak_bytes for point in points], dtype=np.float64))
    return bool(per_worker >= 0)


def say_largest(
    records: Sequence[TrialRecord],
    config: TrainingConfig,
    limit_bytes: int,
    *,
    batches: Sequence[int],
    counts_workers: bool,
    overloaded: Collection[int] = (),
) -> str | None:
    """The biggest micro batch that the limit allows to a kind, in a sentence; None where none ran within it.

    Only what was run is named. The memory is compared to what the line through the other batches predicts.

    Args:
        records: the trials.
        config: settings of the kind.
        limit_bytes: of the peak memory.
        batches: every micro batch of the space. The limit is said to allow no more than one of them only where the
            next one was too big.
        counts_workers: loader workers are part of the peak.
        overloaded: numbers of the trials that failed on the largest samples: their batches are too big.
    """
    own = [record for record in records if memory_kind(record.config) == memory_kind(config)]
    points = (_point(record, counts_workers=counts_workers) for record in own)
    run = [point for point in points if point is not None]
    least_overloaded = min((one.config.micro_batch_size for one in own if one.number in overloaded), default=inf)
    within = [one for one in run if one.peak_bytes <= limit_bytes and one.micro_batch_size < least_overloaded]
    if not within:
        return None
    batch, peak, workers = max(within)
    others = [one for one in run if one.micro_batch_size != batch]
    line = fit_memory(memory_kind(config), others, num_workers=workers)
    seen = f"run, it took {say_mib(peak)}"
    if line is not None:
        predicted, error = line.predict_bytes(batch), line.error_at(batch)
        seen += f"; predicted from other batches: {say_mib(predicted)} ± {say_mib(error)}"
    too_big = {one.config.micro_batch_size for one in own if is_too_big(one) or one.number in overloaded}
    larger = [one for one in batches if one > batch]
    if not larger:
        return f"The biggest micro batch of the space, {batch}, stays within {say_mib(limit_bytes)} ({seen})."
    if min(larger) in too_big:
        return f"The biggest micro batch that the limit of {say_mib(limit_bytes)} allows is {batch} ({seen})."
    return f"The biggest micro batch that was run within {say_mib(limit_bytes)} is {batch} ({seen})."


def is_too_big(record: TrialRecord) -> bool:
    """Whether a trial passed the memory limit, or ran out of memory."""
    has_run_out = record.measurement is None and record.outcome in {"oom", "host_oom"}
    return has_run_out or record.outcome == "over_memory"
