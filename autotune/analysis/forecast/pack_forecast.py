"""What packing would win: rows that several samples fill, forecast from lengths and from batches that were timed.

Comes in: lengths of items, the padded lengths of today's batches, timed steps. Goes out: a PackForecast. Pure; the
resampling has a seed of its own. Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination"
(arXiv:2107.02027).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.analysis.forecast.bucket_forecast import RESAMPLES, StepTimes
from autotune.records.lengths import LengthStep, PackForecast

__all__ = ["forecast_packing"]


def forecast_packing(
    lengths: Sequence[int], padded_today: Sequence[int], steps: Sequence[LengthStep]
) -> PackForecast | None:
    """Compare full rows with today's batches; None without the time of batches of two lengths.

    A row is as long as the longest batch that was timed, so that every sample fits into one. Between two bounds lies
    what a sample then takes: a part of a batch of as many rows as today, which computes attention over whole rows; and
    a part of a batch of as many samples as today without any padding, which computes it within each sample. The slower
    of both is expected, so that neither a larger batch nor an attention that knows its samples is taken for granted.

    Args:
        lengths: Of items that were drawn at random, at least one.
        padded_today: Padded lengths of batches as the loader delivers them.
        steps: Timed batches of as many samples as today's.
    """
    if len({step.padded for step in steps}) < 2 or not padded_today:  # a line needs two lengths
        return None
    chance, row = np.random.default_rng(0), max(step.padded for step in steps)
    items, today = np.minimum(np.asarray(lengths, dtype=np.int64), row), np.asarray(padded_today, dtype=np.float64)
    full = _fullness(items[:1024], row)  # enough samples to show how full rows get
    slower, faster = list[float](), list[float]()
    for _ in range(RESAMPLES):
        time, mean = StepTimes(steps, chance), chance.choice(items, size=len(items)).mean()
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
