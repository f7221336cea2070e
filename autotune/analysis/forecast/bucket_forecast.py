"""What batches of like lengths would win: forecast from the lengths of items and the time of batches of each length.

Comes in: lengths of items, the padded lengths of today's batches, timed steps. Goes out: a BucketForecast. Time is not
taken to go with the padded tokens: it is interpolated between batches that were timed at several lengths, so that what
attention adds is in it. Pure; the resampling has a seed of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.records.lengths import BucketForecast, LengthStep

__all__ = ["RESAMPLES", "StepTimes", "forecast_buckets"]

_POOL_BATCHES = 50
"""Batches that are sorted by length at once. Source: the megabatches of transformers' LengthGroupedSampler
(trainer_pt_utils.py, get_length_grouped_indices), which takes 50 at the most."""
_MOST_DRAWN = 16_384  # items of a pool here: of large batches fewer are sorted at once, which promises less
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
        steps: Timed batches of `batch_samples` each; the time is told where there are two lengths or more.
        dataset_length: Samples of an epoch, of which a pool takes a quarter at the most; None: not known.
    """
    chance = np.random.default_rng(0)
    items, today = np.asarray(lengths, dtype=np.int64), np.asarray(padded_today, dtype=np.float64)
    pool = min(_POOL_BATCHES, max(_FEWEST_BATCHES, _MOST_DRAWN // batch_samples))
    if dataset_length is not None:
        # by the same source, at least four pools an epoch
        pool = max(1, min(pool, dataset_length // (4 * batch_samples)))
    padding, ratios = list[tuple[float, float]](), list[float]()
    is_timed = len({step.padded for step in steps}) >= 2 and len(today) > 0  # a line needs two lengths
    for _ in range(RESAMPLES):
        own = chance.choice(items, size=len(items))
        is_enough = len(own) >= pool * batch_samples
        drawn = chance.choice(own, size=pool * batch_samples, replace=not is_enough).reshape(pool, batch_samples)
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
        seconds = np.array([step.seconds for step in steps]) * np.exp(sds * chance.standard_normal(len(steps)))
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
