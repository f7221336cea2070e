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
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autotune.core.floats import Floats
from autotune.core.rules import TORCH_PREFETCH_FACTOR
from autotune.core.training_config import TrainingConfig

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
_HALF_PRECISIONS = ("bfloat16", "float16")
_ASKED = 11  # figures of `_asks_of`


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
        variance = np.einsum("ij,jk,ik->i", rows, self.covariance, rows) + self.noise_bytes**2
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
        fits = np.any(np.all(asked[:, None] <= within, axis=2), axis=1)
        fails = np.any(np.all(asked[:, None] >= over, axis=2), axis=1)
        return np.asarray(fits & ~fails, dtype=np.bool_)

    def _asks(self, configs: Sequence[TrainingConfig]) -> Floats:
        """What memory grows with, (configs, kinds): whoever has no more of any kind takes no more."""
        rows = [_asks_of(config, has_workers=self.has_workers_in_ram) for config in configs]
        return np.array(rows, dtype=np.float64).reshape(len(configs), _ASKED)


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
    """Means of the coefficients, in the order of `_row`, and the inverse of their covariance."""
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
    return np.array([_row(config, reference_batch, has_workers=has_workers) for config in configs], dtype=np.float64)


def _asks_of(config: TrainingConfig, *, has_workers: bool) -> tuple[int, ...]:
    workers = config.num_workers if has_workers else 0
    return (
        config.micro_batch_size,
        config.amp_dtype not in _HALF_PRECISIONS,
        workers,
        workers * (config.prefetch_factor or TORCH_PREFETCH_FACTOR),
        config.channels_last,
        not config.channels_last,  # of a layout, and of what is compiled, neither is known to take more
        config.compile,
        not config.compile,
        config.grad_accum_steps > 1,
        config.process_count > 1,
        config.strategy == "dp",
    )


def _row(config: TrainingConfig, reference_batch: int, *, has_workers: bool) -> list[float]:
    batch = config.micro_batch_size / reference_batch
    workers = config.num_workers if has_workers else 0
    held = workers * (config.prefetch_factor or TORCH_PREFETCH_FACTOR) * batch
    halves = [float(config.amp_dtype == half) for half in _HALF_PRECISIONS]
    return [
        1.0,
        batch,
        *halves,
        *(batch * is_half for is_half in halves),
        float(workers),
        held,
        float(config.channels_last or config.compile),
        float(config.grad_accum_steps > 1),
        float(config.process_count > 1 or config.strategy == "dp"),
    ]
