"""Peak memory as a line in the micro batch, one for each kind of settings: intercept + slope * batch, with its error.

Comes in: trials. Goes out: MemoryLines, and a Note on the largest micro batch within the limit. Where the limit is on
RAM, loader workers are part of the peak: their memory is fitted beside the batch's, and a line holds for a number of
workers. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import floor, inf, sqrt
from typing import NamedTuple

import numpy as np

from autotune.analysis.statistics import Floats, t_95
from autotune.frozen import FrozenModel
from autotune.note import Note, note
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord
from autotune.settings.training_config import AMP_DTYPES, AmpDtype, TrainingConfig

__all__ = [
    "MemoryKind",
    "MemoryLine",
    "MemoryPoint",
    "fit_memory",
    "is_too_big",
    "largest_batch_note",
    "memory_kind",
    "memory_lines",
]

_FEWEST_WITH_WORKERS = 5
"""Trials from which on a worker's memory is fitted: with fewer, the lost degree of freedom widens the error more than
workers explain. Our own convention."""
_LEAST_UNEXPLAINED = 0.05
"""Share of the workers' variance that the batch must leave unexplained: our own convention."""
_TWO_POINTS_ERROR = 0.1
"""Error of a line through two points, as a share of the higher one: our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKind:
    """Settings with a line of their own: a group adds its buckets, DataParallel what it gathers."""

    amp_dtype: AmpDtype
    strategy: str = "single"
    world_size: int = 1


class MemoryPoint(NamedTuple):
    """Peak memory of a trial."""

    micro_batch_size: int
    peak_bytes: int
    num_workers: int = 0
    """Loader workers whose memory is part of the peak."""


class MemoryLine(FrozenModel):
    """Peak memory = intercept + slope * micro batch, by least squares over trials of one kind."""

    kind: MemoryKind
    intercept_bytes: float
    """With `num_workers` loader workers."""
    bytes_per_sample: float
    """At least 0: memory does not shrink with the batch."""
    num_workers: int = 0
    """Loader workers that the line is valid for, where they are part of the peak."""
    bytes_per_worker: float = 0.0
    """0 where they are no part of it, or where the trials do not determine it."""
    points: tuple[MemoryPoint, ...]
    """The trials that it is fitted to, in order of the batch."""
    error_bytes: float
    """Half of the 95 % prediction interval at `centre_batch`: the effect of layout, chance and other settings."""
    centre_batch: float
    """Where the error is smallest: in the middle of the points."""
    widening: float
    """Growth of the squared error, relative to that at the centre, with the squared distance."""

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
        """The largest micro batch whose expected memory and error stay within a limit; None without a slope."""
        if self.bytes_per_sample <= 0:
            return None
        most = max(0, floor((limit_bytes - self.intercept_bytes - self.error_bytes) / self.bytes_per_sample))
        least = min(most, max(0, floor(self.centre_batch)))  # from here on both parts only grow
        further = range(least + 1, most + 1)
        return least + bisect_right(further, False, key=lambda batch: not self.fits(batch, limit_bytes))


def memory_kind(config: TrainingConfig) -> MemoryKind:
    """The kind of a configuration."""
    return MemoryKind(amp_dtype=config.amp_dtype, strategy=config.strategy, world_size=config.world_size)


def memory_lines(records: Sequence[TrialRecord], *, num_workers: int | None) -> tuple[MemoryLine, ...]:
    """A line for each kind with at least two measured micro batches, plainest precision first.

    Args:
        records: the trials.
        num_workers: loader workers that the lines are for; None where they are no part of the peak.
    """
    kinds = {memory_kind(record.config) for record in records}
    points = {kind: _points(records, kind, counts_workers=num_workers is not None) for kind in kinds}
    ordered = sorted(kinds, key=lambda kind: (AMP_DTYPES.index(kind.amp_dtype), kind.world_size, kind.strategy))
    return tuple(filter(None, (fit_memory(kind, points[kind], num_workers=num_workers or 0) for kind in ordered)))


def fit_memory(kind: MemoryKind, points: Sequence[MemoryPoint], *, num_workers: int = 0) -> MemoryLine | None:
    """Fit a line for a number of loader workers; None where all points have the same micro batch.

    Neither the batch nor a worker can take less than no memory: least squares with slopes of at least 0.

    Source: Lawson and Hanson 1995, "Solving Least Squares Problems", chapter 23; prediction interval of linear
    regression, sqrt(1 + 1/n + d' (X' X)^-1 d) for a distance d from the means, its square completed in the batch.
    """
    from scipy.optimize import nnls

    if len({point.micro_batch_size for point in points}) < 2:
        return None
    settings = np.array([(point.micro_batch_size, point.num_workers) for point in points], dtype=np.float64)
    peaks = np.array([point.peak_bytes for point in points], dtype=np.float64)
    means, level = settings.mean(axis=0), float(peaks.mean())
    away = num_workers - float(means[1])
    distances = (settings - means) * (1.0, _can_tell_workers(settings))
    slopes, residual = nnls(distances, peaks - level)
    if slopes[1] == 0:
        distances[:, 1] = away = 0.0
    inverse = np.linalg.pinv(distances.T @ distances)
    tilt = float(inverse[0, 1] / inverse[0, 0])
    scatter = 1 + 1 / len(points) + float(inverse[1, 1] - tilt * inverse[0, 1]) * away**2
    freedom = len(points) - 2 - int(slopes[1] > 0)
    error = t_95(freedom) * residual * sqrt(scatter / freedom) if freedom else _TWO_POINTS_ERROR * float(peaks.max())
    return MemoryLine(
        kind=kind,
        intercept_bytes=level - float(slopes[0] * means[0]) + float(slopes[1]) * away,
        bytes_per_sample=float(slopes[0]),
        num_workers=num_workers,
        bytes_per_worker=float(slopes[1]),
        points=tuple(sorted(points)),
        error_bytes=error,
        centre_batch=float(means[0]) - tilt * away,
        widening=float(inverse[0, 0]) / scatter,
    )


def largest_batch_note(
    records: Sequence[TrialRecord],
    config: TrainingConfig,
    limit_bytes: int,
    *,
    batches: Sequence[int],
    counts_workers: bool,
    overloaded: Collection[int] = (),
) -> Note | None:
    """The largest micro batch of a kind that ran within the limit, beside the prediction from the other batches.

    None where no trial ran within the limit. The code tells whether a larger one is in the space, and failed.

    Args:
        records: the trials.
        config: settings of the kind.
        limit_bytes: of the peak memory.
        batches: every micro batch of the space.
        counts_workers: loader workers are part of the peak.
        overloaded: numbers of the trials that failed on the largest samples: their batches are too big.
    """
    kind = memory_kind(config)
    own = [record for record in records if memory_kind(record.config) == kind]
    points = _points(own, kind, counts_workers=counts_workers)
    overloading = {record.config.micro_batch_size for record in own if record.number in overloaded}
    below = min(overloading, default=inf)
    within = [point for point in points if point.peak_bytes <= limit_bytes and point.micro_batch_size < below]
    if not within:
        return None
    batch, peak_bytes, workers = max(within)
    others = [point for point in points if point.micro_batch_size != batch]
    line = fit_memory(kind, others, num_workers=workers)
    too_big = overloading.union(record.config.micro_batch_size for record in own if is_too_big(record))
    next_batch = min((size for size in batches if size > batch), default=None)
    code = "largest_batch_of_limit" if next_batch in too_big else "largest_batch_that_ran"
    if next_batch is None:
        code = "largest_batch_of_space"
    predicted, error = (None, None) if line is None else (line.predict_bytes(batch), line.error_at(batch))
    ran = {"micro_batch_size": batch, "limit_bytes": limit_bytes, "peak_bytes": peak_bytes}
    return note(code, **ran, predicted_bytes=predicted, error_bytes=error)


def is_too_big(record: TrialRecord) -> bool:
    """Whether a trial passed the memory limit, or ran out of memory."""
    return record.outcome == "over_memory" or (record.measurement is None and record.outcome in OUT_OF_MEMORY)


def _points(records: Sequence[TrialRecord], kind: MemoryKind, *, counts_workers: bool) -> list[MemoryPoint]:
    """The measured trials of a kind, without those that thrashed: they needed more than they got."""
    measured = [(record.config, record.measurement) for record in records if record.measurement is not None]
    return [
        MemoryPoint(config.micro_batch_size, run.peak_memory_bytes, config.num_workers * counts_workers)
        for config, run in measured
        if memory_kind(config) == kind and not run.memory.is_thrashing
    ]


def _can_tell_workers(settings: Floats) -> bool:
    """Whether there are enough trials to fit a worker's memory, and their workers do not simply follow the batch."""
    if len(settings) < _FEWEST_WITH_WORKERS or np.ptp(settings[:, 1]) == 0:
        return False
    return bool(1 - np.corrcoef(settings[:, 0], settings[:, 1])[0, 1] ** 2 > _LEAST_UNEXPLAINED)
