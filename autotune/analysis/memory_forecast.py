"""Peak memory of configurations that were not run, with its uncertainty: a line in the batch, and what adds to it.

Comes in: what was seen of configurations' peaks. Goes out: a MemoryForecast, by Bayesian linear regression, so that it
can tell from the first sighting on, with the uncertainty that is due. Pure.

Source: Bishop 2006, "Pattern Recognition and Machine Learning", section 3.3. The scales of the prior, in shares of the
highest peak seen, are our own conventions: before a second micro batch was seen, memory is expected to grow by half
with a batch twice as large, give or take as much. Each half precision has a line of its own; until both were seen, one
is expected to be much like the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.floats import Floats
from autotune.settings.training_config import TORCH_PREFETCH_FACTOR, TrainingConfig

__all__ = ["MemoryForecast", "forecast_memory"]

_GROWTH, _GROWTH_SD = 0.5, 0.5
_BASE_SD = 1.0
_HALF_BASE_SD, _HALF_GROWTH_SD = 0.1, 0.3
_HALVES_ALIKE = 0.97  # correlation of what the half precisions change
_WORKER, _WORKER_SD = 0.03, 0.06
_QUEUE_SD = 0.01  # of a batch that lies ready
_VARIANT_SD = 0.1  # another layout, compilation, optimizer steps apart
_GROUP_SD = 0.3
_NOISE = 0.03
_VALUES = 10  # of `_values`


@dataclass(frozen=True)
class MemoryForecast:
    """What is known of peak memory."""

    mean: Floats
    covariance: Floats
    noise_bytes: float
    reference_batch: int
    has_workers_in_ram: bool
    seen: tuple[tuple[TrainingConfig, int], ...] = ()
    """What it was fitted to."""

    def expect(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Expected peak memory and its standard deviation, in bytes."""
        rows = _rows(configs, self.reference_batch, has_workers=self.has_workers_in_ram)
        variance = (rows @ self.covariance * rows).sum(axis=1) + self.noise_bytes**2
        return rows @ self.mean, np.sqrt(variance)

    def chance_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        """The probability that each stays within a limit; 1 where something was seen to that asks for no less.

        A batch that fits by little would otherwise stay a matter of chance once it was seen to fit.
        """
        expected, sd = self.expect(configs)
        normal = NormalDist()
        chances = np.array([normal.cdf(float(z)) for z in (limit_bytes - expected) / sd])
        return np.where(self._was_seen_to_fit(configs, limit_bytes), 1.0, chances)

    def _was_seen_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> NDArray[np.bool_]:
        asked = self._asks(configs)
        within = self._asks([config for config, peak in self.seen if peak <= limit_bytes])
        over = self._asks([config for config, peak in self.seen if peak > limit_bytes])
        return _is_below_any(asked, within) & ~_is_below_any(-asked, -over)

    def _asks(self, configs: Sequence[TrainingConfig]) -> Floats:
        """What memory grows with, (kinds, configs): whoever has no more of any kind takes no more."""
        table, has_workers = _table(configs), float(self.has_workers_in_ram)
        batch, queue, workers, bfloat16, float16, channels_last, compiled, accumulates, is_group, is_dp = table
        return np.stack(
            [
                batch,
                1 - bfloat16 - float16,
                has_workers * workers,
                has_workers * queue,
                channels_last,
                1 - channels_last,  # of a layout, and of what is compiled, neither is known to take more
                compiled,
                1 - compiled,
                accumulates,
                is_group,
                is_dp,
            ]
        )


def _is_below_any(these: Floats, those: Floats) -> NDArray[np.bool_]:
    """Which of these are not above one of those in any kind; both are (kinds, configs)."""
    is_below = np.ones((these.shape[1], those.shape[1]), dtype=np.bool_)
    for this, that in zip(these, those, strict=True):
        is_below &= this[:, None] <= that
    return np.asarray(is_below.any(axis=1), dtype=np.bool_)


def forecast_memory(seen: Sequence[tuple[TrainingConfig, int]], *, has_workers_in_ram: bool) -> MemoryForecast:
    """Fit what was seen, as pairs of a configuration and its peak memory in bytes; there must be one.

    Where the limit is on RAM, loader workers and the batches that they hold ready take their part of it.
    """
    scale, reference = float(max(peak for _, peak in seen)), min(config.micro_batch_size for config, _ in seen)
    before, before_precision = _prior(scale)
    rows = _rows([config for config, _ in seen], reference, has_workers=has_workers_in_ram)
    peaks = np.array([peak for _, peak in seen], dtype=np.float64)
    noise = _NOISE * scale
    precision = before_precision + rows.T @ rows / noise**2
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    mean = covariance @ (before_precision @ before + rows.T @ peaks / noise**2)
    return MemoryForecast(
        mean=mean,
        covariance=covariance,
        noise_bytes=noise,
        reference_batch=reference,
        has_workers_in_ram=has_workers_in_ram,
        seen=tuple(seen),
    )


def _prior(scale: float) -> tuple[Floats, Floats]:
    """Means of the coefficients, in the order of `_rows`, and the inverse of their covariance."""
    means = np.array([1 - _GROWTH, _GROWTH, 0.0, 0.0, 0.0, 0.0, _WORKER, 0.0, 0.0, 0.0, 0.0])
    halves = [_HALF_BASE_SD] * 2 + [_HALF_GROWTH_SD] * 2
    others = [_WORKER_SD, _QUEUE_SD, _VARIANT_SD, _VARIANT_SD, _GROUP_SD]
    sds = np.array([_BASE_SD, _GROWTH_SD, *halves, *others])
    alike = np.eye(len(sds))
    for one, other in ((2, 3), (4, 5)):  # base and growth of bfloat16 and of float16
        alike[one, other] = alike[other, one] = _HALVES_ALIKE
    covariance = scale**2 * np.outer(sds, sds) * alike
    return scale * means, np.asarray(np.linalg.inv(covariance), dtype=np.float64)


def _rows(configs: Sequence[TrainingConfig], reference_batch: int, *, has_workers: bool) -> Floats:
    """What the coefficients are multiplied by, (configs, coefficients)."""
    batch, queue, workers, bfloat16, float16, channels_last, compiled, accumulates, is_group, is_dp = _table(configs)
    relative, counted = batch / reference_batch, float(has_workers)
    return np.column_stack(
        [
            np.ones(len(configs)),
            relative,
            bfloat16,
            float16,
            relative * bfloat16,
            relative * float16,
            counted * workers,
            counted * queue * relative,
            np.maximum(channels_last, compiled),
            accumulates,
            np.maximum(is_group, is_dp),
        ]
    )


def _table(configs: Sequence[TrainingConfig]) -> Floats:
    """What memory depends on, (kinds, configs), in the order of `_values`."""
    return np.array([_values(config) for config in configs], dtype=np.float64).reshape(len(configs), _VALUES).T


@lru_cache(maxsize=16_384)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """Thousands are asked for before each trial, of much the same settings."""
    return (
        config.micro_batch_size,
        config.num_workers * (config.prefetch_factor or TORCH_PREFETCH_FACTOR),
        config.num_workers,
        config.amp_dtype == "bfloat16",
        config.amp_dtype == "float16",
        config.channels_last,
        config.compile,
        config.grad_accum_steps > 1,
        config.process_count > 1,
        config.strategy == "dp",
    )
